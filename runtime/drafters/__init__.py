"""Where draft tokens come from. A drafter proposes; it never decides."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from outrider.runtime.accept import Draft
from outrider.runtime.choose import Row
from outrider.runtime.sampling.history import History

# Draws a token from a row of a draft model, as the acceptance rule wants it drawn.
Draw = Callable[[Row], Draft]


class Drafter(Protocol):
    """``passes`` and ``seconds`` count the engine work behind the proposals: 0 for a drafter without a model."""

    @property
    def passes(self) -> int: ...

    @property
    def seconds(self) -> float: ...

    def begin(self) -> None:
        """A new request: the history of the next call is another one."""
        ...

    def propose(self, history: History, k: int, draw: Draw) -> Sequence[Draft]:
        """Up to ``k`` >= 1 tokens that may follow ``history``, which is as it was when the call returns."""
        ...


class NoDrafter:
    """Plain decoding."""

    passes = 0
    seconds = 0.0

    def begin(self) -> None:
        pass

    def propose(self, history: History, k: int, draw: Draw) -> Sequence[Draft]:
        return []
