"""A graph of a bundle -> an engine file, one optimization profile a plan, each with one shape only (static K).

TensorRT for RTX builds for any architecture on a machine without a GPU; TensorRT builds for the GPU it runs on.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections import Counter
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from tempfile import NamedTemporaryFile
from time import perf_counter
from typing import Any

from outrider.engines.bundle import ENGINES, Bundle, EngineFile, ModelInfo
from outrider.engines.cache import store
from outrider.engines.cuda import CudaDriver
from outrider.engines.engine import DRAFT_TABLE, PlanShape, plan_table
from outrider.engines.errors import OutriderError
from outrider.engines.providers import TENSORRT_PRECISIONS
from outrider.engines.tensorrt.library import Interrupts, Library, Progress, load_library, progress_monitor

ANY = "any"  # an engine for every architecture that the library supports
_LEAST_ARCH = {"bf16": 80, "int4": 80, "fp8": 89}
_SETTINGS = 1  # another number for engines that this module would build in another way


@dataclass(frozen=True)
class BuildOptions:
    """``arch`` is ``sm89`` or the like, or ``any``; ``tiers`` are the values of K to have a plan for.

    Of a target, K = 0 is a plan of one row: the fastest plain decoding, but TensorRT lays out most weights anew for it.
    ``weight_streaming`` lets weights that do not fit on the device stay on the host.
    """

    engine: str
    arch: str
    tiers: tuple[int, ...]
    weight_streaming: bool = False


def check_build(bundle: Bundle, role: str, options: BuildOptions) -> Library:
    """The library of a build that can begin.

    Raises:
        OutriderError: the library is not installed, the graph is not for it, it has no such architecture, a K that the
            bundle does not serve, or a folder that cannot be written.
    """
    library = load_library(options.engine)
    check_graph(bundle, bundle.manifest.models[role])
    _capability(library, options.arch)
    precision = bundle.manifest.models[role].precision
    least = _LEAST_ARCH.get(precision, 0)
    if options.arch != ANY and int(options.arch[2:]) < least:
        raise OutriderError(
            f"{precision} needs sm{least} or newer, not {options.arch}; export with another --precision"
        )
    tiers = bundle.manifest.tiers
    if not any(options.tiers):
        raise OutriderError("no K above 0 is to be built; give one, as in --k 0,4")
    if not set(options.tiers) <= {0, *tiers}:
        raise OutriderError(
            f"K = {_list(options.tiers)} is not among the tiers of {bundle.folder}, {_list(tiers)}; export with --k"
        )
    if not os.access(bundle.folder, os.W_OK):
        raise OutriderError(f"{bundle.folder} cannot be written; build in a copy of the bundle")
    return library


def build_engine(
    bundle: Bundle,
    role: str,
    options: BuildOptions,
    progress: Progress = lambda stage, share: None,
) -> tuple[EngineFile, bool]:
    """Build the engine of ``target`` or ``draft`` into the bundle, unless it is there.

    Args:
        progress: called with what is being done and the share of the whole that is.

    Returns:
        The engine's record, and whether it was built now.

    Raises:
        OutriderError: see ``check_build``, or the library refuses a node; the bundle is left as it was.
    """
    library, info = check_build(bundle, role, options), bundle.manifest.models[role]
    table = plan_table(options.tiers) if role == "target" else DRAFT_TABLE
    key = engine_key(bundle, role, library, options, table)
    found = _built(bundle, key)
    if found is not None:
        return found, False
    start = perf_counter()
    with Interrupts() as interrupts:
        network = _Network(library, bundle.path(info.resident_graph), info)
        monitor = progress_monitor(library.module, progress, interrupts)
        plan = _serialized(library, network, table, options, bundle.folder / ENGINES, monitor)
    if interrupts.came:
        raise KeyboardInterrupt
    if plan is None:
        raise OutriderError(
            f"{options.engine} could not build {network.graph} ({info.precision}) for {options.arch}: "
            f"{library.log.take()}; build for another --arch, or export with another --precision"
        )
    record = EngineFile(
        file=f"{ENGINES}/{role}.{options.engine}-{library.version}.{options.arch}.{key[:8]}.engine",
        role=role,
        engine=options.engine,
        version=library.version,
        arch=options.arch,
        key=key,
        plans=tuple(tuple(shape) for shape in table),
        layers=network.layers,
        aliases=network.aliases,
        weight_streaming=options.weight_streaming,
        build_seconds=perf_counter() - start,
    )
    _store(bundle, record, plan)
    return record, True


def _serialized(
    library: Library,
    network: _Network,
    table: Sequence[PlanShape],
    options: BuildOptions,
    folder: Path,
    monitor: Any,
) -> Any:
    """The engine's bytes, built; None where that fails."""
    config = _configure(library, network, table, options)
    config.progress_monitor = monitor
    timing = _TimingCache(library, config, folder / f"{options.engine}-{options.arch}.timing")
    plan = network.builder.build_serialized_network(network.definition, config)
    if plan is not None:
        timing.save()
    return plan


def check_graph(bundle: Bundle, info: ModelInfo) -> None:
    """Raises OutriderError for a graph of operators that are not TensorRT's."""
    if info.lowering != "standard" or not set(info.precisions) <= set(TENSORRT_PRECISIONS):
        found, (*others, last) = " and ".join(info.precisions), TENSORRT_PRECISIONS
        raise OutriderError(
            f"{bundle.path(info.graph)} is {found}, {info.lowering}; TensorRT takes --lowering standard "
            f"--precision {', '.join(others)} or {last}: export again"
        )


def engine_key(bundle: Bundle, role: str, library: Library, options: BuildOptions, table: Sequence[PlanShape]) -> str:
    """The sha256 of all that an engine depends on."""
    info = bundle.manifest.models[role]
    parts = {
        "settings": _SETTINGS,
        "graph": bundle.files[info.resident_graph]["sha256"],
        "weights": bundle.files[info.weights]["sha256"],
        "engine": options.engine,
        "version": library.version,
        "arch": options.arch,
        "plans": [list(shape) for shape in table],
        "weight_streaming": options.weight_streaming,
    }
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()


class _Network:
    """The graph as the library's parser reads it, strongly typed: its types are the graph's own.

    ``layers`` counts its kinds, ``aliases`` its outputs that are an input's own memory.
    """

    def __init__(self, library: Library, graph: Path, info: ModelInfo) -> None:
        trt = library.module
        self.graph = graph
        self.builder = trt.Builder(library.log.logger)
        self.definition = self.builder.create_network(1 << int(trt.NetworkDefinitionCreationFlag.STRONGLY_TYPED))
        parser = trt.OnnxParser(self.definition, library.log.logger)
        if not parser.parse_from_file(str(graph)):
            raise OutriderError(f"{library.name} does not take {graph}: {_first_error(parser)}")
        layers = [self.definition.get_layer(index) for index in range(self.definition.num_layers)]
        self.layers = dict(sorted(Counter(_kind(layer) for layer in layers).items()))
        outputs = {self.definition.get_output(index).name for index in range(self.definition.num_outputs)}
        updates = [layer for layer in layers if _kind(layer) == "KV_CACHE_UPDATE"]
        self.aliases = sum(layer.get_output(0).name in outputs for layer in updates)
        if self.aliases != 2 * info.num_layers:
            raise OutriderError(
                f"{library.name} {library.version} updates {self.aliases} of the {2 * info.num_layers} caches of "
                f"{graph} in place; use a newer version"
            )


def _configure(library: Library, network: _Network, table: Iterable[PlanShape], options: BuildOptions) -> Any:
    trt = library.module
    config = network.builder.create_builder_config()
    for shape in table:
        profile = network.builder.create_optimization_profile()
        for index in range(network.definition.num_inputs):
            tensor = network.definition.get_input(index)
            dims = input_shape(tensor.name, tuple(tensor.shape), shape)
            profile.set_shape(tensor.name, dims, dims, dims)
        config.add_optimization_profile(profile)
    config.clear_flag(trt.BuilderFlag.TF32)  # it would round float32 products to 10 bits
    if options.weight_streaming:
        config.set_flag(trt.BuilderFlag.WEIGHT_STREAMING)
    elif hasattr(trt.BuilderFlag, "REQUIRE_USER_ALLOCATION"):
        # Of RTX: passes cannot be captured without it, and weights cannot be streamed with it.
        config.set_flag(trt.BuilderFlag.REQUIRE_USER_ALLOCATION)
    capability = _capability(library, options.arch)
    if capability is not None:
        config.num_compute_capabilities = 1
        config.set_compute_capability(capability, 0)
    return config


def input_shape(name: str, declared: Sequence[int], shape: PlanShape) -> tuple[int, ...]:
    """An input's shape in a plan of batch 1; ``declared`` has -1 for what is open."""
    if name == "input_ids":
        return (1, shape.rows)
    if name == "logit_rows":
        return (1, shape.logit_rows)
    return tuple(1 if size < 0 else size for size in declared)


def _capability(library: Library, arch: str) -> Any:
    """The library's name of an architecture; None where a build names none."""
    if library.name == "tensorrt":
        here = CudaDriver().arch
        if arch != here:
            raise OutriderError(f"{library.name} builds for the GPU it runs on, which is {here}; use --arch {here}")
        return None
    known = library.module.ComputeCapability.__members__
    names = [name.lower() for name in known if name.startswith("SM")]
    if arch == ANY:
        return None
    if arch not in names:
        raise OutriderError(
            f"{library.name} {library.version} has no architecture {arch!r}; choose of {', '.join(names)}, or {ANY}"
        )
    return known[arch.upper()]


def _built(bundle: Bundle, key: str) -> EngineFile | None:
    """An engine with this key whose file is whole; a damaged one is built again."""
    for engine in bundle.manifest.engines:
        if engine.key == key:
            with suppress(OutriderError):
                bundle.engine_path(engine)
                return engine
    return None


def _store(bundle: Bundle, record: EngineFile, plan: Any) -> None:
    folder = bundle.folder / ENGINES
    try:
        folder.mkdir(exist_ok=True)
        with NamedTemporaryFile(dir=folder, prefix=".engine.", delete=False) as file:
            built = Path(file.name)
        try:
            with built.open("wb") as file:
                file.write(memoryview(plan))
            built.chmod(0o644)
            bundle.add_engine(record, built)
        finally:
            built.unlink(missing_ok=True)
    except OSError as error:
        raise OutriderError(f"could not write {folder}: {error.strerror or error}; the bundle is as it was") from error


class _TimingCache:
    """Timings of kernels on this device, kept beside the engines, so that the next build takes less time.

    Not for RTX, which times nothing when it builds (and would ask for a GPU).
    """

    def __init__(self, library: Library, config: Any, path: Path) -> None:
        self._config = config
        self._path = path if library.name == "tensorrt" else None
        if self._path is not None:
            path.parent.mkdir(exist_ok=True)
            blob = self._path.read_bytes() if self._path.is_file() else b""
            cache = config.create_timing_cache(blob) or config.create_timing_cache(b"")  # None for a damaged one
            config.set_timing_cache(cache, ignore_mismatch=False)

    def save(self) -> None:
        if self._path is not None:
            store(self._path, bytes(memoryview(self._config.get_timing_cache().serialize())))


def _list(numbers: Sequence[int]) -> str:
    return ", ".join(map(str, numbers))


def _kind(layer: Any) -> str:
    return str(layer.type).rpartition(".")[2]


def _first_error(parser: Any) -> str:
    if not parser.num_errors:
        return "no reason was given"
    error = parser.get_error(0)
    return f"node {error.node_name()!r}, operator {error.node_operator()}: {error.desc()}"
