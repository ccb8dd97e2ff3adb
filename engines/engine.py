"""What the loop asks of an engine: a plan for a number of rows, and logits from it. One protocol for every backend."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from outrider.engines.bundle import ModelInfo
from outrider.engines.memory import Memory

PREFILL_CHUNK = 256  # rows of a prefill pass; a longer prompt takes several
NO_CUTOFF = -3e38
# ONNX Runtime's products on the CPU add up the first so many terms, then the next, and join the sums; but all terms at
# once where few columns are wanted. Scores are sums over a head, and their columns are the positions: a row's bits
# would depend on how many rows stand behind it. So wide heads have no fewer positions than this in attention.
SUMMED_AT_ONCE = 128
SHORT_CONTEXT = 65
TILE_ROWS = 128
_UNKNOWN = -1  # no key of a noise slot
CHOICE_MARGIN = 1e-4  # of a token's Gumbel score: far above what float32 arithmetic can change it by


class PlanShape(NamedTuple):
    """A pass of ``rows`` tokens a sequence that gives logits of ``logit_rows`` of them."""

    rows: int
    logit_rows: int


def padded_rows(rows: int, min_rows: int) -> int:
    """The fewest rows, at least so many, of a pass whose every tile has ``min_rows``.

    ONNX Runtime cuts quantized products into tiles of ``TILE_ROWS``; where one row has a kernel of its own, it takes a
    last tile of one row, too.
    """
    last = (rows - 1) % TILE_ROWS + 1
    return rows + max(0, min_rows - last)


def plan_table(tiers: Sequence[int]) -> tuple[PlanShape, ...]:
    """The fixed shapes of a target, rising: a plain step of two rows, a verify pass for each K, a prefill chunk.

    Args:
        tiers: the values of K, one above 0 among them; 0 adds a step of one row, whose bits are seldom the others'.
    """
    narrow = {PlanShape(rows, rows) for rows in (2, *(k + 1 for k in tiers))}
    return (*sorted(narrow), PlanShape(PREFILL_CHUNK, max(tiers) + 1))


# Of a draft: a step, a round's first step, a prefill chunk. Its last row alone is ever wanted.
DRAFT_TABLE = (PlanShape(1, 1), PlanShape(2, 1), PlanShape(PREFILL_CHUNK, 1))


def smallest_shape(table: Sequence[PlanShape], rows: int, logit_rows: int) -> PlanShape | None:
    """The first shape of a rising table that takes ``rows`` tokens and gives ``logit_rows`` rows; None if none does."""
    return next((shape for shape in table if shape.rows >= rows and shape.logit_rows >= logit_rows), None)


def served_tiers(tiers: Sequence[int], table: Sequence[PlanShape]) -> tuple[int, ...]:
    """The values of K that an engine was made for: all, or those in its table."""
    return tuple(k for k in tiers if not table or PlanShape(k + 1, k + 1) in table)


def noise_slots(tiers: Sequence[int]) -> int:
    """Positions whose noise a device holds: those of a round, and those of the next while it runs."""
    return 2 * (max(tiers) + 2)


class Plan(Protocol):
    """One execution shape with everything bound: ``rows`` tokens a sequence in, ``logit_rows`` rows of logits out."""

    rows: int
    logit_rows: int

    def run(self, input_ids: NDArray[np.int64], cache_lengths: NDArray[np.int32]) -> NDArray[np.float32]:
        """Append tokens to the cache and return logits of the last of them.

        Args:
            input_ids: ``[B, n]``, n <= ``rows``; missing rows are padded, written behind the valid ones and ignored.
            cache_lengths: ``[B]``, tokens already in the cache. A smaller length than before is a rollback.

        Returns:
            float32 ``[B, min(n, logit_rows), vocab_size]``, row i the distribution after the i-th of the last tokens.
            A view that the next run overwrites.
        """
        ...

    def submit(self, input_ids: NDArray[np.int64], cache_lengths: NDArray[np.int32]) -> None:
        """Start the same pass without waiting for it, on a graph with heads (``export/heads.py``)."""
        ...

    def choices(self) -> tuple[NDArray[np.int64], NDArray[np.int32]]:
        """``choices`` and ``near`` of the submitted pass, ``[B, min(n, logit_rows)]``: all that comes to the host."""
        ...

    def logits(self, row: int) -> NDArray[np.float32]:
        """float32 ``[vocab_size]``: what a row of the submitted pass chose from, batch 1."""
        ...


class Engine(Protocol):
    """A graph that runs, with the caches of ``batch`` sequences and its outputs bound once.

    ``device`` names what decides the bits: processor, provider, threads and engine version. ``table`` are the only
    shapes that it runs, empty for any. ``heads`` are the inputs of the graph's heads, None for a graph without.
    """

    info: ModelInfo
    batch: int
    device: str
    table: list[PlanShape]

    @property
    def memory(self) -> Memory: ...

    @property
    def heads(self) -> HeadInputs | None: ...

    def plan(self, rows: int, logit_rows: int, exact: bool = True) -> Plan:
        """The smallest plan that takes ``rows`` tokens and gives ``logit_rows`` rows of logits; made once and kept.

        ``exact`` gives a one-row pass the bits of a wider one where the graph can, at the price of a spare row in
        attention; without it, it is as fast as it can be.
        """
        ...

    def describe(self) -> dict[str, Any]:
        """Every option that shapes speed or results, for ``outrider inspect``."""
        ...


class HeadInputs:
    """What the heads of a target and its draft on one device choose by; see ``export/heads.py``. Batch 1."""

    def __init__(self, memory: Memory, vocab_size: int, slots: int) -> None:
        self.noise = memory.buffer((1, slots, vocab_size), "float32")
        self.temperature = memory.buffer((1, 1, 1), "float32")
        self.cutoff = memory.buffer((1, 1, 1), "float32")
        self.buffers = {"noise": self.noise, "temperature": self.temperature, "cutoff": self.cutoff}
        size = vocab_size * self.noise.dtype.itemsize
        self._slots = [self.noise.section(slot * size, (vocab_size,), "float32") for slot in range(slots)]
        self._keys: list[int | None] = [None] * slots  # of what each slot holds; None for zeros
        self.set_law(1, NO_CUTOFF)

    def set_law(self, temperature: float, cutoff: float) -> None:
        """Scores are (logit - best) / temperature + noise, of tokens for which the first part reaches ``cutoff``."""
        self.temperature.write(temperature)
        self.cutoff.write(cutoff)

    def clear_noise(self) -> None:
        """The best token wins."""
        for slot, key in enumerate(self._keys):
            if key is not None:
                self._keys[slot] = _UNKNOWN  # should an interrupt come in between
                self._slots[slot].write(0)
                self._keys[slot] = None

    def set_noise(self, position: int, key: int, noise: Callable[[int], NDArray[np.float32]]) -> None:
        """Have ``noise(key)``, float32 ``[V]``, in the slot of a position, unless it is there."""
        slot = position % len(self._slots)
        if self._keys[slot] != key:
            self._keys[slot] = _UNKNOWN
            self._slots[slot].write(noise(key))
            self._keys[slot] = key
