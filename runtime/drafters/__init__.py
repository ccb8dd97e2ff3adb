"""Where draft tokens come from. A drafter proposes; it never decides."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence

from outrider.runtime.accept import Draft
from outrider.runtime.choose import Row
from outrider.runtime.sampling.history import History

# Draws a token from a row of a draft model, as the acceptance rule wants it drawn.
Draw = Callable[[Row], Draft]


class Drafter(ABC):
    """``passes`` and ``seconds`` count the engine work behind the proposals: 0 for a drafter without a model."""

    @property
    def passes(self) -> int:
        return 0

    @property
    def seconds(self) -> float:
        return 0.0

    def begin(self) -> None:  # noqa: B027  # most have nothing to forget
        """A new request: the history of the next call is another one."""

    @abstractmethod
    def propose(self, history: History, k: int, draw: Draw) -> Sequence[Draft]:
        """Up to ``k`` >= 1 tokens that may follow ``history``, which is as it was when the call returns."""
        ...

    def learn(self, history: History, committed: int, seconds: float) -> None:  # noqa: B027  # most draft as before
        """What became of the round: the last ``committed`` tokens of ``history``, by a verify pass of ``seconds``."""


class ModelSource(Drafter):
    """A drafter with a model, whose cache may lack tokens.

    ``tiers`` are the only numbers of tokens that it drafts, empty for any.
    """

    tiers: Sequence[int] = ()

    @abstractmethod
    def lacking(self, history: History) -> int:
        """How many tokens of ``history`` the next proposal has to append."""
        ...


class NoDrafter(Drafter):
    """Plain decoding."""

    def propose(self, history: History, k: int, draw: Draw) -> Sequence[Draft]:
        return []
