"""Pairs for ``gpu_check.py``: random models of any Llama shape, written as bundles and opened on any provider."""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import numpy as np
from make_checkpoint import llama_config
from numpy.typing import NDArray
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from outrider.engines.bundle import (
    TOKENIZER,
    Bundle,
    Manifest,
    ModelInfo,
    write_manifest,
)
from outrider.engines.cuda import CudaDriver
from outrider.engines.engine import DRAFT_TABLE, PREFILL_CHUNK, Engine, HeadInputs, noise_slots, plan_table
from outrider.engines.errors import OutriderError
from outrider.engines.memory import HostMemory
from outrider.engines.open import Opener
from outrider.engines.ort import OrtEngine, check_available
from outrider.engines.tensorrt import LIBRARIES, BuildOptions, build_engine
from outrider.engines.tensorrt.library import load_library
from outrider.export.architectures import decoder_spec, llama
from outrider.export.checkpoint import Checkpoint, TokenizerFiles, open_checkpoint
from outrider.export.folder import new_bundle
from outrider.export.model import ModelExport
from outrider.export.spec import DecoderSpec

TIERS = (2, 4, 8)
_SLAB = 12_000_017  # elements; export asks for at most 8 Mi at a time
_END = "<|end|>"


class SkippedError(Exception):
    """A part that cannot run on this machine, and why."""


class FaultError(Exception):
    """A check that ran and found something wrong. ``figures`` are what it measured."""

    def __init__(self, message: str, figures: dict[str, Any]) -> None:
        super().__init__(message)
        self.figures = figures


def verdict(error: Exception) -> dict[str, Any]:
    """What to report of a part, or of a check in it, that did not end well."""
    if isinstance(error, SkippedError):
        return {"status": "skipped", "reason": str(error)}
    text = str(error).strip().partition("\n")[0]
    if isinstance(error, FaultError):
        return {"status": "failed", "reason": text, **error.figures}
    return {
        "status": "failed",
        "reason": text if isinstance(error, OutriderError) else f"{type(error).__name__}: {text}",
    }


@dataclass(frozen=True)
class Model:
    """``spec`` may have fewer layers than the checkpoint: its first ones."""

    spec: DecoderSpec
    checkpoint: Checkpoint


class RandomCheckpoint:
    """Random weights of a shape, cut from one slab: nothing is drawn or rounded again, however large the model.

    Args:
        blend: the share of other noise that is added, so that two models of one shape agree often, not always.
    """

    path = Path("random")

    def __init__(self, config: dict[str, Any], slab: NDArray[np.float32], blend: float = 0.0) -> None:
        self.config = config
        self._shapes = dict(llama.decoder_spec(config).expected_shapes())
        self._slab = slab
        self._scaled: dict[int, NDArray[np.float16]] = {}
        self._blend = blend

    def shape(self, name: str) -> tuple[int, ...] | None:
        return self._shapes.get(name)

    def unread(self, names: set[str]) -> list[str]:
        return sorted(self._shapes.keys() - names)

    def quantized(self, name: str) -> None:
        return None

    def read(self, name: str, start: int, stop: int) -> NDArray[Any]:
        """float16, which a float16 graph takes without a copy. Other bounds give other weights."""
        rest = self._shapes[name][1:]
        size = (stop - start) * int(np.prod(rest, dtype=np.int64))
        if not rest:
            return 1 + 0.1 * self._cut(self._slab, name, size)
        width = rest[0]
        if width not in self._scaled:
            self._scaled[width] = (self._slab * width**-0.5).astype(np.float16)
        values = self._cut(self._scaled[width], f"{name}:{start}", size)
        if self._blend:
            values = values + np.float16(self._blend) * self._cut(self._scaled[width], f"other {name}:{start}", size)
        return values.reshape(stop - start, *rest)

    def tokenizer(self) -> TokenizerFiles:
        return byte_tokenizer()

    @staticmethod
    def _cut(slab: NDArray[Any], name: str, size: int) -> NDArray[Any]:
        offset = zlib.crc32(name.encode()) % (len(slab) - size)
        return slab[offset : offset + size]


def random_pair(shapes: Mapping[str, Mapping[str, Any]], draft_blend: float = 0.0) -> dict[str, Model]:
    """Random models by role; see ``llama_config`` for the names of a shape."""
    slab = np.random.default_rng(0).standard_normal(_SLAB, np.float32)
    found = {}
    for role, shape in shapes.items():
        config = llama_config(**{"tie_word_embeddings": False, **shape})
        checkpoint = RandomCheckpoint(config, slab, draft_blend if role == "draft" else 0.0)
        found[role] = Model(decoder_spec(checkpoint), checkpoint)
    return found


def checkpoint_pair(source: str) -> dict[str, Model]:
    """A checkpoint, and its own first layers as the draft."""
    checkpoint = open_checkpoint(source)
    tokens = Tokenizer.from_str(checkpoint.tokenizer().json).get_vocab_size()
    spec = replace(decoder_spec(checkpoint), vocab_size=tokens)
    draft = replace(spec, num_layers=max(1, spec.num_layers * 2 // 3))
    return {"target": Model(spec, checkpoint), "draft": Model(draft, checkpoint)}


def byte_tokenizer() -> TokenizerFiles:
    """A token a byte; id 0 ends. Ids behind them have no text."""
    tokenizer = Tokenizer(models.BPE({char: 1 + index for index, char in enumerate(_bytes())} | {_END: 0}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([_END])
    return TokenizerFiles(tokenizer.to_str(), None, {"eos_token": _END}, (0,))


def _bytes() -> list[str]:
    return sorted(pre_tokenizers.ByteLevel.alphabet())


def write_pair(out: Path, pair: Mapping[str, Model], lowering: str, precision: str, max_length: int) -> Bundle:
    """A bundle of the pair, unchecked: no reference of an 8B model fits into a check of minutes."""
    with new_bundle(out) as work:
        infos = {role: _write_model(work, role, model, lowering, precision, max_length) for role, model in pair.items()}
        files = pair["target"].checkpoint.tokenizer()
        (work / TOKENIZER).write_text(files.json, encoding="utf-8")
        manifest = Manifest(
            producer=f"outrider {_version()}",
            tiers=TIERS,
            max_length=max_length,
            eos_token_ids=files.eos_token_ids,
            special_tokens=files.special_tokens,
            target=infos["target"],
            draft=infos["draft"],
        )
        write_manifest(work, manifest)
    return Bundle(out)


def _write_model(work: Path, role: str, model: Model, lowering: str, precision: str, max_length: int) -> ModelInfo:
    how = (lowering, precision, precision, TIERS, max_length)
    job = ModelExport(f"{role}/model.onnx", model.spec, model.checkpoint, *how)
    return job.write(work, lambda part: None)


def format_of(provider: str) -> tuple[str, str]:
    """Lowering and precision that a provider is checked with."""
    if provider == "cpu":
        return "fused", "fp32"
    return ("fused" if provider == "cuda" else "standard"), "fp16"


def require(provider: str) -> None:
    """Raises SkippedError where the provider is not installed, or there is no GPU for it."""
    if provider == "cpu":
        return
    package = provider if provider in LIBRARIES else "onnxruntime-gpu"
    try:
        if provider in LIBRARIES:
            load_library(provider)
        else:
            check_available(provider)
    except OutriderError as error:
        raise SkippedError(f"{package} absent: {error}") from None
    try:
        CudaDriver()
    except OutriderError as error:
        raise SkippedError(f"no driver: {error}") from None


def build_engines(bundle: Bundle, provider: str) -> float:
    """Build what the provider needs built ahead; the seconds it took.

    Raises:
        SkippedError: the library does not know this GPU.
    """
    if provider not in LIBRARIES:
        return 0.0
    options = BuildOptions(provider, CudaDriver().arch, (0, *bundle.manifest.tiers))
    try:
        return sum(build_engine(bundle, role, options)[0].build_seconds for role in ("target", "draft"))
    except OutriderError as error:
        if "no architecture" in str(error):
            raise SkippedError(f"architecture unknown to the library: {error}") from None
        raise


def open_pair(bundle: Bundle, provider: str, threads: int | None = None) -> tuple[Engine, Engine]:
    """Target and draft in one memory with the same heads."""
    if provider != "cpu":
        opener = Opener(bundle, threads)
        return opener.open("target", provider), opener.open("draft", provider)
    memory = HostMemory()
    heads = HeadInputs(memory, bundle.manifest.target.vocab_size, noise_slots(bundle.manifest.tiers))
    target, draft = (
        OrtEngine(bundle.path(info.resident_graph), info, memory=memory, threads=threads, heads=heads)
        for info in bundle.manifest.models.values()
    )
    return target, draft


def shapes_of(role: str) -> tuple[tuple[int, int], ...]:
    """The (rows, logit rows) of a role that the loop runs, prefill chunks aside."""
    table = plan_table(TIERS) if role == "target" else DRAFT_TABLE
    return tuple((shape.rows, shape.logit_rows) for shape in table if shape.rows < PREFILL_CHUNK)


def _version() -> str:
    try:
        return version("outrider")
    except PackageNotFoundError:  # run from the source tree
        return "source"
