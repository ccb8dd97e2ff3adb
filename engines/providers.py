"""How ONNX Runtime opens a session on each provider: names, options and shapes, as plain data.

Option names and meanings: the pages "CUDA Execution Provider", "TensorRT Execution Provider" and "NVIDIA TensorRT RTX
Execution Provider" of onnxruntime.ai/docs, and "Provider options" of the TensorRT RTX plugin. The two TensorRT
providers are not run yet.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import NamedTuple

from outrider.engines.bundle import ModelInfo
from outrider.engines.engine import PlanShape
from outrider.engines.errors import OutriderError

_CONTEXT = "model_ctx.onnx"  # the graph with its engine in place of its nodes, in the cache folder
TENSORRT_PRECISIONS = ("fp32", "fp16", "bf16", "int4", "fp8")


class _Provider(NamedTuple):
    name: str
    precisions: tuple[str, ...]
    lowering: str | None  # None for any


_PROVIDERS = {
    "cpu": _Provider("CPUExecutionProvider", ("fp32", "fp16", "fp8", "int8", "int4"), None),
    "cuda": _Provider("CUDAExecutionProvider", ("fp16",), "fused"),
    "ort-tensorrt": _Provider("TensorrtExecutionProvider", TENSORRT_PRECISIONS, "standard"),
    "ort-tensorrt-rtx": _Provider("NvTensorRTRTXExecutionProvider", TENSORRT_PRECISIONS, "standard"),
}
PROVIDERS = tuple(_PROVIDERS)


@dataclass(frozen=True)
class ProviderSetup:
    """What a session is opened with.

    ``model`` is the file to open: the graph, or what an earlier session compiled of it. ``name`` is ONNX Runtime's own,
    ``session_config`` holds session config entries, ``free_dimensions`` values of the graph's named dimensions.
    """

    name: str
    model: Path
    options: dict[str, str]
    session_config: dict[str, str]
    free_dimensions: dict[str, int]


def check_provider(provider: str, info: ModelInfo, graph: Path) -> None:
    """Refuse a provider that does not exist, and a graph that it does not run, saying what to export instead."""
    _, precisions, lowering = _known(provider)
    if set(info.precisions) <= set(precisions) and lowering in (None, info.lowering):
        return
    wanted = f"--precision {' or '.join(precisions)}" + (f" --lowering {lowering}" if lowering else "")
    found = " and ".join(info.precisions)
    raise OutriderError(f"{graph} is {found}, {info.lowering}; the {provider} provider runs {wanted}")


def provider_package(provider: str) -> tuple[str, str]:
    """ONNX Runtime's name of a provider, and the extra that installs it."""
    return _known(provider).name, f"outrider[{'cpu' if provider == 'cpu' else 'cuda'}]"


def provider_setup(
    provider: str,
    info: ModelInfo,
    graph: Path,
    table: Sequence[PlanShape],
    *,
    batch: int = 1,
    stream: int | None = None,
    cache: Path | None = None,
) -> ProviderSetup:
    """How to open ``graph``.

    Args:
        table: the plans (``plan_table``).
        stream: address of a CUDA stream to run on; it must outlive the session.
        cache: folder of this session's engines, named by ``cache_key`` of its options without ``stream`` and ``cache``.

    Raises:
        OutriderError: no such provider, or it does not run this graph.
    """
    check_provider(provider, info, graph)
    # Target and draft each have a pool: without this, the threads of the idle one spin on the busy one's cores.
    config = {"session.force_spinning_stop": "1"}
    setup = ProviderSetup(_PROVIDERS[provider].name, graph, {}, config, {})
    if provider == "cpu":
        config["session.disable_quant_qdq"] = "1"  # with it, a dequantized matrix is expanded anew in every pass
        return setup
    setup.options.update(device_id="0")
    if stream is not None:
        setup.options.update(has_user_compute_stream="1", user_compute_stream=str(stream))
    if provider == "cuda":
        # Not session.disable_cpu_ep_fallback: nodes that compute shapes may be on the host, and ONNX Runtime itself
        # refuses to capture when any other is. TF32 would round the factors of float32 products to 10 bits. A captured
        # graph keeps its memory for good, so none is reserved ahead (and no CUDA memory pool: it cannot be captured).
        setup.options.update(enable_cuda_graph="1", use_tf32="0", arena_extend_strategy="kSameAsRequested")
        return setup
    config["session.disable_cpu_ep_fallback"] = "1"  # the engine takes the whole graph, shapes included
    setup.free_dimensions["batch"] = batch  # leaves the caches fixed, so that profiles need not list them
    compiled = cache is not None and (cache / _CONTEXT).is_file()
    if provider == "ort-tensorrt":
        # It builds several profiles but runs profile 0 only (onnxruntime#31624), so one must hold every plan.
        shapes = profile_shapes(table, batch, single=True)
        setup.options.update(_tensorrt(shapes, cache, compiled))
    else:
        setup.options.update(_tensorrt_rtx(profile_shapes(table, batch, single=False), cache))
        if cache and not compiled:
            context = {"enable": "1", "file_path": str(cache / _CONTEXT), "embed_mode": "0"}
            config.update({f"ep.context_{name}": value for name, value in context.items()})
    # What is compiled is opened in place of the graph: ONNX Runtime refuses to write it again.
    return replace(setup, model=cache / _CONTEXT) if cache and compiled else setup


def run_config(provider: str, graph_id: int, profile: int, *, own_stream: bool = False) -> dict[str, str]:
    """Run options entries of a plan.

    Args:
        graph_id: of what is bound, from 1: other addresses are another graph.
        profile: the place of the plan's shape in the table.
        own_stream: the session runs on the caller's stream, who orders all copies with it. Otherwise a run ends when
            the device is done, since copies to and from buffers are not ordered with it (onnxruntime#26609).
    """
    _known(provider)
    config = {}
    if provider == "cuda":
        config["gpu_graph_id"] = str(graph_id)
    elif provider == "ort-tensorrt-rtx":
        # The provider inside ONNX Runtime reads the first name, the plugin the second.
        config |= {"gpu_graph_id": str(graph_id), "cuda_graph_annotation_id": str(graph_id)}
        config["nv_profile_index"] = str(profile)
    if own_stream and provider != "cpu":
        config["disable_synchronize_execution_providers"] = "1"
    return config


def profile_shapes(table: Sequence[PlanShape], batch: int, *, single: bool) -> tuple[str, str, str]:
    """The least, best and greatest input shapes of each optimization profile, as both TensorRT providers read them.

    A name that comes again begins the next profile (``ParseProfileShapes`` in their sources). Only inputs that vary
    once the batch is fixed are named.

    Args:
        single: one profile for all plans, best at the widest pass that is not a prefill; otherwise one for each plan.
    """
    rows, logit_rows = zip(*table, strict=True)
    low, high = PlanShape(min(rows), min(logit_rows)), PlanShape(max(rows), max(logit_rows))
    best = max((shape for shape in table if shape.rows == shape.logit_rows), default=high)
    profiles = [(low, best, high)] if single else [(shape, shape, shape) for shape in table]
    least, opt, most = (
        ",".join(f"input_ids:{batch}x{shape.rows},logit_rows:{batch}x{shape.logit_rows}" for shape in shapes)
        for shapes in zip(*profiles, strict=True)
    )
    return least, opt, most


def cache_key(info: ModelInfo, graph_sha256: str, engine_version: str, device: str, options: Mapping[str, str]) -> str:
    """The name of a cache folder: another for any other graph, engine, device or option.

    Args:
        engine_version: of ONNX Runtime and of TensorRT, since an engine fits one version of each.
        options: as strings that are the same in every process: no address of a stream.
    """
    parts = [asdict(info), graph_sha256, engine_version, device, dict(options)]
    return hashlib.sha256(json.dumps(parts, sort_keys=True, separators=(",", ":")).encode()).hexdigest()[:16]


def _known(provider: str) -> _Provider:
    if provider not in _PROVIDERS:
        raise OutriderError(f"unknown provider {provider!r}; choose one of {', '.join(PROVIDERS)}")
    return _PROVIDERS[provider]


def _tensorrt(shapes: tuple[str, str, str], cache: Path | None, compiled: bool) -> dict[str, str]:
    # No precision flags: the graph carries its own types, and TensorRT 11 knows no others (its migration guide). No
    # CUDA graph: it keeps one (onnxruntime#17355), which would be replayed for every plan (onnxruntime#20050).
    options = {**_profiles("trt", shapes), "trt_cuda_graph_enable": "0"}
    if cache is None:
        return options
    options.update(trt_engine_cache_enable="1", trt_engine_cache_prefix=cache.name)
    options.update(trt_timing_cache_enable="1", trt_timing_cache_path=str(cache))
    if compiled:
        return options | {"trt_engine_cache_path": str(cache / "engines")}
    # While the context is written, the engines' path must be relative to it ("TensorRT EP Caches"); and they are files
    # beside it (mode 0), since embedded ones load slowly.
    options.update(trt_dump_ep_context_model="1", trt_ep_context_file_path=str(cache / _CONTEXT))
    return options | {"trt_ep_context_embed_mode": "0", "trt_engine_cache_path": "engines"}


def _tensorrt_rtx(shapes: tuple[str, str, str], cache: Path | None) -> dict[str, str]:
    options = {**_profiles("nv", shapes), "nv_multi_profile_enable": "1", "enable_cuda_graph": "1"}
    return options | {"nv_runtime_cache_path": str(cache / "runtime")} if cache else options


def _profiles(prefix: str, shapes: tuple[str, str, str]) -> dict[str, str]:
    return {f"{prefix}_profile_{name}_shapes": text for name, text in zip(("min", "opt", "max"), shapes, strict=True)}
