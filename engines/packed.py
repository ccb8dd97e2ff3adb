"""Many sequences in one pass: each brings as many rows as it has, and the rows stand one behind the other.

Products, norms and the head see ``R`` rows in all, whoever's they are; only attention sorts them by sequence (see
``PackedLowering`` in ``export/attention.py``). A sequence without rows costs nothing but its cache.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from outrider.engines.bundle import ModelInfo
from outrider.engines.engine import SHORT_CONTEXT, SUMMED_AT_ONCE
from outrider.engines.errors import OutriderError
from outrider.engines.memory import HostBuffer, HostMemory
from outrider.engines.ort import OrtSession
from outrider.engines.plan import EngineState


class Segment(NamedTuple):
    """The rows of one sequence in a pass.

    ``tokens`` are appended to the ``length`` tokens in its cache (fewer than before is a rollback); logits are wanted
    of the last ``wanted`` of them.
    """

    sequence: int
    length: int
    tokens: Sequence[int]
    wanted: int


class PackedEngine:
    """A packed graph on the CPU, with the caches of ``sequences`` sequences.

    Args:
        graph: ``ModelInfo.packed_graph`` of the model.
        min_rows: of a pass, from which on all passes give the same bits; shorter ones are padded.
        most_rows: of a pass, and of the logits wanted of it.

    Raises:
        OutriderError: ONNX Runtime is not installed, or the graph does not load.
    """

    def __init__(
        self, graph: Path, info: ModelInfo, *, sequences: int, min_rows: int, most_rows: int, threads: int | None = None
    ) -> None:
        self.info = info
        self.sequences = sequences
        self.min_rows = min_rows
        self.most_rows = most_rows
        self._session = OrtSession(graph, info, threads=threads)
        self.device = self._session.device
        self.threads = self._session.threads
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
        self._bindings: dict[tuple[int, int], Any] = {}  # by the range of sequences

    def run(self, segments: Sequence[Segment]) -> list[NDArray[np.float32]]:
        """One pass.

        Args:
            segments: of different sequences, together of at most ``most_rows`` rows.

        Returns:
            float32 ``[wanted, vocab_size]`` of each segment: views that the next run overwrites.

        Raises:
            OutriderError: a segment does not fit its cache, or ONNX Runtime fails.
        """
        rows = [len(segment.tokens) for segment in segments]
        total, most = max(sum(rows), self.min_rows), 1
        # Only the sequences from the first to the last that has rows are there at all.
        first = min(segment.sequence for segment in segments)
        count = max(segment.sequence for segment in segments) + 1 - first
        self._query_rows.array[:] = 0
        self._cache_last.array[:] = 0
        for segment, own in zip(segments, rows, strict=True):
            attended = own + self._spare_rows(segment.length, own)
            end = segment.length + attended
            if end > self.info.capacity:
                raise OutriderError(
                    f"{segment.length} cached tokens and {attended} rows exceed the cache of {self.info.capacity} "
                    "positions; export with a larger --max-length"
                )
            self._query_rows.array[segment.sequence - first] = attended
            self._cache_last.array[segment.sequence - first] = end - 1
            most = max(most, attended)
        sorted_rows = self._sequence_rows.array[: count * most * 2].reshape(count, most, 2)
        wanted = max(self._place(segments, rows, first, sorted_rows), self.min_rows)
        binding = self._binding(first, count)
        self._bind_rows(binding, total, sorted_rows.shape, wanted)
        self._session.run(binding, total)
        logits = self._logits.array.reshape(self.most_rows, -1)
        ends = np.cumsum([segment.wanted for segment in segments]).tolist()
        return [logits[end - segment.wanted : end] for segment, end in zip(segments, ends, strict=True)]

    def copy(self, source: int, target: int, start: int, end: int) -> None:
        """Copy the positions ``start`` to ``end`` of one sequence's cache to the same places of another's."""
        for cache in self.state.caches.values():
            array = cache.read()
            array[target, :, start:end] = array[source, :, start:end]

    def _spare_rows(self, length: int, rows: int) -> int:
        return max(int(rows == 1), self._short - length - rows)

    def _place(
        self, segments: Sequence[Segment], rows: Sequence[int], first: int, sorted_rows: NDArray[np.int64]
    ) -> int:
        """Fill the inputs; the number of rows whose logits are wanted."""
        ids, positions, wanted = self._ids.array, self._positions.array, self._wanted.array
        packed = self._packed_rows.array.reshape(-1, 2)
        most = sorted_rows.shape[1]
        sorted_rows[...] = 0
        for padded in (ids, positions, packed, wanted):
            padded[: self.min_rows] = 0
        start = count = 0
        for segment, size in zip(segments, rows, strict=True):
            end = start + size
            ids[start:end] = segment.tokens
            positions[start:end] = np.arange(segment.length, segment.length + size)
            # Spare rows are its last one again.
            sorted_rows[segment.sequence - first, :, 1] = np.minimum(np.arange(start, start + most), end - 1)
            packed[start:end, 0] = segment.sequence - first
            packed[start:end, 1] = np.arange(size)
            wanted[count : count + segment.wanted] = np.arange(end - segment.wanted, end)
            start, count = end, count + segment.wanted
        return count

    def _binding(self, first: int, count: int) -> Any:
        """Over the caches of ``count`` sequences; made once and kept."""
        if (first, count) not in self._bindings:
            binding = self._bindings[first, count] = self._session.session.io_binding()
            for name, cache in self.state.caches.items():
                shape = (count, *cache.shape[1:])
                address = cache.pointer + first * cache.read()[0].nbytes
                binding.bind_input(f"past_{name}", "cpu", 0, cache.element, shape, address)
                binding.bind_output(f"present_{name}", "cpu", 0, cache.element, shape, address)
            self._bind(binding, "query_rows", self._query_rows, (count,))
            self._bind(binding, "cache_last", self._cache_last, (count,))
        return self._bindings[first, count]

    def _bind_rows(self, binding: Any, total: int, sorted_shape: tuple[int, ...], wanted: int) -> None:
        """What has another shape in each pass: a few bindings, which cost less than a plan for each shape would."""
        self._bind(binding, "input_ids", self._ids, (1, total))
        if "positions" in self._session.input_names:
            self._bind(binding, "positions", self._positions, (1, total))
        self._bind(binding, "sequence_rows", self._sequence_rows, sorted_shape)
        self._bind(binding, "packed_rows", self._packed_rows, (1, total, 2))
        self._bind(binding, "logit_rows", self._wanted, (1, wanted))
        logits = self._logits
        shape = (1, wanted, self.info.vocab_size)
        binding.bind_output("logits", "cpu", 0, logits.element, shape, logits.pointer)

    @staticmethod
    def _bind(binding: Any, name: str, buffer: HostBuffer, shape: tuple[int, ...]) -> None:
        binding.bind_input(name, "cpu", 0, buffer.element, shape, buffer.pointer)
