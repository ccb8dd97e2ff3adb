"""CUDA memory, streams, events and graphs through cuda-bindings: what TensorRT and ONNX Runtime's GPU providers run on.

All work of an engine goes to one stream, so that passes, copies and writes are in order without waiting. The host waits
in one place: where it reads.
"""

from __future__ import annotations

import ctypes
import weakref
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from outrider.engines.errors import DeviceMemoryError, OutriderError
from outrider.engines.memory import Launch, element_of, size_of

_DRIVER = Path("/proc/driver/nvidia")


class Driver(Protocol):
    """The calls that are made to CUDA, for the device ``name`` of architecture ``arch`` (``sm89`` or the like).

    Addresses and sizes are in bytes; all but ``wait`` return at once.
    """

    name: str
    arch: str

    def allocate(self, size: int) -> int: ...
    def free(self, address: int) -> None: ...
    def allocate_host(self, size: int) -> int:
        """Page-locked memory of the host, which copies can run beside the host's own work."""
        ...

    def free_host(self, address: int) -> None: ...
    def clear(self, address: int, size: int, stream: Any) -> None: ...
    def copy(self, source: int, target: int, size: int, stream: Any) -> None: ...
    def new_stream(self) -> Any: ...
    def new_event(self) -> Any: ...
    def record(self, event: Any, stream: Any) -> None: ...
    def wait(self, event: Any) -> None:
        """Block the host until everything before the event's last record has run."""
        ...

    def begin_capture(self, stream: Any) -> None: ...
    def end_capture(self, stream: Any) -> Any:
        """The graph of what was submitted since: it has not run yet."""
        ...

    def abort_capture(self, stream: Any) -> None: ...
    def launch(self, graph: Any, stream: Any) -> None: ...
    def release(self, handle: Any) -> None:
        """Destroy a stream, an event or a graph."""
        ...


class CudaDriver:
    """See ``Driver``: device 0 of those that CUDA_VISIBLE_DEVICES shows.

    Raises:
        OutriderError: cuda-bindings is not installed, or there is no driver, no GPU, or too old a driver.
    """

    def __init__(self) -> None:
        try:
            from cuda.bindings import runtime
        except ImportError:
            raise OutriderError("cuda-bindings is not installed; run `pip install cuda-bindings`") from None
        self._cuda = runtime
        status, count = runtime.cudaGetDeviceCount()
        if status == runtime.cudaError_t.cudaErrorInsufficientDriver:
            major = runtime.cudaRuntimeGetVersion()[1] // 1000
            if _DRIVER.exists():
                raise OutriderError(f"the NVIDIA driver here is too old for CUDA {major}; install a newer one")
            raise OutriderError(
                f"there is no NVIDIA driver here, which a GPU needs for CUDA {major}; engines are built without one, "
                "and run where there is one"
            )
        if status != runtime.cudaError_t.cudaSuccess or count == 0:
            raise OutriderError(f"CUDA finds no GPU here ({status.name}); use --provider cpu")
        self._check(runtime.cudaSetDevice(0))
        properties = self._check(runtime.cudaGetDeviceProperties(0))
        self.name = properties.name.decode().rstrip("\0")
        self.arch = f"sm{properties.major}{properties.minor}"

    def allocate(self, size: int) -> int:
        status, address = self._cuda.cudaMalloc(size)
        if status == self._cuda.cudaError_t.cudaErrorMemoryAllocation:
            free, total = self._check(self._cuda.cudaMemGetInfo())
            raise DeviceMemoryError(
                f"the GPU is out of memory: {size / 1e6:.0f} MB are needed, {free / 1e6:.0f} of {total / 1e6:.0f} MB "
                "are free; export with a smaller --max-length or --precision, or end what else runs on it"
            )
        self._check((status,))
        return int(address)

    def free(self, address: int) -> None:
        self._cuda.cudaFree(address)

    def allocate_host(self, size: int) -> int:
        return int(self._check(self._cuda.cudaMallocHost(size)))

    def free_host(self, address: int) -> None:
        self._cuda.cudaFreeHost(address)

    def clear(self, address: int, size: int, stream: Any) -> None:
        self._check(self._cuda.cudaMemsetAsync(address, 0, size, stream))

    def copy(self, source: int, target: int, size: int, stream: Any) -> None:
        kind = self._cuda.cudaMemcpyKind.cudaMemcpyDefault
        self._check(self._cuda.cudaMemcpyAsync(target, source, size, kind, stream))

    def new_stream(self) -> Any:
        return self._check(self._cuda.cudaStreamCreateWithFlags(self._cuda.cudaStreamNonBlocking))

    def new_event(self) -> Any:
        return self._check(self._cuda.cudaEventCreateWithFlags(self._cuda.cudaEventDisableTiming))

    def record(self, event: Any, stream: Any) -> None:
        self._check(self._cuda.cudaEventRecord(event, stream))

    def wait(self, event: Any) -> None:
        self._check(self._cuda.cudaEventSynchronize(event))

    def begin_capture(self, stream: Any) -> None:
        mode = self._cuda.cudaStreamCaptureMode.cudaStreamCaptureModeThreadLocal
        self._check(self._cuda.cudaStreamBeginCapture(stream, mode))

    def end_capture(self, stream: Any) -> Any:
        graph = self._check(self._cuda.cudaStreamEndCapture(stream))
        executable = self._check(self._cuda.cudaGraphInstantiate(graph, 0))
        self._check(self._cuda.cudaGraphDestroy(graph))
        return executable

    def abort_capture(self, stream: Any) -> None:
        self._cuda.cudaStreamEndCapture(stream)  # its status says that the capture failed, which is known

    def launch(self, graph: Any, stream: Any) -> None:
        self._check(self._cuda.cudaGraphLaunch(graph, stream))

    def release(self, handle: Any) -> None:
        cuda = self._cuda
        destroy = {
            cuda.cudaStream_t: cuda.cudaStreamDestroy,
            cuda.cudaEvent_t: cuda.cudaEventDestroy,
            cuda.cudaGraphExec_t: cuda.cudaGraphExecDestroy,
        }
        destroy[type(handle)](handle)

    def _check(self, result: tuple[Any, ...]) -> Any:
        status, *values = result
        if status != self._cuda.cudaError_t.cudaSuccess:
            text = self._cuda.cudaGetErrorString(status)[1].decode()
            raise OutriderError(f"CUDA failed: {text} ({status.name})")
        return values[0] if len(values) == 1 else tuple(values)


class CudaBuffer:
    """See ``memory.Buffer``. It has a page-locked twin on the host, made when it is first written or read."""

    def __init__(self, memory: CudaMemory, shape: tuple[int, ...], dtype: str, pointer: int, owner: Any) -> None:
        self.shape = shape
        self.dtype, self.element = element_of(dtype)
        self.pointer = pointer
        self._memory = memory
        self._size = size_of(shape, dtype)
        self._owner = owner  # whose end frees the memory
        self._twin: NDArray[Any] | None = None
        self._event: Any = None

    def write(self, values: Any) -> None:
        driver, stream = self._memory.driver, self._memory.stream
        twin = self._host_twin()
        driver.wait(self._event)  # the last copy from the twin or to it
        twin[...] = values
        driver.copy(twin.ctypes.data, self.pointer, self._size, stream)
        driver.record(self._event, stream)

    def read(self) -> NDArray[Any]:
        driver, stream = self._memory.driver, self._memory.stream
        twin = self._host_twin()
        driver.copy(self.pointer, twin.ctypes.data, self._size, stream)
        driver.record(self._event, stream)
        driver.wait(self._event)
        return twin

    def section(self, offset: int, shape: tuple[int, ...], dtype: str) -> CudaBuffer:
        return CudaBuffer(self._memory, shape, dtype, self.pointer + offset, self)

    def _host_twin(self) -> NDArray[Any]:
        if self._twin is None:
            driver = self._memory.driver
            address = driver.allocate_host(self._size)
            raw = (ctypes.c_uint8 * self._size).from_address(address)
            weakref.finalize(raw, driver.free_host, address)  # with the last array that shows it
            self._twin = np.frombuffer(memoryview(raw), self.dtype).reshape(self.shape)
            self._event = driver.new_event()
            weakref.finalize(self, driver.release, self._event)
        return self._twin


class CudaMemory:
    """See ``memory.Memory``: the GPU's memory and the one stream on which everything runs."""

    kind = "cuda"

    def __init__(self, driver: Driver) -> None:
        self.driver = driver
        self.stream = driver.new_stream()
        weakref.finalize(self, driver.release, self.stream)

    def buffer(self, shape: tuple[int, ...], dtype: str) -> CudaBuffer:
        size = size_of(shape, dtype)
        pointer = self.driver.allocate(size)
        self.driver.clear(pointer, size, self.stream)
        buffer = CudaBuffer(self, shape, dtype, pointer, None)
        weakref.finalize(buffer, self.driver.free, pointer)
        return buffer

    def copy(self, source: Any, start: int, target: Any, at: int) -> None:
        size = source.dtype.itemsize
        self.driver.copy(source.pointer + start * size, target.pointer + at * size, size, self.stream)

    def recorded(self, work: Launch) -> Launch:
        return _Recorded(self, work)


class _Recorded:
    """Work that becomes a CUDA graph: it runs once as it is, so that everything is loaded and sized, then is captured.

    No run is made for warming up only: each would move the state that the work changes (onnxruntime issue 32243).
    """

    def __init__(self, memory: CudaMemory, work: Launch) -> None:
        self._memory = memory
        self._work = work
        self._ran = False
        self._graph: Any = None

    def __call__(self) -> None:
        driver, stream = self._memory.driver, self._memory.stream
        if not self._ran:
            self._work()
            self._ran = True
            return
        if self._graph is None:
            driver.begin_capture(stream)
            try:
                self._work()
            except BaseException:
                driver.abort_capture(stream)
                raise
            self._graph = driver.end_capture(stream)
            weakref.finalize(self, driver.release, self._graph)
        driver.launch(self._graph, stream)
