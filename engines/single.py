"""An engine of one sequence, asked as if it had many: for graphs that take no packed rows, on any device."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from outrider.engines.engine import PREFILL_CHUNK, Engine, PlanShape, padded_rows
from outrider.engines.packed import SavedCache, Segment


class SingleEngine:
    """See ``SequencesEngine``. Its caches are not copied: ``token_bytes`` is 0, so that nothing is kept of them."""

    sequences = 1
    most_rows = PREFILL_CHUNK
    token_bytes = 0

    def __init__(self, engine: Engine, min_rows: int) -> None:
        self.info = engine.info
        self.device = engine.device
        self.min_rows = min_rows
        self.table: Sequence[PlanShape] = engine.table
        self._engine = engine
        self._length = np.zeros(1, np.int32)

    def run(self, segments: Sequence[Segment]) -> list[NDArray[np.float32]]:
        """One pass of the one segment."""
        (segment,) = segments
        rows, logit_rows = (padded_rows(count, self.min_rows) for count in (len(segment.tokens), segment.wanted))
        plan = self._engine.plan(rows, logit_rows)
        self._length[0] = segment.length
        return [plan.run(np.array([segment.tokens], np.int64), self._length)[0, -segment.wanted :]]

    def copy(self, source: int, target: int, start: int, end: int) -> None:
        raise AssertionError("there is one sequence")

    def save(self, sequence: int, length: int) -> SavedCache:
        raise AssertionError("nothing is kept")

    def restore(self, sequence: int, saved: SavedCache, start: int, end: int) -> None:
        raise AssertionError("nothing is kept")
