#!/usr/bin/env python3
"""Drafts trained by several losses on one text, from one seed and in one order, and what of each stands.

    scripts/compare_losses.py TARGET WORK [--prompts FILE] [--steps 300]

WORK is what a distillation of TARGET left beside its draft (``OUT.work``), PROMPTS the file that it was given. For each
loss: greedy agreement and overlap with the target on the held-out text, and the mean acceptance length of the real loop
on every third prompt of ``scripts/prompts.jsonl``, greedy.
"""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

import click
import torch

from outrider.distill.draft import write_draft
from outrider.distill.measure import measure_draft
from outrider.distill.options import DistillOptions
from outrider.distill.source import Source
from outrider.distill.starts import Starts
from outrider.distill.student import new_student, new_trainer, plan_draft
from outrider.distill.text import WrittenText
from outrider.distill.train import Budget, Loss, cross_entropy, distillation_loss, total_variation
from outrider.engines.ort import default_threads
from outrider.runtime.bench import read_prompts

PROMPTS = Path(__file__).with_name("prompts.jsonl")
_TOKENS = 64  # of an answer
_SHOWN_K = (1, 4)
LOSSES: dict[str, Loss] = {
    "cross entropy": cross_entropy,
    "total variation": total_variation,
    "their sum": distillation_loss,
    "TV four times": lambda logits, batch: cross_entropy(logits, batch) + 4 * total_variation(logits, batch),
}


@click.command()
@click.argument("target")
@click.argument("work", type=click.Path(path_type=Path, exists=True))
@click.option("--prompts", type=click.Path(path_type=Path, exists=True), help="Of the distillation.")
@click.option("--steps", type=click.IntRange(min=1), default=300, show_default=True)
@click.option("--seed", type=int, default=0, show_default=True)
def main(target: str, work: Path, prompts: Path | None, steps: int, seed: int) -> None:
    options = DistillOptions(steps=steps, seed=seed)
    threads = default_threads()
    torch.set_num_threads(threads)
    source = Source(target, work / "target", options.max_length, threads)
    plan = plan_draft(source, options.kind)
    starts = Starts(source.codec, source.opening, read_prompts(prompts) if prompts else [], options.max_length)
    training, held_out = [], []
    for one in WrittenText(work / "text", {}).sequences():  # whatever recipe it is of
        (held_out if starts.held_out(one.number) else training).append(one)
    click.echo(f"{sum(len(one.ids) for one in training):,} tokens of text, {steps} steps")
    click.echo(f"{'loss':16s} {'agreement':>9s} {'overlap':>8s}" + "".join(f"{f'K={k}':>7s}" for k in _SHOWN_K))
    folder = Path(tempfile.mkdtemp())
    try:
        for number, (name, loss) in enumerate(LOSSES.items()):
            torch.manual_seed(seed)
            student = new_student(plan, training, seed, options.max_length)
            checkpoint, draft = folder / f"{number}.pt", folder / str(number)
            budget = Budget(steps, None)
            opening = source.opening.before
            trainer = new_trainer(student, opening, training, held_out, options, budget, checkpoint, loss)
            trainer.train()
            found = trainer.agreement()
            write_draft(draft, student.model, student.config, source.vocab)
            measured = measure_draft(target, draft, read_prompts(PROMPTS)[::3], _TOKENS, 1024, threads)
            lengths = {row.k: row.mean_acceptance_length for row in measured.by_k}
            columns = "".join(f"{lengths[k]:7.2f}" for k in _SHOWN_K)
            click.echo(f"{name:16s} {found.greedy:9.3f} {found.overlap:8.3f}{columns}")
    finally:
        shutil.rmtree(folder)


if __name__ == "__main__":
    main()
