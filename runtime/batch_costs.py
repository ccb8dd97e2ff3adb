"""What a row more of one sequence costs a batch: the figures that its controllers decide by."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from time import perf_counter

from outrider.engines.engine import PREFILL_CHUNK
from outrider.engines.packed import Segment, SequencesEngine
from outrider.runtime.costs import interpolate
from outrider.runtime.scheduler import DRAFT, TARGET

_LENGTH = 128  # tokens of context
_REPEATS = 5
# Seconds outside the engines: of a round, of a lane in it, of a draft step and what is thought about it.
_ROUND_HOST, _LANE_HOST, _DRAFT_HOST = 1e-4, 1e-4, 2.5e-4
_FORGETTING = 0.1  # a pass
_RATIO = 8.0  # of seconds to those expected that is still believed


@dataclass(eq=False)
class BatchCosts:
    """Seconds of passes by their rows, whoever's these are.

    A row more of one sequence makes all wait. So a round of one costs it what the pass takes without any drafts, and
    for each draft what all lanes together lose: with that, the best round for each is the best for the batch.

    Args:
        target: of a pass of ``target_rows``, all of one sequence; ``lane`` more for each sequence more.
        draft: of a draft pass behind one of the target, whose weights are in the processor's caches then;
            ``draft_step`` behind another draft pass.
        lanes: sequences that run now.
        rows: of the last pass of the target, all together.
        drafting: how many lanes share a pass of the draft of late.
    """

    largest_k: int
    target_rows: Sequence[int]
    target: Sequence[float]
    lane: float = 0.0
    draft_rows: Sequence[int] = ()
    draft: Sequence[float] = ()
    draft_step: Sequence[float] = ()
    lanes: int = 1
    rows: int = 1
    drafting: float = 1.0
    origin = "measured at start"

    def __post_init__(self) -> None:
        self._pace = {TARGET: 1.0, DRAFT: 1.0}  # seconds of late to those measured
        self._last = TARGET
        self.begin(self.lanes)

    def begin(self, lanes: int) -> None:
        """A round of so many lanes: reckoned once for all of them."""
        self.lanes = lanes
        plain = self._pass(TARGET, lanes, lanes)
        others = max(lanes, self.rows) * (lanes - 1) / lanes
        self._rounds = [self.round_host + plain]
        for k in range(1, self.largest_k + 1):
            # Passes grow in steps: each draft pays what all drafts of the pass cost on average, not what one more adds.
            rows = others + 1 + k
            row = (self._pass(TARGET, lanes, rows) - plain) / (rows - lanes)
            self._rounds.append(self._rounds[0] + lanes * k * row)

    def ran(self, role: str, lanes: int, rows: int, seconds: float) -> None:
        """A pass, and what it took: a measurement at the start was of another hour."""
        ratio = seconds / self._pass(role, lanes, rows)
        self._pace[role] *= min(_RATIO, max(1 / _RATIO, ratio)) ** _FORGETTING
        self._last = role
        if role == TARGET:
            self.rows = rows
        else:
            self.drafting += (lanes - self.drafting) * _FORGETTING

    @property
    def round_host(self) -> float:
        return _ROUND_HOST + _LANE_HOST * self.lanes

    def rounds(self, length: int) -> list[float]:
        """See ``Costs.rounds``."""
        return self._rounds

    def first_step(self, rows: int, length: int) -> float:
        """See ``Costs.first_step``: its share of a pass that some lanes draft in together, and what its rows add."""
        together, more = (self._draft(self.draft, self.drafting + extra) for extra in (0, rows - 1))
        return self.lanes * (together / self.drafting + more - together + _DRAFT_HOST)

    def step(self, length: int) -> float:
        """See ``Costs.step``."""
        return self.lanes * (self._draft(self.draft_step, self.drafting) / self.drafting + _DRAFT_HOST)

    def _pass(self, role: str, lanes: int, rows: float) -> float:
        if role == DRAFT:
            return self._draft(self.draft if self._last == TARGET else self.draft_step, rows)
        return self._pace[TARGET] * (interpolate(self.target_rows, self.target, rows) + self.lane * (lanes - 1))

    def _draft(self, table: Sequence[float], rows: float) -> float:
        return self._pace[DRAFT] * interpolate(self.draft_rows, table, rows)


def measure_costs(target: SequencesEngine, draft: SequencesEngine | None, largest_k: int) -> BatchCosts:
    """A second or two of passes. What the caches held is overwritten."""
    wide = [
        rows
        for rows in (10, 12, 16, 20, 24, 32, 64)
        if target.sequences > 1 and largest_k + 1 < rows <= target.most_rows
    ]
    target_rows = [*range(1, largest_k + 2), *wide]
    length = min(_LENGTH, target.info.capacity - PREFILL_CHUNK)
    lanes = min(target.sequences, largest_k + 1)
    alone = [[Segment(0, length, [1] * rows, rows)] for rows in target_rows]
    each = [Segment(lane, length, [1], 1) for lane in range(lanes)]
    *seconds, together = _time(target, length, [*alone, each])
    lane = max(0.0, together - seconds[lanes - 1]) / max(1, lanes - 1)
    costs = BatchCosts(largest_k, target_rows, seconds, lane)
    if draft is None:
        return costs
    draft_rows = [1, 2, 4, 8, 64]
    passes = [[Segment(0, length, [1] * rows, 1)] for rows in draft_rows]
    cold = _time(draft, length, passes, lambda: target.run(alone[0]))
    return replace(costs, draft_rows=draft_rows, draft=cold, draft_step=_time(draft, length, passes))


def _time(
    engine: SequencesEngine,
    length: int,
    passes: Sequence[Sequence[Segment]],
    before: Callable[[], object] = lambda: None,
) -> list[float]:
    """Least seconds of passes behind ``length`` tokens, all in turn, so that drift meets all alike.

    Not the median: the one who starts a server often does something else at the same time.
    """
    for sequence in range(engine.sequences):
        for start in range(0, length, engine.most_rows):
            engine.run([Segment(sequence, start, [1] * min(engine.most_rows, length - start), 1)])
    samples: list[list[float]] = [[] for _ in passes]
    for _ in range(_REPEATS + 1):
        for segments, times in zip(passes, samples, strict=True):
            before()
            begin = perf_counter()
            engine.run(segments)
            times.append(perf_counter() - begin)
    return [min(times) for times in samples]
