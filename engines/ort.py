"""ONNX Runtime engine: one session a model, one I/O binding a plan, caches updated in place.

On the CPU the graph takes any number of rows, so a plan is exact. With CUDA graphs each plan is captured under its own
annotation id and replayed, because its addresses and shapes never change.
"""

from __future__ import annotations

import os
import platform
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from outrider.engines.buffers import Buffer
from outrider.engines.bundle import ModelInfo
from outrider.engines.errors import OutriderError
from outrider.engines.huge_pages import huge_pages

_PROVIDERS = {"cpu": "CPUExecutionProvider", "cuda": "CUDAExecutionProvider"}
_CACHES = ("key", "value")


def default_threads() -> int:
    """The processors this process may use, the quota of its container included."""
    count = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quota = Path("/sys/fs/cgroup/cpu.max")
    if quota.is_file():
        limit, period = quota.read_text().split()
        if limit != "max":
            count = min(count, max(1, int(limit) // int(period)))
    return count


class OrtEngine:
    """See ``engine.Engine``.

    Args:
        provider: ``cpu`` or ``cuda``.
        row_tiers: the only numbers of rows to run with (each a captured CUDA graph); empty for any number.

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
        batch: int = 1,
        row_tiers: Sequence[int] = (),
    ) -> None:
        if provider == "cuda" and (info.precision, info.lowering) != ("fp16", "fused"):
            raise OutriderError(
                f"{graph} is {info.precision}, {info.lowering}; the cuda provider runs --precision fp16 "
                "--lowering fused"
            )
        self.info = info
        self.batch = batch
        self.provider = provider
        self.threads = threads or default_threads()
        with huge_pages() if provider == "cpu" else nullcontext():
            self.session = _open_session(graph, provider, self.threads)
        self.input_names = {entry.name for entry in self.session.get_inputs()}
        _check_shapes(graph, info, self.session)
        self.device = _device(provider, self.threads)
        self._row_tiers = sorted(row_tiers)
        shape = (batch, info.num_kv_heads, info.capacity, info.head_dim)
        self.caches = {
            f"{kind}.{layer}": Buffer(shape, np.dtype(info.cache_dtype), provider)
            for layer in range(info.num_layers)
            for kind in _CACHES
        }
        self.cache_lengths = Buffer((batch,), np.int32, provider)
        self._logits: dict[int, Buffer] = {}
        self._plans: dict[tuple[int, int, bool], OrtPlan] = {}

    def plan(self, rows: int, logit_rows: int, exact: bool = True) -> OrtPlan:
        tier = next((tier for tier in self._row_tiers if tier >= rows), rows)
        key = (tier, tier if logit_rows == rows else logit_rows, exact and tier == 1)
        if key not in self._plans:
            self._plans[key] = OrtPlan(self, *key, graph_id=len(self._plans) + 1)
        return self._plans[key]

    def logits(self, rows: int) -> Buffer:
        """The logits buffer that all plans with this many logit rows share."""
        if rows not in self._logits:
            self._logits[rows] = Buffer((self.batch, rows, self.info.vocab_size), np.float32, self.provider)
        return self._logits[rows]

    def describe(self) -> dict[str, Any]:
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
            "cuda_graph": self.provider == "cuda",
            "cache_bytes": sum(cache.array.nbytes for cache in self.caches.values()),
        }


class OrtPlan:
    """See ``engine.Plan``. Small inputs are written in place; nothing is bound after construction."""

    def __init__(self, engine: OrtEngine, rows: int, logit_rows: int, spare_row: bool, graph_id: int) -> None:
        import onnxruntime as ort

        self.rows = rows
        self.logit_rows = logit_rows
        device = engine.provider
        self._run = engine.session.run_with_iobinding
        self._capacity = engine.info.capacity
        self._attention_rows = rows + spare_row
        self._ids = Buffer((engine.batch, rows), np.int64, device)
        self._lengths = engine.cache_lengths
        self._wanted = Buffer((engine.batch, logit_rows), np.int64, device)
        self._logits = engine.logits(logit_rows)
        self._first_wanted = -1
        self._options = None  # given only where needed: reading its entries would cost more than the rest of the call
        if device == "cuda":
            self._options = ort.RunOptions()
            self._options.add_run_config_entry("gpu_graph_id", str(graph_id))
        self._binding = engine.session.io_binding()
        inputs = {"input_ids": self._ids, "cache_lengths": self._lengths, "logit_rows": self._wanted}
        if "spare_rows" in engine.input_names:
            inputs["spare_rows"] = Buffer((1,), np.int64, device)
            inputs["spare_rows"].write(int(spare_row))
        if "rows" in engine.input_names:
            inputs["rows"] = Buffer((1,), np.int32, device)
            inputs["rows"].write(rows)
        for name, buffer in inputs.items():
            self._binding.bind_ortvalue_input(name, buffer.value)
        for name, buffer in engine.caches.items():
            self._binding.bind_ortvalue_input(f"past_{name}", buffer.value)
            self._binding.bind_ortvalue_output(f"present_{name}", buffer.value)
        self._binding.bind_ortvalue_output("logits", self._logits.value)

    def run(self, input_ids: NDArray[np.int64], cache_lengths: NDArray[np.int32]) -> NDArray[np.float32]:
        valid = input_ids.shape[1]
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
        first = max(0, valid - self.logit_rows)
        if first != self._first_wanted:
            self._first_wanted = -1  # an interrupt in between must not leave the old value beside the new rows
            self._wanted.write(np.arange(first, first + self.logit_rows))
            self._first_wanted = first
        self._run(self._binding, self._options)
        return self._logits.read()[:, : valid - first]


def _device(provider: str, threads: int) -> str:
    import onnxruntime as ort

    processor = platform.processor() or platform.machine()
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.is_file():
        fields = dict(line.split(":", 1) for line in cpuinfo.read_text().splitlines() if ":" in line)
        known = {name.strip(): value.strip() for name, value in fields.items()}
        names = ("model name", "cpu family", "model", "CPU part")
        processor = " ".join(known[name] for name in names if name in known) or processor
    return f"{processor}, {provider}, {threads} threads, onnxruntime {ort.__version__}"


def _open_session(graph: Path, provider: str, threads: int) -> Any:
    try:
        import onnxruntime as ort
    except ImportError:
        raise OutriderError("ONNX Runtime is not installed; run `pip install 'outrider[cpu]'`") from None
    if provider not in _PROVIDERS:
        raise OutriderError(f"unknown provider {provider!r}; choose one of {', '.join(_PROVIDERS)}")
    if _PROVIDERS[provider] not in ort.get_available_providers():
        raise OutriderError(
            f"this ONNX Runtime has no {_PROVIDERS[provider]}; run `pip install 'outrider[{provider}]'` "
            "in an environment of its own"
        )
    options = ort.SessionOptions()
    options.intra_op_num_threads = threads
    options.inter_op_num_threads = 1
    options.execution_mode = ort.ExecutionMode.ORT_SEQUENTIAL
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_ENABLE_ALL
    options.log_severity_level = 3
    # Target and draft each have a pool: without this, the threads of the idle one spin on the busy one's cores.
    options.add_session_config_entry("session.force_spinning_stop", "1")
    providers: list[Any] = [_PROVIDERS[provider]]
    if provider == "cuda":
        providers = [(_PROVIDERS[provider], {"enable_cuda_graph": "1"})]
    try:
        session = ort.InferenceSession(str(graph), options, providers=providers)
    except Exception as error:  # ONNX Runtime raises many types, none of them its own
        raise OutriderError(f"{graph} does not load: {error}") from None
    if session.get_providers()[0] != _PROVIDERS[provider]:  # it falls back to the CPU with a log line only
        raise OutriderError(f"{_PROVIDERS[provider]} does not start here; check the driver and the CUDA libraries")
    return session


def _check_shapes(graph: Path, info: ModelInfo, session: Any) -> None:
    """The manifest and the graph must speak of the same model."""
    shapes = {entry.name: entry.shape for entry in [*session.get_inputs(), *session.get_outputs()]}
    cache = [info.num_kv_heads, info.capacity, info.head_dim]
    last = f"past_value.{info.num_layers - 1}"
    if shapes.get(last, [])[1:] != cache or shapes.get("logits", [])[-1:] != [info.vocab_size]:
        raise OutriderError(f"{graph} is not the model that its manifest describes; export the bundle again")
