"""A plan: a pass of a fixed shape with everything bound to buffers once. The same for every engine."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from outrider.engines.bundle import ModelInfo
from outrider.engines.engine import HeadInputs, PlanShape
from outrider.engines.errors import DeviceMemoryError, OutriderError
from outrider.engines.memory import ALIGNMENT, Buffer, Launch, Memory

_CACHES = ("key", "value")


class BoundEngine(Protocol):
    """What a plan needs of its engine."""

    info: ModelInfo
    batch: int
    input_names: frozenset[str]
    state: EngineState
    capturable: bool  # whether a pass may be part of a CUDA graph of ours

    @property
    def memory(self) -> Memory: ...

    @property
    def heads(self) -> HeadInputs | None: ...

    def bind(self, shape: PlanShape, buffers: Mapping[str, Buffer]) -> Launch:
        """A pass over these buffers, one for each input and output of the graph, whose addresses do not change."""
        ...


class EngineState:
    """Buffers that all plans of an engine share: caches, cache lengths, and logits by their number of rows."""

    def __init__(self, info: ModelInfo, batch: int, memory: Memory) -> None:
        self._logits: dict[int, Buffer] = {}
        self._info, self._batch, self._memory = info, batch, memory
        self.cache_lengths = memory.buffer((batch,), "int32")
        shape = (batch, info.num_kv_heads, info.capacity, info.head_dim)
        self.caches = {
            f"{kind}.{layer}": memory.buffer(shape, info.cache_dtype)
            for layer in range(info.num_layers)
            for kind in _CACHES
        }
        itemsize = next(iter(self.caches.values())).dtype.itemsize
        self.cache_bytes = len(self.caches) * int(np.prod(shape, dtype=np.int64)) * itemsize

    def logits(self, rows: int) -> Buffer:
        if rows not in self._logits:
            shape = (self._batch, rows, self._info.vocab_size)
            self._logits[rows] = self._memory.buffer(shape, "float32")
        return self._logits[rows]


class BoundPlan:
    """See ``engine.Plan``. ``buffers`` are all inputs and outputs by name; ``work`` submits the pass.

    ``launch`` does the same as a CUDA graph, where the engine leaves that to us.

    Args:
        spare_row: whether a one-row pass is to have the bits of a wider one.
        shared: buffers to use in place of new ones, by name.
    """

    def __init__(
        self,
        engine: BoundEngine,
        shape: PlanShape,
        spare_row: bool = False,
        shared: Mapping[str, Buffer] | None = None,
    ) -> None:
        self.rows, self.logit_rows = shape
        self._capacity = engine.info.capacity
        self._attention_rows = self.rows + spare_row
        self._first_wanted = -1
        self._valid = 0
        buffers = self.buffers = {**(shared or {})}
        try:
            self._add_buffers(engine, shape, spare_row)
        except DeviceMemoryError as error:
            raise OutriderError(f"plan of {self.rows} rows: {error}") from None
        self._ids, self._lengths, self._wanted = (buffers[n] for n in ("input_ids", "cache_lengths", "logit_rows"))
        self._logits = buffers["logits"]
        self.work = engine.bind(shape, buffers)
        self.launch = engine.memory.recorded(self.work) if engine.capturable else self.work

    def _add_buffers(self, engine: BoundEngine, shape: PlanShape, spare_row: bool) -> None:
        buffers = self.buffers
        _add_pass_buffers(buffers, engine, shape, spare_row)
        if engine.heads is not None:
            self._verdict = Verdicts(engine.memory, engine.batch, self.logit_rows)
            buffers.setdefault("choices", self._verdict.choices)
            buffers.setdefault("near", self._verdict.near)
            _add_advance_buffers(buffers, engine)
            buffers |= engine.heads.buffers

    def run(self, input_ids: NDArray[np.int64], cache_lengths: NDArray[np.int32]) -> NDArray[np.float32]:
        self.submit(input_ids, cache_lengths)
        return self._logits.read()[:, : self._valid - self._first_wanted]

    def choices(self) -> tuple[NDArray[np.int64], NDArray[np.int32]]:
        _, choices, near = self._verdict.read()
        wanted = slice(self._valid - self._first_wanted)
        return choices[:, wanted], near[:, wanted]

    def logits(self, row: int) -> NDArray[np.float32]:
        found: NDArray[np.float32] = self._logits.read()[0, row]
        return found

    def want(self, first: int) -> None:
        """The first of the rows whose logits are wanted."""
        if first != self._first_wanted:
            self._first_wanted = -1  # an interrupt in between must not leave the old value beside the new rows
            self._wanted.write(np.arange(first, first + self.logit_rows))
            self._first_wanted = first

    def submit(self, input_ids: NDArray[np.int64], cache_lengths: NDArray[np.int32]) -> None:
        valid = self._valid = input_ids.shape[1]
        longest = max(cache_lengths.tolist())  # not .max(): a reduction of one number costs 20 us on cold caches
        if longest + self._attention_rows > self._capacity:
            raise OutriderError(
                f"{longest} cached tokens and {self._attention_rows} rows exceed the cache of {self._capacity} "
                "positions; export with a larger --max-length"
            )
        ids = input_ids
        if valid < self.rows:
            ids = np.pad(input_ids, ((0, 0), (0, self.rows - valid)), mode="edge")
        self._ids.write(ids)
        self._lengths.write(cache_lengths)
        self.want(max(0, valid - self.logit_rows))
        self.launch()


class Verdicts:
    """The small outputs that the host reads of a pass, and room for the pass's ids beside them: one block, one copy.

    Each part begins at an aligned address. ``near`` is int32 in the head's output.
    """

    def __init__(self, memory: Memory, batch: int, rows: int) -> None:
        stride = -(-batch * rows * 8 // ALIGNMENT) * ALIGNMENT
        shape = (batch, rows)
        self._block = memory.buffer((3, stride // 8), "int64")
        self.ids = self._block.section(0, shape, "int64")
        self.choices = self._block.section(stride, shape, "int64")
        self.near = self._block.section(2 * stride, shape, "int32")
        self._shape = shape
        self._count = batch * rows

    def read(self) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int32]]:
        """``ids``, ``choices`` and ``near``."""
        ids, choices, near = self._block.read()
        count, shape = self._count, self._shape
        return ids[:count].reshape(shape), choices[:count].reshape(shape), near.view(np.int32)[:count].reshape(shape)


def _add_pass_buffers(buffers: dict[str, Buffer], engine: BoundEngine, shape: PlanShape, spare_row: bool) -> None:
    """Those of the graph contract that are not there yet."""
    memory, batch, state = engine.memory, engine.batch, engine.state
    for name, count in (("input_ids", shape.rows), ("logit_rows", shape.logit_rows)):
        if name not in buffers:
            buffers[name] = memory.buffer((batch, count), "int64")
    buffers.setdefault("cache_lengths", state.cache_lengths)
    buffers["logits"] = state.logits(shape.logit_rows)
    for name, cache in state.caches.items():
        buffers[f"past_{name}"] = buffers[f"present_{name}"] = cache
    for name, dtype, value in (("spare_rows", "int64", int(spare_row)), ("rows", "int32", shape.rows)):
        if name in engine.input_names:
            buffers[name] = memory.buffer((1,), dtype)
            buffers[name].write(value)


def _add_advance_buffers(buffers: dict[str, Buffer], engine: BoundEngine) -> None:
    """What the heads say of the state behind the pass."""
    memory, batch = engine.memory, engine.batch
    for name, shape, dtype in (
        ("tail", (batch, 2), "int64"),
        ("next_lengths", (batch,), "int32"),
        ("tail_lengths", (batch,), "int32"),
    ):
        if name not in buffers:
            buffers[name] = memory.buffer(shape, dtype)
