"""Two checkpoints in, one checked bundle out."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from importlib.metadata import version
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer

from outrider.engines.bundle import (
    CHAT_TEMPLATE,
    RESIDENT,
    TOKENIZER,
    WEIGHTS,
    Manifest,
    ModelInfo,
    new_bundle,
    write_manifest,
)
from outrider.engines.engine import PREFILL_CHUNK, noise_slots
from outrider.engines.errors import OutriderError
from outrider.engines.ort import OrtEngine
from outrider.engines.probe import probe_rows
from outrider.export.architectures import decoder_spec
from outrider.export.attention import LOWERINGS
from outrider.export.check import check_engine
from outrider.export.checkpoint import Checkpoint, TokenizerFiles, open_checkpoint
from outrider.export.decoder import build_decoder
from outrider.export.graph import save_model
from outrider.export.heads import with_heads
from outrider.export.pair import check_pair, vocabulary
from outrider.export.precision import PRECISIONS, float_type
from outrider.export.reference import reference_logits
from outrider.export.spec import DecoderSpec
from outrider.export.stored import as_stored
from outrider.export.widen import widened_engine

_CHECK_TEXT = "The quick brown fox jumps over the lazy dog. In 1969, two people walked on the Moon for the first time."
_CHECK_TOKENS = 32

Progress = Callable[[str, int, int], None]


@dataclass(frozen=True)
class ExportOptions:
    """``tiers`` are the values of K, ``max_length`` the longest sequence (prompt and output, in tokens).

    A draft that runs on another device may need another precision and lowering; by default they are the target's.
    ``head_precision`` is that of embedding and head, by default the same.
    """

    precision: str = "int4"
    lowering: str = "fused"
    tiers: tuple[int, ...] = (2, 4, 8)
    max_length: int = 2048
    draft_precision: str | None = None
    draft_lowering: str | None = None
    head_precision: str | None = None

    def __post_init__(self) -> None:
        for precision in (self.precision, self.draft_precision, self.head_precision):
            if precision is None:
                continue
            if precision not in PRECISIONS:
                raise OutriderError(f"unknown precision {precision!r}; choose one of {', '.join(PRECISIONS)}")
        for lowering in (self.lowering, self.draft_lowering or self.lowering):
            if lowering not in LOWERINGS:
                raise OutriderError(f"unknown lowering {lowering!r}; choose one of {', '.join(LOWERINGS)}")
        if not self.tiers or min(self.tiers) < 1 or list(self.tiers) != sorted(set(self.tiers)):
            raise OutriderError(f"tiers {list(self.tiers)} must be rising whole numbers from 1 up, as in --k 2,4,8")
        if max(self.tiers) >= PREFILL_CHUNK:
            raise OutriderError(f"K = {max(self.tiers)} is too large; a pass has at most {PREFILL_CHUNK} rows")
        if self.max_length < 2:
            raise OutriderError(f"--max-length {self.max_length} leaves no room for a prompt and a token")

    def of(self, role: str) -> ExportOptions:
        """With the precision and lowering of one of the models."""
        if role == "target":
            return self
        precision, lowering = self.draft_precision or self.precision, self.draft_lowering or self.lowering
        # A draft of another kind is all of that kind.
        same = (precision, lowering) == (self.precision, self.lowering)
        return replace(
            self, precision=precision, lowering=lowering, head_precision=self.head_precision if same else None
        )


def export_bundle(
    target: str,
    draft: str | None,
    out: str | Path,
    options: ExportOptions,
    *,
    threads: int | None = None,
    progress: Progress = lambda stage, done, total: None,
) -> Manifest:
    """Export a target and its draft (None for model-free drafting) and check what was written.

    Args:
        progress: called with a stage ("target: layer 3"), and how many of how many stages are done.

    Raises:
        OutriderError: see the modules that read, pair, write and check; nothing is left behind.
    """
    with new_bundle(out) as work:
        sources = {"target": target} | ({} if draft is None else {"draft": draft})
        checkpoints = {role: open_checkpoint(source) for role, source in sources.items()}
        specs = {role: decoder_spec(checkpoint) for role, checkpoint in checkpoints.items()}
        tokenizers = {role: checkpoint.tokenizer() for role, checkpoint in checkpoints.items()}
        vocabularies = {role: vocabulary(files, sources[role]) for role, files in tokenizers.items()}
        if draft is not None:
            check_pair(vocabularies["target"], vocabularies["draft"])
        specs = {role: _cut(spec, vocabularies["target"], sources[role]) for role, spec in specs.items()}
        steps = _Steps(progress, sum(spec.num_layers + 4 for spec in specs.values()))
        models = {}
        for role, spec in specs.items():
            job = _ModelJob(role, spec, checkpoints[role], options.of(role), threads, steps)
            models[role] = job.run(work, tokenizers["target"])
        _write_tokenizer(work, tokenizers["target"])
        manifest = Manifest(
            producer=f"outrider {version('outrider')}",
            tiers=options.tiers,
            max_length=options.max_length,
            eos_token_ids=tokenizers["target"].eos_token_ids,
            special_tokens=tokenizers["target"].special_tokens,
            target=models["target"],
            draft=models.get("draft"),
        )
        write_manifest(work, manifest)
    return manifest


@dataclass
class _Steps:
    progress: Progress
    total: int
    done: int = 0

    def step(self, stage: str) -> None:
        self.done += 1
        self.progress(stage, self.done, self.total)


@dataclass(frozen=True)
class _ModelJob:
    role: str
    spec: DecoderSpec
    checkpoint: Checkpoint
    options: ExportOptions
    threads: int | None
    steps: _Steps

    def run(self, work: Path, tokenizer: TokenizerFiles) -> ModelInfo:
        info = self._write(work)
        ids = Tokenizer.from_str(tokenizer.json).encode(_CHECK_TEXT).ids[:_CHECK_TOKENS]
        # Before the engine is loaded, so that only one of the two needs memory.
        expected = stored = reference_logits(self.spec, self.checkpoint, np.array(ids))
        spec, rounded = as_stored(self.spec, self.checkpoint, info.lowering, info.precision, info.head_precision)
        if rounded is not self.checkpoint:
            stored = reference_logits(spec, rounded, np.array(ids))
        runs_here = info.cache_dtype != "bfloat16"
        open_engine = OrtEngine if runs_here else widened_engine
        engine = open_engine(work / info.graph, info, threads=self.threads)
        check = check_engine(engine, ids, expected, stored, self.options.precision, self.checkpoint.path)
        self.steps.step(f"{self.role}: compared with the checkpoint")
        if not runs_here:
            self.steps.step(f"{self.role}: no row probe")
            return replace(info, check=check, exactness="unprobed")
        probe = probe_rows(engine, self.options.tiers)
        self.steps.step(f"{self.role}: row probe")
        return replace(info, check=check, exactness=probe.exactness, min_rows=probe.min_rows, device=engine.device)

    def _write(self, work: Path) -> ModelInfo:
        options, spec = self.options, self.spec
        if self.role == "target" and options.max_length > spec.max_positions:
            raise OutriderError(
                f"{self.checkpoint.path} has {spec.max_positions} positions; --max-length {options.max_length} is more"
            )
        # A draft of fewer positions serves as far as it reaches; behind that, decoding goes on plain.
        capacity = cache_capacity(min(options.max_length, spec.max_positions))
        (work / self.role).mkdir()
        with (work / self.role / WEIGHTS).open("wb") as weights:
            model = build_decoder(
                spec,
                self.checkpoint,
                weights,
                lowering=options.lowering,
                precision=options.precision,
                head_precision=options.head_precision,
                capacity=capacity,
                progress=lambda part: self.steps.step(f"{self.role}: {part}"),
            )
        save_model(model, work / self.role / "model.onnx")
        save_model(with_heads(model, noise_slots(options.tiers)), work / self.role / RESIDENT)
        return ModelInfo(
            graph=f"{self.role}/model.onnx",
            architecture=spec.architecture,
            lowering=options.lowering,
            precision=options.precision,
            head_precision=options.head_precision or options.precision,
            num_layers=spec.num_layers,
            num_kv_heads=spec.num_kv_heads,
            head_dim=spec.head_dim,
            vocab_size=spec.vocab_size,
            capacity=capacity,
            cache_dtype=float_type(options.lowering, options.precision),
            min_rows=1,
            exactness="tolerance",
            device="",
            check={},
        )


def cache_capacity(max_length: int) -> int:
    """Cache positions: the longest sequence, and room behind it for the padding of the widest pass."""
    return -(-(max_length + PREFILL_CHUNK) // 8) * 8


def _cut(spec: DecoderSpec, vocab: dict[str, int], source: str) -> DecoderSpec:
    """Without the rows that pad the embedding behind the last token: no id outside the tokenizer is ever proposed."""
    needed = max(vocab.values()) + 1
    if spec.vocab_size < needed:
        raise OutriderError(f"{source}: its embedding has {spec.vocab_size} rows, its tokenizer {needed} ids")
    return replace(spec, vocab_size=needed)


def _write_tokenizer(work: Path, files: TokenizerFiles) -> None:
    tokenizer = Tokenizer.from_str(files.json)
    # Saved settings of somebody's training run: they would cut or pad prompts without a word.
    tokenizer.no_truncation()
    tokenizer.no_padding()
    tokenizer.save(str(work / TOKENIZER))
    if files.chat_template:
        (work / CHAT_TEMPLATE).write_text(files.chat_template, encoding="utf-8")
