"""ONNX Runtime engine: one session a model, one I/O binding a plan, caches updated in place.

On the CPU the graph takes any number of rows, so a plan is exact. With CUDA graphs each plan is captured under its own
annotation id and replayed, because its addresses and shapes never change.
"""

from __future__ import annotations

import os
import platform
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

from outrider.engines.bundle import ModelInfo
from outrider.engines.engine import HeadInputs, PlanShape, smallest_shape
from outrider.engines.errors import OutriderError
from outrider.engines.huge_pages import huge_pages
from outrider.engines.memory import Buffer, HostMemory, Launch, Memory
from outrider.engines.plan import BoundPlan, EngineState
from outrider.engines.providers import ProviderSetup, provider_package, provider_setup, run_config

_NO_PIECES = "ORT_GQA_DISABLE_FLASH_ATTENTION"
_VECTORS = ("avx2", "avx_vnni", "avx512f", "avx512_vnni", "amx_int8")  # by which kernels are chosen
_ENVIRONMENT = threading.Lock()  # engines may be opened by several threads


def default_threads() -> int:
    """The processors this process may use, the quota of its container included."""
    count = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quota = Path("/sys/fs/cgroup/cpu.max")
    if quota.is_file():
        limit, period = quota.read_text().split()
        if limit != "max":
            count = min(count, max(1, int(limit) // int(period)))
    return count


class OrtSession:
    """A graph that ONNX Runtime has loaded. ``device`` names what decides the bits; see ``engine.Engine``.

    Args:
        setup: by default the CPU's.
        many_shapes: whether passes have ever other shapes, so that nothing is to be kept of each.

    Raises:
        OutriderError: ONNX Runtime or the provider is not installed, or the graph does not load.
    """

    def __init__(
        self,
        graph: Path,
        info: ModelInfo,
        *,
        provider: str = "cpu",
        threads: int | None = None,
        setup: ProviderSetup | None = None,
        many_shapes: bool = False,
    ) -> None:
        self._graph = graph
        self.threads = threads or default_threads()
        check_available(provider)
        with huge_pages() if provider == "cpu" else nullcontext(), _whole_attention():
            setup = setup or provider_setup(provider, info, graph, ())
            self.session = _open_session(setup, self.threads, many_shapes)
        self.input_names = frozenset(entry.name for entry in self.session.get_inputs())
        self.output_names = [entry.name for entry in self.session.get_outputs()]
        _check_shapes(graph, info, self.session)
        self.device = _device(provider, self.threads)

    def run(self, binding: Any, rows: int, options: Any = None) -> None:
        """A pass over what is bound.

        Raises:
            OutriderError: ONNX Runtime fails.
        """
        try:
            self.session.run_with_iobinding(binding, options)
        except Exception as error:  # ONNX Runtime raises many types, none of them its own
            raise OutriderError(f"{self._graph}, pass of {rows} rows: {error}") from None

    def describe(self) -> dict[str, Any]:
        """See ``engine.Engine``."""
        import onnxruntime as ort

        options = self.session.get_session_options()
        return {
            "engine": f"onnxruntime {ort.__version__}",
            "provider": self.session.get_providers()[0],
            "device": self.device,
            "threads": options.intra_op_num_threads,
            "execution": str(options.execution_mode).rpartition(".")[2],
            "graph_optimization": str(options.graph_optimization_level).rpartition(".")[2],
            "session.force_spinning_stop": options.get_session_config_entry("session.force_spinning_stop"),
            "provider_options": self.session.get_provider_options()[self.session.get_providers()[0]],
        }


class OrtEngine:
    """See ``engine.Engine``. With CUDA graphs, ONNX Runtime captures each pass itself.

    Args:
        provider: one of ``providers.PROVIDERS``.
        memory: where buffers live: the host's for ``cpu``, else a ``CudaMemory``, on whose stream everything runs.
        table: the only shapes to run with (each a captured CUDA graph); empty for any.
        heads: for a graph with heads.
        cache: folder of what the provider compiles; see ``provider_setup``.

    Raises:
        OutriderError: ONNX Runtime or the provider is not installed, or the graph does not load.
    """

    capturable = False

    def __init__(
        self,
        graph: Path,
        info: ModelInfo,
        *,
        provider: str = "cpu",
        memory: Memory | None = None,
        threads: int | None = None,
        batch: int = 1,
        table: Sequence[PlanShape] = (),
        heads: HeadInputs | None = None,
        cache: Path | None = None,
    ) -> None:
        self.info = info
        self.batch = batch
        self.provider = provider
        self.memory = memory or HostMemory()
        self.heads = heads
        stream = getattr(self.memory, "stream", None)
        stream = None if stream is None else int(stream)
        setup = provider_setup(provider, info, graph, table, batch=batch, stream=stream, cache=cache)
        self._session = OrtSession(graph, info, provider=provider, threads=threads, setup=setup)
        self.threads, self.device = self._session.threads, self._session.device
        self.input_names = self._session.input_names
        self.state = EngineState(info, batch, self.memory)
        self.table = sorted(table)
        self._plans: dict[tuple[PlanShape, bool], BoundPlan] = {}
        self._bound = 0

    def plan(self, rows: int, logit_rows: int, exact: bool = True) -> BoundPlan:
        shape = smallest_shape(self.table, rows, logit_rows) or PlanShape(rows, logit_rows)
        key = (shape, exact and shape.rows == 1)
        if key not in self._plans:
            self._plans[key] = BoundPlan(self, *key)
        return self._plans[key]

    def bind(self, shape: PlanShape, buffers: Mapping[str, Buffer]) -> Launch:
        """See ``plan.BoundEngine``. Each call is a CUDA graph of its own, where there are any."""
        import onnxruntime as ort

        binding, kind = self._session.session.io_binding(), self.memory.kind
        for name in self.input_names:
            buffer = buffers[name]
            binding.bind_input(name, kind, 0, buffer.element, buffer.shape, buffer.pointer)
        for name in self._session.output_names:
            buffer = buffers[name]
            binding.bind_output(name, kind, 0, buffer.element, buffer.shape, buffer.pointer)
        self._bound += 1
        profile = self.table.index(shape) if shape in self.table else 0
        entries = run_config(self.provider, self._bound, profile, own_stream=True)
        options = None  # given only where needed: reading its entries would cost more than the rest of the call
        if entries:
            options = ort.RunOptions()
            for name, value in entries.items():
                options.add_run_config_entry(name, value)
        return partial(self._session.run, binding, shape.rows, options)

    def describe(self) -> dict[str, Any]:
        return self._session.describe() | {"cache_bytes": self.state.cache_bytes}


def cpu_device(threads: int | None = None) -> str:
    """What decides the bits on the CPU; see ``engine.Engine``."""
    check_available("cpu")
    return _device("cpu", threads or default_threads())


def check_available(provider: str) -> None:
    """Raises OutriderError when ONNX Runtime is not installed, or not with this provider."""
    name, packages = provider_package(provider)
    try:
        import onnxruntime as ort
    except ImportError:
        raise OutriderError(f"ONNX Runtime is not installed; run `pip install '{packages}'`") from None
    if name not in ort.get_available_providers():
        raise OutriderError(
            f"this ONNX Runtime has no {name}; run `pip install '{packages}'` in an environment of its own"
        )


def _device(provider: str, threads: int) -> str:
    import onnxruntime as ort

    processor = platform.processor() or platform.machine()
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.is_file():
        fields = dict(line.split(":", 1) for line in cpuinfo.read_text().splitlines() if ":" in line)
        known = {name.strip(): value.strip() for name, value in fields.items()}
        names = ("model name", "cpu family", "model", "CPU part")
        processor = " ".join(known[name] for name in names if name in known) or processor
        # A virtual machine may hide some, and its name says nothing of the kernels then.
        there = known.get("flags", "").split()
        processor = " ".join([processor, *(flag for flag in _VECTORS if flag in there)])
    return f"{processor}, {provider}, {threads} threads, onnxruntime {ort.__version__}"


@contextmanager
def _whole_attention() -> Iterator[None]:
    """CPU kernels that are made in the block compute attention over all positions at once, not in pieces.

    ONNX Runtime's GroupQueryAttention cuts positions into pieces by the size of the L2 cache (since its pull request
    28962), and adds up heads wider than 128 in another way where the last piece is short: a row's bits would depend on
    how many rows stand behind it. There is no session option, and the variable is read when a kernel is made.
    """
    with _ENVIRONMENT:
        before = os.environ.get(_NO_PIECES)
        os.environ[_NO_PIECES] = "1"
        try:
            yield
        finally:
            if before is None:
                del os.environ[_NO_PIECES]
            else:
                os.environ[_NO_PIECES] = before


def _open_session(setup: ProviderSetup, threads: int, many_shapes: bool) -> Any:
    import onnxruntime as ort

    options = ort.SessionOptions()
    options.intra_op_num_threads = threads
    options.inter_op_num_threads = 1
    options.execution_mode = ort.ExecutionMode.ORT_SEQUENTIAL
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_ENABLE_ALL
    options.log_severity_level = 3
    # A pattern is kept for good for each shape, and the arena never gives anything back.
    options.enable_mem_pattern = options.enable_cpu_mem_arena = not many_shapes
    for name, value in setup.session_config.items():
        options.add_session_config_entry(name, value)
    for name, size in setup.free_dimensions.items():
        options.add_free_dimension_override_by_name(name, size)
    try:
        session = ort.InferenceSession(str(setup.model), options, providers=[(setup.name, setup.options)])
    except Exception as error:  # ONNX Runtime raises many types, none of them its own
        raise OutriderError(f"{setup.model} does not load: {error}") from None
    if session.get_providers()[0] != setup.name:  # it falls back to the CPU with a log line only
        raise OutriderError(f"{setup.name} does not start here; check the driver and the CUDA libraries")
    return session


def _check_shapes(graph: Path, info: ModelInfo, session: Any) -> None:
    """The manifest and the graph must speak of the same model."""
    shapes = {entry.name: entry.shape for entry in [*session.get_inputs(), *session.get_outputs()]}
    cache = [info.num_kv_heads, info.capacity, info.head_dim]
    last = f"past_value.{info.num_layers - 1}"
    if shapes.get(last, [])[1:] != cache or shapes.get("logits", [])[-1:] != [info.vocab_size]:
        raise OutriderError(f"{graph} is not the model that its manifest describes; export the bundle again")
