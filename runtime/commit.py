"""What a request has become so far. Plain and speculative decoding commit through here, token by token, in order."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field
from enum import Enum

from outrider.runtime.choose import TokenLogprobs
from outrider.runtime.sampling.history import History
from outrider.runtime.text import StoppingStream


class Origin(str, Enum):
    """Where a committed token came from."""

    PLAIN = "plain"  # the target alone: the prefill's token, or a round with nothing drafted
    ACCEPTED = "accepted"  # a draft token that the target chose too
    CORRECTION = "correction"  # the target's token where a draft token was refused
    BONUS = "bonus"  # the target's token behind drafts that were all accepted


@dataclass
class Output:
    """Tokens committed for one request.

    ``pieces`` holds for each token the text that became certain with it; together they are the text. ``finish_reason``
    is None while the request runs, then ``eos``, ``stop`` (a stop token or string), ``grammar`` (it is complete),
    ``length`` or ``cancelled``.
    """

    history: History
    text: StoppingStream
    max_new_tokens: int
    min_new_tokens: int = 0
    eos_token_ids: Collection[int] = ()
    stop_token_ids: Collection[int] = ()
    tokens: list[int] = field(default_factory=list)
    origins: list[Origin] = field(default_factory=list)
    pieces: list[str] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    finish_reason: str | None = None

    def __post_init__(self) -> None:
        if self.max_new_tokens == 0:
            self.finish_reason = "length"

    @property
    def remaining(self) -> int:
        return self.max_new_tokens - len(self.tokens)

    def commit_token(self, token: int, origin: Origin, logprobs: TokenLogprobs | None = None) -> bool:
        """Append a token; False when the request ends with it, and whatever follows in its block does not exist.

        A token that ends the request is among the tokens, and its text is not part of the text.
        """
        self.history.push(token)  # first: its grammar may refuse
        self.tokens.append(token)
        self.origins.append(origin)
        if logprobs is not None:
            self.logprobs.append(logprobs)
        piece = ""
        if token in self.eos_token_ids:
            self.finish_reason = "eos"
        elif token in self.stop_token_ids:
            self.finish_reason = "stop"
        else:
            piece = self.text.push(token, watch=len(self.tokens) > self.min_new_tokens)
            grammar = self.history.grammar
            if self.text.stopped:
                self.finish_reason = "stop"
            elif grammar is not None and grammar.complete:
                self.finish_reason = "grammar"
            elif self.remaining == 0:
                self.finish_reason = "length"
        if self.finish_reason is not None:
            piece += self.text.finish()
            if self.text.stopped:
                self.finish_reason = "stop"
        self.pieces.append(piece)
        return self.finish_reason is None

    def cancel(self, length: int) -> None:
        """End the request behind its first ``length`` tokens, whatever its block went on with."""
        if length < len(self.tokens) or self.finish_reason is None:
            for entries in (self.tokens, self.origins, self.pieces, self.logprobs):
                del entries[length:]
            self.finish_reason = "cancelled"
