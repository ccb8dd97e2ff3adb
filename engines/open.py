"""A model of a bundle on a provider: which graph, which memory, which engine."""

from __future__ import annotations

from dataclasses import dataclass, field

from outrider.engines.bundle import Bundle
from outrider.engines.cuda import CudaDriver, CudaMemory
from outrider.engines.engine import DRAFT_TABLE, Engine, HeadInputs, noise_slots, plan_table
from outrider.engines.errors import OutriderError
from outrider.engines.memory import HostMemory
from outrider.engines.ort import OrtEngine
from outrider.engines.providers import PROVIDERS as ORT_PROVIDERS
from outrider.engines.tensorrt import LIBRARIES, TensorrtEngine

PROVIDERS = (*ORT_PROVIDERS, *LIBRARIES)


@dataclass
class Opener:
    """Opens the models of one bundle; those on the GPU share its stream, and what their heads choose by."""

    bundle: Bundle
    threads: int | None = None
    _memory: CudaMemory | None = None
    _heads: HeadInputs | None = field(default=None, repr=False)

    def open(self, role: str, provider: str) -> Engine:
        """The engine of ``target`` or ``draft``.

        Raises:
            OutriderError: no such provider, or it cannot run this model here.
        """
        info, tiers = self.bundle.manifest.models[role], self.bundle.manifest.tiers
        if provider not in PROVIDERS:
            raise OutriderError(f"unknown provider {provider!r}; choose one of {', '.join(PROVIDERS)}")
        if provider == "cpu":
            return OrtEngine(self.bundle.path(info.graph), info, memory=HostMemory(), threads=self.threads)
        if self._memory is None:
            self._memory = CudaMemory(CudaDriver())
        if self._heads is None:
            self._heads = HeadInputs(self._memory, info.vocab_size, noise_slots(tiers))
        if provider in LIBRARIES:
            return TensorrtEngine.load(self.bundle, role, provider, self._memory, self._heads)
        table = plan_table(tiers) if role == "target" else DRAFT_TABLE
        return OrtEngine(
            self.bundle.path(info.resident_graph),
            info,
            provider=provider,
            memory=self._memory,
            threads=self.threads,
            table=table,
            heads=self._heads,
        )
