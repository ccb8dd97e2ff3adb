"""A draft model: K steps with a cache of its own, rolled back to what was committed."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from contextlib import closing
from itertools import islice

import numpy as np
from numpy.typing import NDArray

from outrider.engines.errors import OutriderError
from outrider.runtime.accept import Draft
from outrider.runtime.choose import Logits, Row
from outrider.runtime.drafters import Draw, ModelSource
from outrider.runtime.sampling.history import History
from outrider.runtime.sequence import SequenceModel

_NO_TOKEN = -1e29  # a reduced head gives less to the tokens that it has not


class DraftModel(ModelSource):
    """What drafters with a model have in common; ``_agreed`` cached tokens are known to be those of the text."""

    def __init__(self, model: SequenceModel) -> None:
        self._model = model
        self.begin()

    @property
    def passes(self) -> int:
        return self._model.passes

    @property
    def seconds(self) -> float:
        return self._model.seconds

    def begin(self) -> None:
        self._agreed = 0


def no_numbers() -> OutriderError:
    return OutriderError("the draft model gives no numbers; export it again, or use --k 0")


class ModelDrafter(DraftModel):
    """See ``drafters.Drafter``. It stops early where nothing could stand: behind an end, and past its own context."""

    def __init__(self, model: SequenceModel) -> None:
        super().__init__(model)
        self._ids: NDArray[np.int64] | None = None  # the tokens of a reduced head, or all
        self._work: Logits = np.empty(0, np.float32)

    def propose(self, history: History, k: int, draw: Draw) -> Sequence[Draft]:
        with closing(self._steps(history, draw)) as steps:
            return [draft for draft, _ in islice(steps, k)]

    def lacking(self, history: History) -> int:
        self._keep(history)
        return len(history) - self._model.length

    def steps(self, history: History, draw: Draw) -> Generator[tuple[Draft, float], None, None]:
        """Drafts one after the other, each with its probability in the draft model, whatever the options of sampling.

        They are in ``history`` until the iterator is closed.
        """
        with closing(self._steps(history, draw)) as steps:
            for draft, row in steps:
                yield draft, self._probability(row, draft.token)

    def _probability(self, row: Row, token: int) -> float:
        assert not isinstance(row, np.int64)  # drawn on the host
        if self._ids is None:
            self._ids = np.flatnonzero(row > _NO_TOKEN)
            self._work = np.empty(len(self._ids), np.float32)  # once: memory of this size comes page by page
        np.take(row, self._ids, out=self._work, mode="clip")
        best = self._work.max()
        self._work -= best
        np.exp(self._work, out=self._work)
        return float(np.exp(row[token] - best) / self._work.sum())

    def _steps(self, history: History, draw: Draw) -> Generator[tuple[Draft, Row], None, None]:
        start = len(history)
        self._keep(history)
        try:
            while len(history) <= self._model.max_length and not history.ended():
                # What the cache lacks: the last token, and after a fully accepted round the last draft before it.
                logits = self._model.extend(history.tokens[self._model.length :], 1)[0]
                try:
                    draft = draw(logits)
                    history.push(draft.token)
                except Exception as error:
                    if not np.isfinite(logits).all():
                        raise no_numbers() from error
                    return  # masks or a processor fail behind a draft: where the text gets there, the choice fails
                yield draft, logits
        finally:
            history.rollback(start)
            self._agreed = min(start, self._model.length)

    def _keep(self, history: History) -> None:
        self._model.keep(history.tokens, self._agreed)
        self._agreed = self._model.length
