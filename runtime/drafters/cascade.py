"""The cheapest drafter that has something to say: prompt lookup where the text repeats itself, else the draft model."""

from __future__ import annotations

from collections.abc import Sequence

from outrider.runtime.accept import Draft
from outrider.runtime.drafters import Drafter, Draw
from outrider.runtime.drafters.ngram import NgramDrafter
from outrider.runtime.sampling.history import History


class CascadeDrafter(Drafter):
    """See ``drafters.Drafter``. The model catches up in one pass with the rounds that it was not asked in.

    Args:
        lookup: without a table of next tokens: the model knows better.
    """

    def __init__(self, lookup: NgramDrafter, model: Drafter) -> None:
        self._lookup = lookup
        self._model = model

    @property
    def passes(self) -> int:
        return self._model.passes

    @property
    def seconds(self) -> float:
        return self._model.seconds

    def begin(self) -> None:
        self._lookup.begin()
        self._model.begin()

    def propose(self, history: History, k: int, draw: Draw) -> Sequence[Draft]:
        return self._lookup.propose(history, k, draw) or self._model.propose(history, k, draw)
