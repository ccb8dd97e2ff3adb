"""What a row more of one sequence costs a batch: the figures that its controllers decide by."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from time import perf_counter

from outrider.engines.packed import PackedEngine, Segment
from outrider.runtime.costs import interpolate

_LENGTH = 128  # tokens of context
_REPEATS = 5


@dataclass(eq=False)
class BatchCosts:
    """Seconds of passes by their rows, whoever's these are.

    A row more of one sequence makes all wait. So a round of one costs it what the pass takes without its drafts, and
    for each draft what all lanes together lose: with that, the best round for each is the best for the batch.

    Args:
        lanes: sequences that run now.
        rows: of the last pass of the target, all together.
        host: of a round outside the engines, a lane.
    """

    largest_k: int
    target_rows: Sequence[int]
    target: Sequence[float]
    draft_rows: Sequence[int] = ()
    draft: Sequence[float] = ()
    lanes: int = 1
    rows: int = 1
    host: float = 3e-4
    origin = "measured at start"

    @property
    def round_host(self) -> float:
        return self.host * self.lanes

    def rounds(self, length: int) -> list[float]:
        """See ``Costs.rounds``."""
        others = self.rows * (self.lanes - 1) / self.lanes
        plain, *more = (interpolate(self.target_rows, self.target, others + k + 1) for k in range(self.largest_k + 1))
        return [self.round_host + seconds for seconds in (plain, *(plain + self.lanes * (x - plain) for x in more))]

    def first_step(self, rows: int, length: int) -> float:
        """See ``Costs.first_step``: lanes draft together, each its share of the pass."""
        together = interpolate(self.draft_rows, self.draft, self.lanes)
        return together + self.lanes * (interpolate(self.draft_rows, self.draft, self.lanes - 1 + rows) - together)

    def step(self, length: int) -> float:
        """See ``Costs.step``."""
        return interpolate(self.draft_rows, self.draft, self.lanes)


def measure_costs(target: PackedEngine, draft: PackedEngine | None, largest_k: int) -> BatchCosts:
    """A second or two of passes. What the caches held is overwritten."""
    wide = [rows for rows in (16, 32, 64) if rows <= target.most_rows]
    target_rows = [*range(1, largest_k + 2), *(rows for rows in wide if rows > largest_k + 1)]
    target_seconds = _time_rows(target, target_rows)
    if draft is None:
        return BatchCosts(largest_k, target_rows, target_seconds)
    draft_rows = [1, 2, 4, 8, *wide]
    return BatchCosts(largest_k, target_rows, target_seconds, draft_rows, _time_rows(draft, draft_rows))


def _time_rows(engine: PackedEngine, counts: Sequence[int]) -> list[float]:
    """Median seconds of passes, all in turn, so that drift meets all alike."""
    length = min(_LENGTH, engine.info.capacity - engine.most_rows)
    engine.run([Segment(0, 0, [1] * min(length, engine.most_rows), 1)])
    samples: list[list[float]] = [[] for _ in counts]
    for _ in range(_REPEATS + 1):
        for count, times in zip(counts, samples, strict=True):
            start = perf_counter()
            engine.run([Segment(0, length, [1] * count, count)])
            times.append(perf_counter() - start)
    return [statistics.median(times[1:]) for times in samples]
