"""Two checkpoints in, one checked bundle out."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from importlib.metadata import version
from pathlib import Path

from tokenizers import Tokenizer

from outrider.engines.bundle import CHAT_TEMPLATE, CUT_GRAPH, NEXT_TOKENS, TOKENIZER, Manifest, write_manifest
from outrider.engines.engine import PREFILL_CHUNK
from outrider.engines.errors import OutriderError
from outrider.engines.next_tokens import NextTokens
from outrider.export.architectures import decoder_spec
from outrider.export.attention import LOWERINGS
from outrider.export.check import check_text
from outrider.export.checkpoint import Checkpoint, TokenizerFiles, open_checkpoint
from outrider.export.folder import check_out, check_room, describe, new_bundle
from outrider.export.layers import PREFIX, parse_layers
from outrider.export.model import ModelExport
from outrider.export.optimum import (
    TracedDecoder,
    TracedExport,
    check_traced_options,
    traced_decoder,
    traced_lowering,
    traces_beside,
)
from outrider.export.pair import check_pair, vocabulary
from outrider.export.precision import PRECISIONS, check_patterns
from outrider.export.shared_embedding import SHARED, SharedEmbedding
from outrider.export.spec import DecoderSpec

Progress = Callable[[str, int, int], None]


@dataclass(frozen=True)
class ExportOptions:
    """``tiers`` are the values of K, ``max_length`` the longest sequence (prompt and output, in tokens).

    The ``lowering`` is by default ``fused``. A draft that runs on another device may need another precision and
    lowering; by default they are the target's.
    ``head_precision`` is that of embedding and head, by default the same; ``tensor_precision`` those of some of the
    target's other matrices, by pattern (``precision.tensor_precisions``). ``translate_draft`` allows a draft with
    another tokenizer. ``via`` is ``optimum`` for models that Optimum traces (``export/optimum``), which settles the
    lowering.
    """

    precision: str = "int4"
    lowering: str | None = None
    tiers: tuple[int, ...] = (2, 4, 8)
    max_length: int = 2048
    draft_precision: str | None = None
    draft_lowering: str | None = None
    head_precision: str | None = None
    tensor_precision: dict[str, str] = field(default_factory=dict)
    translate_draft: bool = False
    via: str | None = None

    def __post_init__(self) -> None:
        apart = self.tensor_precision.values()
        for precision in (self.precision, self.draft_precision, self.head_precision, *apart):
            if precision is None:
                continue
            if precision not in PRECISIONS:
                raise OutriderError(f"unknown precision {precision!r}; choose one of {', '.join(PRECISIONS)}")
        for lowering in (self.lowering, self.draft_lowering):
            if lowering is not None and lowering not in LOWERINGS:
                raise OutriderError(f"unknown lowering {lowering!r}; choose one of {', '.join(LOWERINGS)}")
        if self.via is not None:
            others = {
                "--head-precision": self.head_precision,
                "--tensor-precision": self.tensor_precision,
                "--lowering": self.lowering,
                "--draft-lowering": self.draft_lowering,
            }
            check_traced_options(self.via, (self.precision, self.draft_precision), others)
        if not self.tiers or min(self.tiers) < 1 or list(self.tiers) != sorted(set(self.tiers)):
            raise OutriderError(f"tiers {list(self.tiers)} must be rising whole numbers from 1 up, as in --k 2,4,8")
        if max(self.tiers) >= PREFILL_CHUNK:
            raise OutriderError(f"K = {max(self.tiers)} is too large; a pass has at most {PREFILL_CHUNK} rows")
        if self.max_length < 2:
            raise OutriderError(f"--max-length {self.max_length} leaves no room for a prompt and a token")

    def of(self, role: str) -> ExportOptions:
        """With the precision and lowering of one of the models, which has one then."""
        if self.via is not None:
            precision = self.precision if role == "target" else self.draft_precision or self.precision
            return replace(self, precision=precision, lowering=traced_lowering(precision), via=None)  # settled by it
        target = replace(self, lowering=self.lowering or "fused")
        if role == "target":
            return target
        precision, lowering = self.draft_precision or target.precision, self.draft_lowering or target.lowering
        # A draft of another kind is all of that kind.
        same = (precision, lowering) == (target.precision, target.lowering)
        head = self.head_precision if same else None
        return replace(self, precision=precision, lowering=lowering, head_precision=head, tensor_precision={})


def export_bundle(
    target: str,
    draft: str | None,
    out: str | Path,
    options: ExportOptions,
    *,
    threads: int | None = None,
    resume: bool = False,
    progress: Progress = lambda stage, done, total: None,
) -> Manifest:
    """Export a target and its draft and check what was written.

    Args:
        draft: a checkpoint, ``layers:0-3,26-29`` for some of the target's layers, or None for model-free drafting.
        resume: go on where an interrupted export of the same with the same options stopped.
        progress: called with a stage ("target: layer 3"), and how many of how many stages are done.

    Raises:
        OutriderError: see the modules that read, pair, write and check; nothing is left behind but what ``resume``
            goes on with, after an error of the system.
    """
    out = check_out(out)
    with nullcontext() if options.via is None else traces_beside(out) as traces:
        return _export(target, draft, out, options, traces, threads, resume, progress)


def _export(
    target: str,
    draft: str | None,
    out: Path,
    options: ExportOptions,
    traces: Path | None,
    threads: int | None,
    resume: bool,
    progress: Progress,
) -> Manifest:
    try:
        jobs, tokenizers = _plan(target, draft, options, traces)
        order = describe([job.checkpoint.path for job in jobs.values()], (draft, options))
    except OSError as error:
        raise OutriderError(f"cannot read {error.filename or target}: {error.strerror or error}") from error
    check_room(out, sum(job.planned_bytes() for job in jobs.values() if job.whole is None))
    with new_bundle(out, order, resume=resume) as work:
        steps = _Steps(progress, sum(job.steps for job in jobs.values()))
        texts = {file: _whole_tokenizer(files).encode(check_text()) for file, files in tokenizers.items()}
        models = {}
        for role, job in jobs.items():
            step = partial(steps.step, role)
            ids = texts[job.tokenizer].ids
            models[role] = job.check(work, job.write(work, step), ids, threads, step)
        for file, files in tokenizers.items():
            _write_tokenizer(work / file, files)
        if table := _next_tokens(jobs):
            shutil.copyfile(table, work / NEXT_TOKENS)
        tokenizer = tokenizers[TOKENIZER]
        if tokenizer.chat_template:
            (work / CHAT_TEMPLATE).write_text(tokenizer.chat_template, encoding="utf-8")
        manifest = Manifest(
            producer=f"outrider {version('outrider')}" + (f" via {options.via}" if options.via else ""),
            tiers=options.tiers,
            max_length=options.max_length,
            eos_token_ids=tokenizer.eos_token_ids,
            special_tokens=tokenizer.special_tokens,
            target=models["target"],
            draft=models.get("draft"),
        )
        write_manifest(work, manifest)
    return manifest


def _plan(
    target: str, draft: str | None, options: ExportOptions, traces: Path | None = None
) -> tuple[dict[str, ModelExport], dict[str, TokenizerFiles]]:
    """The models to write, by role, and their tokenizers, by the file to write: one for both, or one for each.

    Args:
        traces: the folder for graphs that Optimum traces, None where it traces none.
    """
    cut = draft is not None and draft.startswith(PREFIX)
    if cut and options.via is not None:
        raise OutriderError(f"--draft {draft} does not go with --via optimum, whose graphs are not cut by layers")
    _check_unused(draft, cut, options)
    sources = {"target": target} | ({} if draft is None or cut else {"draft": draft})
    checkpoints = {role: open_checkpoint(source) for role, source in sources.items()}
    specs: dict[str, DecoderSpec | TracedDecoder] = {}
    for role, checkpoint in checkpoints.items():
        if checkpoint.config.get(SHARED) and (role == "target" or traces is not None):
            raise OutriderError(
                f"{checkpoint.path} has no embedding of its own: it is a draft, for --draft beside its target, "
                "without --via"
            )
    for role, checkpoint in checkpoints.items() if traces is None else ():
        if role == "draft" and checkpoint.config.get(SHARED):
            target_spec = specs["target"]
            assert isinstance(target_spec, DecoderSpec)
            checkpoint = checkpoints[role] = SharedEmbedding(checkpoint, checkpoints["target"], target_spec.embedding)
        specs[role] = decoder_spec(checkpoint).for_length(options.max_length)
    tokenizers = {role: checkpoint.tokenizer() for role, checkpoint in checkpoints.items()}
    vocabularies = {role: vocabulary(files, sources[role]) for role, files in tokenizers.items()}
    files = dict.fromkeys(sources, TOKENIZER)
    if "draft" in sources:
        if options.translate_draft and vocabularies["draft"] != vocabularies["target"]:
            files["draft"] = f"draft/{TOKENIZER}"
        else:
            check_pair(vocabularies["target"], vocabularies["draft"])
    if traces is not None:  # the work of minutes, so all else is seen to first
        specs = {role: traced_decoder(checkpoint, traces / role) for role, checkpoint in checkpoints.items()}
    jobs = {}
    for role, spec in specs.items():
        spec = _cut(spec, vocabularies[role], sources[role])
        jobs[role] = replace(_model_export(role, spec, checkpoints[role], options.of(role)), tokenizer=files[role])
    if draft is not None and cut:
        whole = jobs["target"]
        part = whole.spec.of_layers(parse_layers(draft, whole.spec.num_layers))
        jobs["draft"] = replace(whole, graph=CUT_GRAPH, spec=part, whole=whole.graph)
    if table := _next_tokens(jobs):
        NextTokens.load(table, jobs["target"].spec.vocab_size)
    return jobs, {files[role]: tokenizers[role] for role in reversed(sources)}  # the target's where they share one


def _next_tokens(jobs: dict[str, ModelExport]) -> Path | None:
    """The table of the draft's folder, whose tokens are the target's."""
    draft = jobs.get("draft")
    table = None if draft is None or draft.tokenizer != TOKENIZER else draft.checkpoint.path / NEXT_TOKENS
    return table if table is not None and table.is_file() else None


def _check_unused(draft: str | None, cut: bool, options: ExportOptions) -> None:
    """Raises OutriderError for options of a draft model where there is none of its own."""
    given = {
        "--draft-precision": options.draft_precision,
        "--draft-lowering": options.draft_lowering,
        "--translate-draft": options.translate_draft,
    }
    unused = " and ".join(option for option, value in given.items() if value)
    if unused and draft is None:
        raise OutriderError(f"--draft none is no model that takes {unused}; leave that out")
    if unused and cut:
        raise OutriderError(f"--draft {draft} has the target's weights and tokenizer; leave {unused} out")


def _model_export(
    role: str, spec: DecoderSpec | TracedDecoder, checkpoint: Checkpoint, options: ExportOptions
) -> ModelExport:
    if role == "target" and options.max_length > spec.max_positions:
        raise OutriderError(
            f"{checkpoint.path} has {spec.max_positions} positions; --max-length {options.max_length} is more"
        )
    assert options.lowering is not None, "see ExportOptions.of"
    kind: Callable[..., ModelExport] = TracedExport
    if not isinstance(spec, TracedDecoder):
        kind = ModelExport
        check_patterns(spec, options.tensor_precision, checkpoint.path)
    return kind(
        graph=f"{role}/model.onnx",
        spec=spec,
        checkpoint=checkpoint,
        lowering=options.lowering,
        precision=options.precision,
        head_precision=options.head_precision or options.precision,
        tensor_precision=options.tensor_precision,
        tiers=options.tiers,
        # A draft of fewer positions serves as far as it reaches; behind that, decoding goes on plain.
        max_length=min(options.max_length, spec.max_positions),
    )


@dataclass
class _Steps:
    progress: Progress
    total: int
    done: int = 0

    def step(self, role: str, stage: str) -> None:
        self.done += 1
        self.progress(f"{role}: {stage}", self.done, self.total)


def _cut(spec: DecoderSpec | TracedDecoder, vocab: dict[str, int], source: str) -> DecoderSpec | TracedDecoder:
    """Without the rows that pad the embedding behind the last token: no id outside the tokenizer is ever proposed."""
    needed = max(vocab.values()) + 1
    if spec.vocab_size < needed:
        raise OutriderError(f"{source}: its embedding has {spec.vocab_size} rows, its tokenizer {needed} ids")
    if isinstance(spec, DecoderSpec) and spec.draft_vocab is not None and spec.draft_vocab[-1] >= needed:
        raise OutriderError(f"{source}: d2t names token {spec.draft_vocab[-1]}, and the tokenizer has {needed} ids")
    return replace(spec, vocab_size=needed)


def _write_tokenizer(path: Path, files: TokenizerFiles) -> None:
    _whole_tokenizer(files).save(str(path))


def _whole_tokenizer(files: TokenizerFiles) -> Tokenizer:
    """Without saved settings of somebody's training run: they would cut or pad texts without a word."""
    tokenizer = Tokenizer.from_str(files.json)
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer
