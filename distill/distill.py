"""A draft for a target from the target alone: it writes text, a small model learns its laws, and both are measured.

``OUT.work`` beside the draft keeps what can be gone on with: the target's engine, the text, the training.
"""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import count
from pathlib import Path

import torch

from outrider.distill.card import card
from outrider.distill.draft import write_draft
from outrider.distill.measure import measure_draft
from outrider.distill.options import DistillOptions
from outrider.distill.report import DistillReport
from outrider.distill.source import Source
from outrider.distill.starts import Starts
from outrider.distill.student import DraftPlan, new_student, new_trainer, plan_draft
from outrider.distill.table import write_next_tokens
from outrider.distill.text import WrittenText
from outrider.distill.train import Budget
from outrider.distill.writer import Writer, Written
from outrider.engines.bundle import NEXT_TOKENS
from outrider.engines.errors import OutriderError
from outrider.engines.ort import default_threads
from outrider.export.folder import check_out, check_room, claimed, describe
from outrider.runtime.bench import Prompt

# What is being done, and the share of the whole that is.
Progress = Callable[[str, float], None]

_COLLECTING, _TRAINING = 0.45, 0.45  # shares of the time; the rest is for exports and measuring
_MEASURED = 16  # prompts
_MEASURED_TOKENS = 64
_TOKEN_BYTES = 200  # of text with its laws
_PARAMETER_BYTES = 2  # of the target, in int8 and int4 for a while
_TRAINING_BYTES = 400 << 20
_DONE = "done"  # beside the text: the time for it is over
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
        OutriderError: ``out`` exists, a target that cannot be exported, not enough disk, work of another recipe.
    """
    work = out.with_name(f"{out.name}.work")
    source = Source(target, work / "target", options.max_length, threads or default_threads())
    plan = plan_draft(source, options.kind)  # what cannot be is said before the work of hours
    _make_work_folder(out, work, source.parameters, options, resume)
    with claimed(work), _deterministic_torch(options.seed):
        progress("exporting the target", 0.0)
        starts = Starts(source.codec, source.opening, prompts, options.max_length)
        torch.set_num_threads(1)  # beside an engine's threads PyTorch's would wait for a processor
        text, rate = _collect(source, work / "text", options, prompts, starts, progress)
        torch.set_num_threads(source.threads)
        parts: tuple[list[Written], list[Written]] = ([], [])
        for one in text.sequences(options.tokens):
            parts[starts.held_out(one.number)].append(one)
        draft = work / "draft"
        report = _train(plan, *parts, options, draft, rate, starts, progress)
    (draft / _CARD).write_text(card(target, options, report), encoding="utf-8")
    draft.rename(out)
    return report


def _train(
    plan: DraftPlan,
    training: list[Written],
    held_out: list[Written],
    options: DistillOptions,
    draft: Path,
    rate: float,
    starts: Starts,
    progress: Progress,
) -> DistillReport:
    """Train on the first part of the text, write the draft, measure it on what the second is about."""
    source = plan.source
    student = new_student(plan, training, options.seed, options.max_length)
    budget = Budget(options.steps, options.minutes * 60 * _TRAINING)
    opening, checkpoint = source.opening.before, draft.with_name("training.pt")
    trainer = new_trainer(student, opening, training, held_out, options, budget, checkpoint)
    trainer.train(
        lambda done, loss: progress(f"training: step {budget.step}, loss {loss:.3f}", _COLLECTING + _TRAINING * done)
    )
    progress("measuring", _COLLECTING + _TRAINING)
    agreement = trainer.agreement()
    shutil.rmtree(draft, ignore_errors=True)  # of an earlier run
    write_draft(draft, student.model, student.config, source.vocab)
    entries = write_next_tokens(draft / NEXT_TOKENS, training)
    asked = starts.held_out_prompts or _own_turns(source, held_out)
    few = asked[: max(4, int(_MEASURED * min(1.0, options.minutes / 30)))]
    longest = min(options.max_length + _MEASURED_TOKENS, source.spec.max_positions)
    measured = measure_draft(source.name, draft, few, _MEASURED_TOKENS, longest, source.threads)
    return DistillReport(
        tokens=sum(len(one.ids) for one in (*training, *held_out)),
        tokens_per_second=rate,
        chat=bool(source.opening.after),
        prompts_too_long=starts.too_long,
        steps=budget.step,
        seconds=budget.elapsed,
        parameters=student.parameters,
        coverage=student.coverage,
        agreement=agreement,
        table_entries=entries,
        measured=measured,
    )


def _make_work_folder(out: Path, work: Path, parameters: int, options: DistillOptions, resume: bool) -> None:
    """On a disk with enough room, or gone on with."""
    check_out(out)
    if work.exists() and not resume:
        raise OutriderError(f"{work} holds an earlier distillation; go on with --resume, or remove it")
    tokens = options.tokens or int(options.minutes * 60 * _COLLECTING * 1000)
    if not work.exists():
        check_room(work, tokens * _TOKEN_BYTES + parameters * _PARAMETER_BYTES + _TRAINING_BYTES)
        work.mkdir()


@contextmanager
def _deterministic_torch(seed: int) -> Iterator[None]:
    """PyTorch's settings are the whole process's, and another's after us."""
    threads, strict = torch.get_num_threads(), torch.are_deterministic_algorithms_enabled()
    torch.manual_seed(seed)
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(strict)
        torch.set_num_threads(threads)


def _collect(
    source: Source,
    folder: Path,
    options: DistillOptions,
    prompts: Sequence[Prompt],
    starts: Starts,
    progress: Progress,
) -> tuple[WrittenText, float]:
    """Text, and how many tokens a second were written, 0 where none had to be."""
    recipe = {
        "target": describe([source.checkpoint.path], None),
        "seed": options.seed,
        "--max-length": options.max_length,
        "file of prompts": hashlib.sha256("\0".join(prompt.text for prompt in prompts).encode()).hexdigest(),
    }
    text = WrittenText(folder, recipe)
    budget = options.minutes * 60 * _COLLECTING
    what = "writing" if source.opening.after else "writing plain text (there is no chat template)"

    def done() -> float:
        if options.tokens is not None:
            return text.tokens / options.tokens
        return 1.0 if (folder / _DONE).exists() else text.seconds / budget

    if done() >= 1:
        return text, 0.0
    before, begun = text.tokens, text.seconds
    writer = Writer(source.engine(), source.opening, starts, source.end_token_ids, options.max_length, options.seed)
    try:
        for one in writer.write(number for number in count() if number not in text.ended):
            text.add(one)
            rate, share = (text.tokens - before) / (text.seconds - begun), min(1.0, done())
            left = text.seconds * (1 - share) / max(share, 1e-9) / 60
            progress(f"{what}: {text.tokens:,} tokens, {rate:.0f} a second, {left:.0f} min left", _COLLECTING * share)
            if share >= 1:
                break
    finally:
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
