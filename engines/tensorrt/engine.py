"""An engine file that runs: an execution context a plan, addresses set once, caches updated in place.

All contexts share one stream and one block of activation memory, since only one of them runs at a time.
"""

from __future__ import annotations

import hashlib
import mmap
import weakref
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from outrider.engines.bundle import Bundle, EngineFile, ModelInfo, build_command
from outrider.engines.cache import cache_folder, store
from outrider.engines.cuda import CudaMemory
from outrider.engines.engine import HeadInputs, PlanShape, smallest_shape
from outrider.engines.errors import DeviceMemoryError, OutriderError
from outrider.engines.memory import Buffer, Launch
from outrider.engines.plan import BoundPlan, EngineState
from outrider.engines.tensorrt.build import ANY, BuildOptions, engine_key
from outrider.engines.tensorrt.library import Library


class TensorrtEngine:
    """See ``engine.Engine``, batch 1.

    Raises:
        OutriderError: the file is not an engine of this library, or the device's memory is too small.
    """

    batch = 1

    def __init__(
        self,
        library: Library,
        path: Path,
        record: EngineFile,
        info: ModelInfo,
        memory: CudaMemory,
        heads: HeadInputs,
    ) -> None:
        trt = self._trt = library.module
        self._library, self._record = library, record
        self.info, self.memory, self.heads = info, memory, heads
        self._runtime = trt.Runtime(library.log.logger)
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            self._engine = self._runtime.deserialize_cuda_engine(data)
        if self._engine is None:
            raise OutriderError(f"{path} does not load: {library.log.take()}")
        self._kernels = _KernelCache(trt, self._engine, record, memory.driver.name)
        self._streaming = record.weight_streaming
        self.capturable = not self._streaming
        if self._streaming:
            self._engine.weight_streaming_budget_v2 = self._engine.get_weight_streaming_automatic_budget()
        names = [self._engine.get_tensor_name(index) for index in range(self._engine.num_io_tensors)]
        inputs = [name for name in names if self._engine.get_tensor_mode(name) == trt.TensorIOMode.INPUT]
        self.input_names = frozenset(inputs)
        self._names = names
        self.table = [PlanShape(*shape) for shape in record.plans]
        self.device = f"{memory.driver.name}, {record.engine} {record.version}, built for {record.arch}"
        sizes = [self._engine.get_device_memory_size_for_profile_v2(index) for index in range(len(self.table))]
        self._workspace_size = max(sizes)
        what = "its caches"
        try:
            self.state = EngineState(info, self.batch, memory)
            what = f"the plan of {self.table[sizes.index(self._workspace_size)].rows} rows"
            self._workspace = memory.buffer((1 if self._streaming else max(1, self._workspace_size),), "uint8")
        except DeviceMemoryError as error:
            raise OutriderError(f"{path}, {what}: {error}") from None
        self._plans: dict[PlanShape, BoundPlan] = {}

    @classmethod
    def load(cls, bundle: Bundle, role: str, library: Library, memory: CudaMemory, heads: HeadInputs) -> TensorrtEngine:
        """The engine that was built for this device.

        Raises:
            OutriderError: the bundle has no engine for this library and device.
        """
        record = find_engine(bundle, role, library, memory.driver.arch)
        return cls(library, bundle.engine_path(record), record, bundle.manifest.models[role], memory, heads)

    def plan(self, rows: int, logit_rows: int, exact: bool = True) -> BoundPlan:
        shape = smallest_shape(self.table, rows, logit_rows)
        if shape is None:
            raise OutriderError(
                f"{self._record.file} has no plan of {rows} rows ({logit_rows} of them with logits), only of "
                f"{', '.join(str(shape.rows) for shape in self.table)}; build it again with a larger --k"
            )
        if shape not in self._plans:
            self._plans[shape] = BoundPlan(self, shape)
        return self._plans[shape]

    def bind(self, shape: PlanShape, buffers: Mapping[str, Buffer]) -> Launch:
        """See ``plan.BoundEngine``."""
        strategy = self._trt.ExecutionContextAllocationStrategy
        # Streamed weights need memory of their own.
        context = self._kernels.new_context(strategy.STATIC if self._streaming else strategy.USER_MANAGED)
        if context is None:
            raise OutriderError(f"{self._record.file}: no context for {shape.rows} rows: {self._library.log.take()}")
        stream = int(self.memory.stream)
        self._must(context.set_optimization_profile_async(self.table.index(shape), stream), shape)
        for name in self._names:
            buffer = buffers[name]
            if name in self.input_names:
                self._must(context.set_input_shape(name, tuple(buffer.shape)), shape)
            elif (alias := self._engine.get_aliased_input_tensor(name)) is not None:
                assert buffers[alias].pointer == buffer.pointer, name
            self._must(context.set_tensor_address(name, buffer.pointer), shape)
        if not self._streaming:
            context.set_device_memory(self._workspace.pointer, self._workspace_size)

        def enqueue() -> None:
            self._must(context.execute_async_v3(stream), shape)

        return enqueue

    def describe(self) -> dict[str, Any]:
        return {
            "engine": f"{self._record.engine} {self._record.version}",
            "provider": self._record.engine,
            "device": self.device,
            "plans": " ".join(f"{shape.rows}/{shape.logit_rows}" for shape in self.table),
            "cuda_graph": self.capturable,
            "workspace_bytes": self._workspace_size,
            "streamable_weights_bytes": self._engine.streamable_weights_size,
            "cache_bytes": self.state.cache_bytes,
        }

    def _must(self, done: bool, shape: PlanShape) -> None:
        if not done:
            raise OutriderError(f"{self._record.file}, plan of {shape.rows} rows: {self._library.log.take()}")


class _KernelCache:
    """Kernels that TensorRT for RTX compiles on the device, for all contexts of an engine, and for the next process.

    TensorRT itself has compiled them in the build.
    """

    def __init__(self, module: Any, engine: Any, record: EngineFile, device: str) -> None:
        self._module = module
        self._engine = engine
        self._cache: Any = None
        if hasattr(module, "IRuntimeCache"):
            self._cache = engine.create_runtime_config().create_runtime_cache()
            folder = cache_folder("kernels")
            if folder is not None:
                self._keep(folder / hashlib.sha256(f"{record.key} {device}".encode()).hexdigest()[:16])

    def _keep(self, path: Path) -> None:
        """From the last process and for the next."""
        with suppress(OSError):
            self._cache.deserialize(path.read_bytes())  # refused, and left empty, when it is not of here and now
        weakref.finalize(self, _save_kernels, self._cache, path)

    def new_context(self, strategy: Any) -> Any:
        if self._cache is None:
            return self._engine.create_execution_context(strategy)
        config = self._engine.create_runtime_config()
        config.set_execution_context_allocation_strategy(strategy)
        config.set_runtime_cache(self._cache)
        # At once: the next run is captured, and would keep whatever kernels stand in for those still being compiled.
        config.dynamic_shapes_kernel_specialization_strategy = (
            self._module.DynamicShapesKernelSpecializationStrategy.EAGER
        )
        return self._engine.create_execution_context(config)


def _save_kernels(cache: Any, path: Path) -> None:
    store(path, bytes(memoryview(cache.serialize())))


def check_built(bundle: Bundle, role: str, library: Library) -> list[EngineFile]:
    """The engines of a model for a library, of whatever version and architecture.

    Raises:
        OutriderError: there is none.
    """
    engines = bundle.manifest.engines
    built = [engine for engine in engines if (engine.role, engine.engine) == (role, library.name)]
    if not built:
        command = build_command(bundle.folder, library.name, "ARCH")
        raise OutriderError(f"{bundle.folder} has no {library.name} engine for its {role}; run `{command}`")
    return built


def find_engine(bundle: Bundle, role: str, library: Library, arch: str) -> EngineFile:
    """The engine of a model for this library and architecture, or else the one for all of them.

    Raises:
        OutriderError: there is none; what there is, what is needed, and the command that builds it.
    """
    command = build_command(bundle.folder, library.name, arch)
    built = check_built(bundle, role, library)
    fitting = [engine for engine in built if engine.version == library.version and engine.arch in (arch, ANY)]
    if not fitting:
        there = ", ".join(f"{engine.version} on {engine.arch}" for engine in built)
        raise OutriderError(
            f"the {library.name} engines of {bundle.folder} are for version {there}; this is {library.version} on "
            f"{arch}; run `{command}`"
        )
    engine = next((engine for engine in fitting if engine.arch == arch), fitting[-1])
    if engine.key != engine_key(bundle, role, library, _options(engine), _table(engine)):
        raise OutriderError(
            f"{engine.file} was built from another graph than the one in {bundle.folder}; run `{command}`"
        )
    return engine


def _table(engine: EngineFile) -> Sequence[PlanShape]:
    return [PlanShape(*shape) for shape in engine.plans]


def _options(engine: EngineFile) -> BuildOptions:
    return BuildOptions(engine.engine, engine.arch, (), engine.weight_streaming)
