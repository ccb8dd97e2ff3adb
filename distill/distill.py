"""A draft for a target from the target alone: it writes text, a small model learns its laws, and both are measured.

``OUT.work`` beside the draft keeps what can be gone on with: the target's engine, the text, the training.
"""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Callable, Sequence
from itertools import count
from pathlib import Path

import torch

from outrider.distill.card import card
from outrider.distill.draft import write_draft
from outrider.distill.measure import measure_draft
from outrider.distill.options import DistillOptions
from outrider.distill.report import DistillReport
from outrider.distill.source import Source
from outrider.distill.starts import HELD_OUT, Starts
from outrider.distill.student import new_student, new_trainer
from outrider.distill.table import write_next_tokens
from outrider.distill.text import WrittenText
from outrider.distill.train import Budget
from outrider.distill.writer import Writer, Written
from outrider.engines.bundle import NEXT_TOKENS
from outrider.engines.errors import OutriderError
from outrider.engines.ort import default_threads
from outrider.runtime.bench import Prompt

# What is being done, and the share of the whole that is.
Progress = Callable[[str, float], None]

_COLLECTING, _TRAINING = 0.45, 0.45  # shares of the time; the rest is for exports and measuring
_MEASURED = 16  # prompts
_MEASURED_TOKENS = 64
_TOKEN_BYTES = 200  # of text with its laws
_TRAINING_BYTES = 400 << 20
_DONE = "done"  # beside the text: there is as much as was asked for
_CARD = "README.md"


def distill(
    target: str,
    out: Path,
    options: DistillOptions,
    prompts: Sequence[Prompt] = (),
    *,
    threads: int | None = None,
    resume: bool = False,
    progress: Progress = lambda stage, share: None,
) -> DistillReport:
    """Distill a draft of ``target`` (``open_checkpoint``) into the folder ``out``.

    Args:
        prompts: turns of users that the target answers beside those that it makes up; some are kept to measure on.
        resume: go on with what an interrupted run left in ``OUT.work``.

    Raises:
        OutriderError: ``out`` exists, a target that cannot be exported, not enough disk, text of another recipe.
    """
    work = _work_folder(out, options, resume)
    threads = threads or default_threads()
    torch.manual_seed(options.seed)
    torch.use_deterministic_algorithms(True)
    progress("exporting the target", 0.0)
    source = Source(target, work / "target", options.max_length, threads)
    starts = Starts(source.codec, source.opening, [prompt.text for prompt in prompts])
    torch.set_num_threads(1)  # beside an engine's threads PyTorch's would wait for a processor
    text, rate = _collect(source, work / "text", options, prompts, starts, progress)
    torch.set_num_threads(threads)
    parts: tuple[list[Written], list[Written]] = ([], [])
    for one in text:
        parts[starts.held_out(one.number)].append(one)
    training, held_out = parts
    student = new_student(source, training, options.kind, options.seed)
    budget = Budget(options.steps, options.minutes * 60 * _TRAINING)
    opening = source.opening.before
    trainer = new_trainer(student, opening, training, held_out, budget, options.seed, work / "training.pt")
    trainer.train(
        lambda done, loss: progress(f"training: step {budget.step}, loss {loss:.3f}", _COLLECTING + _TRAINING * done)
    )
    progress("measuring", _COLLECTING + _TRAINING)
    agreement = trainer.agreement()
    draft = work / "draft"
    for made in (draft, work / "pair"):  # of an earlier run
        shutil.rmtree(made, ignore_errors=True)
    write_draft(draft, student.model, student.config, source.vocab)
    entries = write_next_tokens(draft / NEXT_TOKENS, training)
    asked = list(prompts[::HELD_OUT]) or _own_turns(source, held_out)
    few = asked[: max(4, int(_MEASURED * min(1.0, options.minutes / 30)))]
    measured = measure_draft(target, draft, work / "pair", few, _MEASURED_TOKENS, threads)
    report = DistillReport(
        text.tokens, rate, budget.step, student.parameters, student.coverage, agreement, entries, measured
    )
    (draft / _CARD).write_text(card(target, options, report), encoding="utf-8")
    draft.rename(out)
    return report


def _work_folder(out: Path, options: DistillOptions, resume: bool) -> Path:
    """Made or gone on with, on a disk with enough room."""
    work = out.with_name(f"{out.name}.work")
    if out.exists():
        raise OutriderError(f"{out} exists; remove it or choose another --out")
    if not out.absolute().parent.is_dir():
        raise OutriderError(f"there is no folder {out.parent}; create it or choose another --out")
    if work.exists() and not resume:
        raise OutriderError(f"{work} holds an earlier distillation; go on with --resume, or remove it")
    tokens = options.tokens or int(options.minutes * 60 * _COLLECTING * 1000)
    need, free = tokens * _TOKEN_BYTES + _TRAINING_BYTES, shutil.disk_usage(out.absolute().parent).free
    if need > free and not work.exists():
        raise OutriderError(
            f"{work} needs about {need / 1e9:.1f} GB, and its disk has {free / 1e9:.1f} GB free; free some or choose "
            "another --out"
        )
    work.mkdir(exist_ok=True)
    return work


def _collect(
    source: Source,
    folder: Path,
    options: DistillOptions,
    prompts: Sequence[Prompt],
    starts: Starts,
    progress: Progress,
) -> tuple[WrittenText, float]:
    """Text, and how many tokens a second were written, 0 where none had to be."""
    manifest = source.bundle.manifest
    recipe = {
        "target": source.bundle.files[manifest.target.weights]["sha256"],
        "seed": options.seed,
        "max_length": options.max_length,
        "prompts": hashlib.sha256("\0".join(prompt.text for prompt in prompts).encode()).hexdigest(),
    }
    text = WrittenText(folder, recipe)
    before, begun = text.tokens, text.seconds
    if (folder / _DONE).exists() and text.tokens >= (options.tokens or 0):
        return text, 0.0
    budget = options.minutes * 60 * _COLLECTING
    writer = Writer(source.engine(), source.opening, starts, source.end_token_ids, options.max_length, options.seed)
    for one in writer.write(number for number in count() if number not in text.numbers):
        text.add(one)
        rate = (text.tokens - before) / (text.seconds - begun)
        done = text.tokens / options.tokens if options.tokens else text.seconds / budget
        left = text.seconds * (1 - done) / done / 60
        progress(
            f"writing: {text.tokens:,} tokens, {rate:.0f} a second, {left:.0f} min left", _COLLECTING * min(1, done)
        )
        if done >= 1:
            break
    text.flush()
    (folder / _DONE).touch()
    return text, (text.tokens - before) / (text.seconds - begun)


def _own_turns(source: Source, held_out: Sequence[Written]) -> list[Prompt]:
    """What the target asked itself; beginnings of texts without a chat template."""
    after, turns = len(source.opening.after), []
    for one in held_out:
        ids = one.ids[: one.answer - after] if after else one.ids[:8]
        turn = source.codec.decode(ids.tolist()).strip()
        if turn:
            turns.append(Prompt(str(one.number), "self-written", turn))
    return turns
