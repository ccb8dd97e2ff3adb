"""A model of a bundle on a provider: which graph, which memory, which engine."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from outrider.engines.bundle import Bundle, ModelInfo
from outrider.engines.cache import cache_folder
from outrider.engines.cuda import CudaDriver, CudaMemory
from outrider.engines.engine import DRAFT_TABLE, Engine, HeadInputs, PlanShape, noise_slots, plan_table
from outrider.engines.errors import OutriderError
from outrider.engines.ort import OrtEngine, check_available, cpu_device
from outrider.engines.packed import PackedEngine
from outrider.engines.probe import RowProbe, known_rows, packed_reference, probe_packed
from outrider.engines.providers import PROVIDERS as ORT_PROVIDERS
from outrider.engines.providers import cache_key, check_provider, provider_setup
from outrider.engines.single import SingleEngine
from outrider.engines.tensorrt import LIBRARIES, TensorrtEngine, check_built, check_graph, load_library

PROVIDERS = (*ORT_PROVIDERS, *LIBRARIES)


@dataclass
class Opener:
    """Opens the models of one bundle; on the GPU they share its stream and, with one tokenizer, their heads' inputs."""

    bundle: Bundle
    threads: int | None = None
    _memory: CudaMemory | None = None
    _heads: dict[str, HeadInputs] = field(default_factory=dict)  # by tokenizer

    def open(self, role: str, provider: str) -> Engine:
        """The engine of ``target`` or ``draft``.

        Raises:
            OutriderError: no such provider, or it cannot run this model here.
        """
        bundle, info = self.bundle, self.bundle.manifest.models[role]
        if provider not in PROVIDERS:
            raise OutriderError(f"unknown provider {provider!r}; choose one of {', '.join(PROVIDERS)}")
        if provider == "cpu":
            return OrtEngine(bundle.path(info.graph), info, threads=self.threads)
        # What is missing is said before a GPU is asked for.
        if provider in LIBRARIES:
            check_graph(bundle, info)
            library = load_library(provider)
            check_built(bundle, role, library)
            return TensorrtEngine.load(bundle, role, library, *self._gpu(info))
        check_provider(provider, info, bundle.path(info.graph))
        check_available(provider)
        memory, heads = self._gpu(info)
        graph = bundle.path(info.resident_graph)
        table = plan_table((0, *bundle.manifest.tiers)) if role == "target" else DRAFT_TABLE
        return OrtEngine(
            graph,
            info,
            provider=provider,
            memory=memory,
            threads=self.threads,
            table=table,
            heads=heads,
            cache=self._cache(provider, role, table, memory) if provider.startswith("ort-") else None,
        )

    def _cache(self, provider: str, role: str, table: Sequence[PlanShape], memory: CudaMemory) -> Path | None:
        """The user's folder of what ONNX Runtime compiles of this model for this GPU."""
        import onnxruntime as ort

        info = self.bundle.manifest.models[role]
        options = provider_setup(provider, info, self.bundle.path(info.resident_graph), table).options
        sha256 = self.bundle.files[info.resident_graph]["sha256"] + self.bundle.files[info.weights]["sha256"]
        key = cache_key(info, sha256, ort.__version__, memory.driver.name, options)
        return cache_folder(f"{provider}-{key}")

    def _gpu(self, info: ModelInfo) -> tuple[CudaMemory, HeadInputs]:
        if self._memory is None:
            self._memory = CudaMemory(CudaDriver())
        if info.tokenizer not in self._heads:
            slots = noise_slots(self.bundle.manifest.tiers)
            self._heads[info.tokenizer] = HeadInputs(self._memory, info.vocab_size, slots)
        return self._memory, self._heads[info.tokenizer]


def open_single(opener: Opener, role: str, provider: str, tiers: Sequence[int]) -> tuple[SingleEngine, str]:
    """A model of a bundle on any provider for one sequence, asked as for many; and the row probe's word on it.

    Raises:
        OutriderError: see ``Opener.open``.
    """
    engine = opener.open(role, provider)
    info = opener.bundle.manifest.models[role]
    rows = known_rows(info, engine, tiers) if role == "target" else RowProbe("", 1)
    return SingleEngine(engine, rows.min_rows), rows.exactness


def open_packed(
    bundle: Bundle, role: str, *, sequences: int, most_rows: int, threads: int | None = None
) -> tuple[PackedEngine, str]:
    """A model of a bundle on the CPU for many sequences at once, and whether its rows are those of single runs.

    Raises:
        OutriderError: the bundle has no packed graph of it.
    """
    info = bundle.manifest.models[role]
    if info.packed_graph not in bundle.files:
        raise OutriderError(
            f"{bundle.folder} has no graph of its {role} for several requests at once; use --max-batch 1, or export it "
            "with --lowering fused in fp32, int8 or int4"
        )
    reference, min_rows = None, info.min_rows
    if info.device != cpu_device(threads) and role == "target":  # with exact acceptance a draft's bits decide no text
        # The export's probe holds for the machine that it ran on. One session at a time, for the memory of both.
        engine = OrtEngine(bundle.path(info.graph), info, threads=threads)
        min_rows = known_rows(info, engine, bundle.manifest.tiers).min_rows
        reference = packed_reference(engine, min_rows)
        del engine
    shape = {"sequences": sequences, "min_rows": min_rows, "most_rows": most_rows}
    packed = PackedEngine(bundle.path(info.packed_graph), info, **shape, threads=threads)
    return packed, info.packed_exactness if reference is None else probe_packed(packed, reference)
