"""What a request has become so far. Plain and speculative decoding commit through here, token by token, in order."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field
from enum import Enum


class Origin(str, Enum):
    """Where a committed token came from."""

    PLAIN = "plain"  # the target alone: the prefill's token, or a round with nothing drafted
    ACCEPTED = "accepted"  # a draft token that the target chose too
    CORRECTION = "correction"  # the target's token where a draft token was refused
    BONUS = "bonus"  # the target's token behind drafts that were all accepted


@dataclass
class Output:
    """Tokens committed for one request. ``finish_reason`` is None while it runs, then ``eos`` or ``length``."""

    max_new_tokens: int
    eos_token_ids: Collection[int]
    tokens: list[int] = field(default_factory=list)
    origins: list[Origin] = field(default_factory=list)
    finish_reason: str | None = None

    def __post_init__(self) -> None:
        if self.max_new_tokens == 0:
            self.finish_reason = "length"

    @property
    def remaining(self) -> int:
        return self.max_new_tokens - len(self.tokens)

    def commit_token(self, token: int, origin: Origin) -> bool:
        """Append a token; False when the request ends with it, and whatever follows in its block does not exist."""
        self.tokens.append(token)
        self.origins.append(origin)
        if token in self.eos_token_ids:
            self.finish_reason = "eos"
        elif self.remaining == 0:
            self.finish_reason = "length"
        return self.finish_reason is None
