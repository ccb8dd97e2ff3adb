"""Where draft tokens come from. A drafter proposes; it never decides."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol


class Drafter(Protocol):
    """``passes`` and ``seconds`` count the engine work behind the proposals: 0 for a drafter without a model."""

    @property
    def passes(self) -> int: ...

    @property
    def seconds(self) -> float: ...

    def begin(self, prompt: Sequence[int]) -> None:
        """A new request: forget the last one."""
        ...

    def propose(self, tokens: Sequence[int], k: int) -> list[int]:
        """Up to ``k`` >= 1 tokens that may follow ``tokens`` (prompt and all committed output, same list growing)."""
        ...


class NoDrafter:
    """Plain decoding."""

    passes = 0
    seconds = 0.0

    def begin(self, prompt: Sequence[int]) -> None:
        pass

    def propose(self, tokens: Sequence[int], k: int) -> list[int]:
        return []
