"""Many sequences in one pass: each brings as many rows as it has, and the rows stand one behind the other.

Products, norms and the head see ``R`` rows in all, whoever's they are; only attention sorts them by sequence (see
``PackedLowering`` in ``export/attention.py``). A sequence without rows costs nothing but its cache.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from itertools import accumulate
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from outrider.engines.bundle import ModelInfo
from outrider.engines.engine import SHORT_CONTEXT, SUMMED_AT_ONCE, PlanShape, padded_rows
from outrider.engines.errors import OutriderError
from outrider.engines.memory import HostBuffer, HostMemory
from outrider.engines.ort import OrtSession
from outrider.engines.plan import EngineState

_SHAPES = 128  # of passes that stay bound


SavedCache = list[NDArray[Any]]


class Segment(NamedTuple):
    """The rows of one sequence in a pass.

    ``tokens`` are appended to the ``length`` tokens in its cache (fewer than before is a rollback); logits are wanted
    of the last ``wanted`` of them.
    """

    sequence: int
    length: int
    tokens: Sequence[int]
    wanted: int


class SequencesEngine(Protocol):
    """An engine with the caches of ``sequences`` sequences, asked for rows of some of them at once.

    ``token_bytes`` is what a token of a sequence takes in the caches, 0 where they cannot be copied; ``table`` as of
    ``engine.Engine``.
    """

    info: ModelInfo
    device: str
    table: Sequence[PlanShape]
    sequences: int
    min_rows: int
    most_rows: int

    @property
    def token_bytes(self) -> int: ...

    def run(self, segments: Sequence[Segment]) -> list[NDArray[np.float32]]:
        """One pass.

        Args:
            segments: of different sequences, together of at most ``most_rows`` rows.

        Returns:
            float32 ``[wanted, vocab_size]`` of each segment: views that the next run overwrites.

        Raises:
            OutriderError: a segment does not fit its cache, or the engine fails.
        """
        ...

    def copy(self, source: int, target: int, start: int, end: int) -> None:
        """Copy the positions ``start`` to ``end`` of one sequence's caches to the same places of another's."""
        ...

    def save(self, sequence: int, length: int) -> SavedCache:
        """A copy of the first ``length`` positions of a sequence's caches, ``[H_kv, length, D]`` each."""
        ...

    def restore(self, sequence: int, saved: SavedCache, start: int, end: int) -> None:
        """Write the positions ``start`` to ``end`` of a copy into a sequence's caches."""
        ...


class PackedEngine:
    """See ``SequencesEngine``: a packed graph on the CPU, with the caches of ``sequences`` sequences.

    Args:
        graph: ``ModelInfo.packed_graph`` of the model.
        min_rows: of a pass, from which on all passes give the same bits; others are padded.
        most_rows: of a pass, and of the logits wanted of it; rounded up to one that needs no padding.

    Raises:
        OutriderError: ONNX Runtime is not installed, or the graph does not load.
    """

    def __init__(
        self, graph: Path, info: ModelInfo, *, sequences: int, min_rows: int, most_rows: int, threads: int | None = None
    ) -> None:
        self.info = info
        self.table: Sequence[PlanShape] = ()
        self.sequences = sequences
        self.min_rows = min_rows
        self.most_rows = most_rows = padded_rows(most_rows, min_rows)
        self._session = OrtSession(graph, info, threads=threads, many_shapes=True)
        self.device = self._session.device
        self._learned_positions = "positions" in self._session.input_names
        memory = HostMemory()
        self.state = EngineState(info, sequences, memory)
        # A row alone takes another kernel in attention, and so do positions of wide heads in a short context.
        self._short = SHORT_CONTEXT if info.head_dim > SUMMED_AT_ONCE else 0
        rows = most_rows + max(1, self._short)
        self._ids = memory.buffer((most_rows,), "int64")
        self._positions = memory.buffer((most_rows,), "int64")
        self._sequence_rows = memory.buffer((sequences * rows * 2,), "int64")
        self._packed_rows = memory.buffer((most_rows * 2,), "int64")
        self._wanted = memory.buffer((most_rows,), "int64")
        self._logits = memory.buffer((most_rows * info.vocab_size,), "float32")
        self._query_rows = memory.buffer((sequences,), "int32")
        self._cache_last = memory.buffer((sequences,), "int32")
        self._binding = lru_cache(_SHAPES)(self._bound)

    def run(self, segments: Sequence[Segment]) -> list[NDArray[np.float32]]:
        # Only the sequences from the first to the last that has rows are there at all.
        places = [segment.sequence for segment in segments]
        first = min(places)
        count = max(places) + 1 - first
        attended = [0] * count
        last = [0] * count
        for segment in segments:
            rows = len(segment.tokens)
            rows += self._spare_rows(segment.length, rows)
            end = segment.length + rows
            if end > self.info.capacity:
                raise OutriderError(
                    f"{segment.length} cached tokens and {rows} rows exceed the cache of {self.info.capacity} "
                    "positions; export with a larger --max-length"
                )
            attended[segment.sequence - first] = rows
            last[segment.sequence - first] = end - 1
        self._query_rows.array[:count] = attended
        self._cache_last.array[:count] = last
        total, wanted = self._place(segments, first, count, max(attended))
        self._session.run(self._binding(first, count, total, max(attended), wanted), total)
        logits = self._logits.array.reshape(self.most_rows, -1)
        ends = accumulate(segment.wanted for segment in segments)
        return [logits[end - segment.wanted : end] for segment, end in zip(segments, ends, strict=True)]

    @property
    def token_bytes(self) -> int:
        return self.state.cache_bytes // (self.sequences * self.info.capacity)

    def save(self, sequence: int, length: int) -> SavedCache:
        return [cache.read()[sequence, :, :length].copy() for cache in self.state.caches.values()]

    def restore(self, sequence: int, saved: SavedCache, start: int, end: int) -> None:
        for cache, kept in zip(self.state.caches.values(), saved, strict=True):
            cache.read()[sequence, :, start:end] = kept[:, start:end]

    def copy(self, source: int, target: int, start: int, end: int) -> None:
        for cache in self.state.caches.values():
            array = cache.read()
            array[target, :, start:end] = array[source, :, start:end]

    def _spare_rows(self, length: int, rows: int) -> int:
        return max(int(rows == 1), self._short - length - rows)

    def _place(self, segments: Sequence[Segment], first: int, count: int, most: int) -> tuple[int, int]:
        """Fill the inputs; the number of rows, and of those whose logits are wanted.

        Lists, since a few calls of numpy each would take longer than all else here: caches are cold behind a pass.
        """
        ids: list[int] = []
        positions: list[int] = []
        owners: list[int] = []
        places: list[int] = []
        wanted: list[int] = []
        sorted_rows = [0] * (count * most)
        for sequence, length, tokens, want in segments:
            start, size = len(ids), len(tokens)
            end = start + size
            ids += tokens
            positions += range(length, length + size)
            owners += [sequence - first] * size
            places += range(size)
            wanted += range(end - want, end)
            # Spare rows are its last one again.
            at = (sequence - first) * most
            sorted_rows[at : at + most] = [*range(start, end), *[end - 1] * (most - size)]
        padding = [0] * (padded_rows(len(ids), self.min_rows) - len(ids))
        wanted += [0] * (padded_rows(len(wanted), self.min_rows) - len(wanted))
        total = len(ids) + len(padding)
        self._ids.array[:total] = ids + padding
        if self._learned_positions:
            self._positions.array[:total] = positions + padding
        packed = self._packed_rows.array
        packed[: 2 * total : 2] = owners + padding
        packed[1 : 2 * total : 2] = places + padding
        self._sequence_rows.array[1 : 2 * len(sorted_rows) : 2] = sorted_rows
        self._wanted.array[: len(wanted)] = wanted
        return total, len(wanted)

    def _bound(self, first: int, count: int, total: int, most: int, wanted: int) -> Any:
        """All buffers bound for a pass of a shape, over the caches of ``count`` sequences from ``first`` on."""
        binding = self._session.session.io_binding()
        for name, cache in self.state.caches.items():
            shape = (count, *cache.shape[1:])
            address = cache.pointer + first * cache.read()[0].nbytes
            binding.bind_input(f"past_{name}", "cpu", 0, cache.element, shape, address)
            binding.bind_output(f"present_{name}", "cpu", 0, cache.element, shape, address)
        inputs: dict[str, tuple[HostBuffer, tuple[int, ...]]] = {
            "input_ids": (self._ids, (1, total)),
            "sequence_rows": (self._sequence_rows, (count, most, 2)),
            "packed_rows": (self._packed_rows, (1, total, 2)),
            "query_rows": (self._query_rows, (count,)),
            "cache_last": (self._cache_last, (count,)),
            "logit_rows": (self._wanted, (1, wanted)),
        }
        if self._learned_positions:
            inputs["positions"] = self._positions, (1, total)
        for name, (buffer, shape) in inputs.items():
            binding.bind_input(name, "cpu", 0, buffer.element, shape, buffer.pointer)
        logits = self._logits
        shape = (1, wanted, self.info.vocab_size)
        binding.bind_output("logits", "cpu", 0, logits.element, shape, logits.pointer)
        return binding
