"""What passes cost on this device: a plain table of seconds that the controller and the replay of traces decide by."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import inf
from typing import Protocol


class RoundCosts(Protocol):
    """What a controller asks, in seconds; see ``Costs``."""

    @property
    def largest_k(self) -> int: ...

    @property
    def round_host(self) -> float: ...

    def rounds(self, length: int) -> Sequence[float]: ...

    def first_step(self, rows: int, length: int) -> float: ...

    def step(self, length: int) -> float: ...


@dataclass(frozen=True, eq=False)  # compared, and hashed in every round, by identity
class Costs:
    """Seconds by context length (tokens in the cache), linear between the lengths that were measured.

    Args:
        lengths: rising.
        verify: ``[K + 1][length]``, a pass that verifies 0, 1, .. K drafts.
        draft_rows: rising from 1: how many tokens a draft pass appends.
        draft: ``[draft_rows][length]``, a draft pass behind a target pass, whose weights are in the processor's caches
            then; empty without a draft model.
        draft_step: ``[length]``, a draft pass of one token behind another.
        round_host: of a round outside the engines.
        draft_host: of a draft step outside the engine.
    """

    lengths: tuple[int, ...]
    verify: tuple[tuple[float, ...], ...]
    draft_rows: tuple[int, ...] = ()
    draft: tuple[tuple[float, ...], ...] = ()
    draft_step: tuple[float, ...] = ()
    round_host: float = 0.0
    draft_host: float = 0.0

    def __post_init__(self) -> None:
        steps = (self.draft_step,) if self.draft else ()
        for name, table in (("verify", self.verify), ("draft", self.draft), ("draft_step", steps)):
            if any(len(row) != len(self.lengths) or not all(0 < x < inf for x in row) for row in table):
                raise ValueError(f"costs.{name} wants a time above 0 for each of {len(self.lengths)} lengths")
        if not 0 <= self.round_host < inf or not 0 <= self.draft_host < inf:
            raise ValueError("costs.round_host and draft_host must be 0 or more")
        if not self.verify or not self.lengths or len(self.draft) != len(self.draft_rows):
            raise ValueError("costs.verify, lengths or draft_rows is not whole")
        if list(self.lengths) != sorted(set(self.lengths)) or list(self.draft_rows) != sorted(set(self.draft_rows)):
            raise ValueError("costs.lengths and draft_rows must rise")

    @property
    def largest_k(self) -> int:
        return len(self.verify) - 1

    def rounds(self, length: int) -> tuple[float, ...]:
        """Seconds of a round with 0, 1, .. K drafts to verify behind ``length`` tokens, drafting left out."""
        return _at(self, length // _GRAIN * _GRAIN)[0]

    def first_step(self, rows: int, length: int) -> float:
        """Seconds of a round's first draft step, whose pass appends ``rows`` tokens."""
        times = _at(self, length // _GRAIN * _GRAIN)[1]
        return interpolate(self.draft_rows, times, rows) + self.draft_host

    def step(self, length: int) -> float:
        """Seconds of each draft step behind it."""
        return interpolate(self.lengths, self.draft_step, length // _GRAIN * _GRAIN) + self.draft_host


_GRAIN = 32  # tokens of context that cost the same


@lru_cache(maxsize=256)
def _at(costs: Costs, length: int) -> tuple[tuple[float, ...], tuple[float, ...]]:
    verify = tuple(interpolate(costs.lengths, row, length) + costs.round_host for row in costs.verify)
    return verify, tuple(interpolate(costs.lengths, row, length) for row in costs.draft)


def interpolate(xs: Sequence[int], ys: Sequence[float], x: float) -> float:
    """Linear, beyond the last two as between them, and before the first as at it."""
    if len(xs) == 1 or x <= xs[0]:
        return ys[0]
    right = min(bisect_right(xs, x), len(xs) - 1)
    low, high = xs[right - 1], xs[right]
    # A longer pass is never taken to cost less than the longest that was measured.
    slope = (ys[right] - ys[right - 1]) / (high - low)
    return ys[right - 1] + (slope if x <= high else max(0.0, slope)) * (x - low)
