"""Stand-ins for a GPU's driver and for TensorRT, to test the order and lifetime of calls. They prove nothing of a GPU.

Work that is submitted to the stream does not run until the host waits for an event behind it: a read too early, a
buffer written too soon or freed too early gives other bytes than a right order would. Graphs run on ONNX Runtime.
"""

from __future__ import annotations

import ctypes
import json
from collections.abc import Callable
from enum import Enum
from mmap import mmap
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import onnxruntime as ort

Work = Callable[[], None]


class StandInDriver:
    """See ``engines.cuda.Driver``. ``calls`` names every call in order, ``blocked`` counts waits with work to do."""

    name, arch = "stand-in", "sm89"

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.blocked = 0
        self.reads = 0
        self.handles = 0  # streams, events and graphs that were made and not released
        self.pending: list[Work | int] = []
        self.captured: list[Work] | None = None
        self._done: set[int] = set()
        self._events = 0
        self._alive: dict[int, Any] = {}
        self._host: set[int] = set()

    def allocate(self, size: int) -> int:
        self.calls.append("allocate")
        raw = (ctypes.c_uint8 * (size + 256))()
        address = -(-ctypes.addressof(raw) // 256) * 256
        ctypes.memset(address, 0xA5, size)
        self._alive[address] = (raw, size)
        return address

    def free(self, address: int) -> None:
        del self._alive[address]

    def allocate_host(self, size: int) -> int:
        address = self.allocate(size)
        self._host.add(address)
        return address

    def free_host(self, address: int) -> None:
        self._host.discard(address)
        self.free(address)

    def check(self, address: int, size: int) -> None:
        """The range lies in one live allocation."""
        assert any(start <= address and address + size <= start + length for start, (_, length) in self._alive.items())

    def clear(self, address: int, size: int, stream: Any) -> None:
        self.submit("clear", lambda: self._write(address, bytes(size)))

    def copy(self, source: int, target: int, size: int, stream: Any) -> None:
        to_host = any(start <= target < start + self._alive[start][1] for start in self._host)
        self.reads += to_host
        self.submit("read" if to_host else "copy", lambda: self._copy(source, target, size))

    def new_stream(self) -> int:
        self.handles += 1
        return 7

    def new_event(self) -> Any:
        self.handles += 1
        return SimpleNamespace(mark=None)

    def release(self, handle: Any) -> None:
        self.handles -= 1

    def record(self, event: Any, stream: Any) -> None:
        assert self.captured is None
        self._events += 1
        event.mark = self._events
        self.pending.append(self._events)
        self.calls.append("record")

    def wait(self, event: Any) -> None:
        assert self.captured is None
        self.calls.append("wait")
        if event.mark is None or event.mark in self._done:
            return
        self.blocked += 1
        while event.mark not in self._done:
            work = self.pending.pop(0)
            if isinstance(work, int):
                self._done.add(work)
            else:
                work()

    def begin_capture(self, stream: Any) -> None:
        self.calls.append("begin_capture")
        self.captured = []

    def end_capture(self, stream: Any) -> list[Work]:
        self.calls.append("end_capture")
        graph, self.captured = self.captured, None
        assert graph is not None
        self.handles += 1
        return graph

    def abort_capture(self, stream: Any) -> None:
        self.captured = None

    def launch(self, graph: list[Work], stream: Any) -> None:
        assert self.captured is None
        self.calls.append("launch")
        self.pending += graph

    def submit(self, name: str, work: Work) -> None:
        self.calls.append(name)
        (self.pending if self.captured is None else self.captured).append(work)

    def _copy(self, source: int, target: int, size: int) -> None:
        self.check(source, size)
        self._write(target, ctypes.string_at(source, size))

    def _write(self, address: int, data: bytes) -> None:
        self.check(address, len(data))
        ctypes.memmove(address, data, len(data))


def engine_bytes(graph: Path, plans: list[tuple[int, int]]) -> bytes:
    """An engine file of the stand-in: which graph to run, and its profiles."""
    return json.dumps({"graph": str(graph), "plans": plans}).encode()


def standin_module(driver: StandInDriver) -> SimpleNamespace:
    """A module with as much of TensorRT's API as running an engine takes."""

    class Logger:
        Severity = SimpleNamespace(ERROR=1, INTERNAL_ERROR=0)

    class Runtime:
        def __init__(self, logger: Any) -> None:
            pass

        def deserialize_cuda_engine(self, data: mmap) -> _Engine | None:
            text = bytes(data)
            return _Engine(driver, **json.loads(text)) if text.startswith(b"{") else None

    return SimpleNamespace(
        __version__="1.0",
        ILogger=Logger,
        Runtime=Runtime,
        TensorIOMode=_Mode,
        IRuntimeCache=_Cache,
        DynamicShapesKernelSpecializationStrategy=SimpleNamespace(EAGER="eager"),
        ExecutionContextAllocationStrategy=SimpleNamespace(USER_MANAGED="user"),
    )


class _Mode(Enum):
    INPUT = 0
    OUTPUT = 1


class _Engine:
    streamable_weights_size = 0

    def __init__(self, driver: StandInDriver, graph: str, plans: list[list[int]]) -> None:
        self.driver = driver
        self.plans = plans
        self.contexts: list[_Context] = []
        options = ort.SessionOptions()
        options.intra_op_num_threads = 1
        options.log_severity_level = 3
        self.session = ort.InferenceSession(graph, options, providers=["CPUExecutionProvider"])
        self.inputs = {entry.name: entry.type for entry in self.session.get_inputs()}
        self.outputs = {entry.name: entry.type for entry in self.session.get_outputs()}
        self.names = [*self.inputs, *self.outputs]
        self.num_io_tensors = len(self.names)

    def get_tensor_name(self, index: int) -> str:
        return self.names[index]

    def get_tensor_mode(self, name: str) -> _Mode:
        return _Mode.INPUT if name in self.inputs else _Mode.OUTPUT

    def get_device_memory_size_for_profile_v2(self, index: int) -> int:
        return 64 * self.plans[index][0]

    def get_aliased_input_tensor(self, name: str) -> str | None:
        return name.replace("present_", "past_") if name.startswith("present_") else None

    def create_runtime_config(self) -> _Config:
        return _Config()

    def create_execution_context(self, config: _Config) -> _Context:
        assert config.strategy == "user" and config.cache is not None
        assert config.dynamic_shapes_kernel_specialization_strategy == "eager"
        config.cache.content += b"kernel"
        self.contexts.append(_Context(self))
        return self.contexts[-1]


class _Config:
    strategy: str | None = None
    dynamic_shapes_kernel_specialization_strategy = "lazy"
    cache: _Cache | None = None

    def create_runtime_cache(self) -> _Cache:
        return _Cache()

    def set_execution_context_allocation_strategy(self, strategy: str) -> None:
        self.strategy = strategy

    def set_runtime_cache(self, cache: _Cache) -> bool:
        self.cache = cache
        return True


class _Cache:
    content = b""

    def serialize(self) -> bytes:
        return b"whole:" + self.content

    def deserialize(self, blob: bytes) -> bool:
        whole = blob.startswith(b"whole:")
        self.content = blob[6:] if whole else self.content
        return whole


class _Context:
    def __init__(self, engine: _Engine) -> None:
        self.engine = engine
        self.profile: int | None = None
        self.shapes: dict[str, tuple[int, ...]] = {}
        self.addresses: dict[str, int] = {}
        self.workspace: tuple[int, int] | None = None
        self.ran = False

    def set_optimization_profile_async(self, index: int, stream: int) -> bool:
        assert stream and not self.shapes
        self.profile = index
        return index < len(self.engine.plans)

    def set_input_shape(self, name: str, shape: tuple[int, ...]) -> bool:
        assert self.profile is not None and not self.ran
        rows, logit_rows = self.engine.plans[self.profile]
        fixed = {"input_ids": (1, rows), "logit_rows": (1, logit_rows)}
        self.shapes[name] = shape
        return shape == fixed.get(name, shape)

    def set_tensor_address(self, name: str, address: int) -> bool:
        assert not self.ran, "addresses are set once"
        assert address % 256 == 0, f"{name} is not aligned"
        self.addresses[name] = address
        return True

    def set_device_memory(self, address: int, size: int) -> None:
        self.workspace = (address, size)

    def execute_async_v3(self, stream: int) -> bool:
        engine = self.engine
        assert self.workspace is not None and self.profile is not None
        assert self.addresses.keys() == set(engine.names), "every address is set before a pass"
        assert self.shapes.keys() == engine.inputs.keys()
        self.ran = True
        engine.driver.submit("enqueue", self._run)
        return True

    def _run(self) -> None:
        engine, driver = self.engine, self.engine.driver
        assert self.workspace is not None and self.profile is not None
        driver.check(*self.workspace)
        inputs = {name: self._array(name, kind, self.shapes[name]).copy() for name, kind in engine.inputs.items()}
        for name, value in zip(engine.outputs, engine.session.run(None, inputs), strict=True):
            self._array(name, engine.outputs[name], value.shape)[...] = value

    def _array(self, name: str, kind: str, shape: tuple[int, ...]) -> np.ndarray[Any, Any]:
        dtype = {"tensor(float)": np.float32, "tensor(int32)": np.int32, "tensor(int64)": np.int64}[kind]
        size = int(np.prod(shape)) * np.dtype(dtype).itemsize
        self.engine.driver.check(self.addresses[name], size)
        raw = (ctypes.c_uint8 * size).from_address(self.addresses[name])
        return np.frombuffer(raw, dtype).reshape(shape)
