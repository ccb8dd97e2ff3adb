#!/usr/bin/env python3
"""Is speculative text plain text, bit for bit? Over prompts x drafters x K, on a real model.

    check_identity.py SOURCE --work FOLDER [--precision int4 --precision fp32] [--prompts 30] [--tokens 128]
                      [--temperature T]

SOURCE is a checkpoint. It is paired with itself (every draft must be accepted) and with its own first layers (few
are), and decoded with the n-gram drafter as well. Compared are the ids and the logits of every committed row.
Exits 1 at the first difference.
"""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import click
import numpy as np
from numpy.typing import NDArray

from outrider.runtime import Pipeline, SamplingOptions
from outrider.runtime.bench import Prompt, encode_prompt, read_prompts
from outrider.runtime.decode import decode
from outrider.runtime.sequence import CachedModel
from outrider.runtime.stats import DecodeStats

PROMPTS = Path(__file__).with_name("prompts.jsonl")
TIERS = (1, 2, 4, 8)
DRAFT_LAYERS = 10


class RecordingModel(CachedModel):
    """Keeps a digest of the logits row of each position; a rejected row is replaced by the one that stands."""

    def __init__(self, model: CachedModel) -> None:
        super().__init__(model.engine, model.min_rows)
        self.rows: dict[int, bytes] = {}

    def extend(self, tokens: Sequence[int], logit_rows: int) -> NDArray[np.float32]:
        logits = super().extend(tokens, logit_rows)
        for index, row in enumerate(logits):
            self.rows[self.length - len(logits) + index] = hashlib.blake2b(row.tobytes(), digest_size=16).digest()
        return logits


@dataclass
class Run:
    tokens: list[int]
    rows: dict[int, bytes]
    stats: DecodeStats = field(repr=False)


def run(pipeline: Pipeline, drafter: str, k: int, ids: list[int], options: SamplingOptions) -> Run:
    model = RecordingModel(pipeline.target)
    request = pipeline.new_request(ids, options)
    for _ in decode(model, pipeline.drafter(drafter), k, request):
        pass
    tokens = request.output.tokens
    committed = range(len(ids) - 1, len(ids) + len(tokens) - 1)
    return Run(tokens, {position: model.rows[position] for position in committed}, request.stats)


def compare(
    pipelines: dict[str, Pipeline], prompts: Sequence[Prompt], options: SamplingOptions, tiers: Sequence[int] = TIERS
) -> Iterator[tuple[str, int, DecodeStats]]:
    """Every arm against plain decoding; yields (arm, K, summed stats), raises SystemExit at a difference.

    Args:
        pipelines: ``self`` (draft = target) and ``layers`` (draft = the target's first layers), of the same target.
    """
    encoded = [encode_prompt(pipelines["self"], prompt) for prompt in prompts]
    plain = [run(pipelines["self"], "none", 0, ids, options) for ids in encoded]
    arms = [("ngram", pipelines["self"], "ngram")]
    arms += [(f"draft = {name}", pipeline, "model") for name, pipeline in pipelines.items()]
    for name, pipeline, drafter in arms:
        for k in tiers:
            total = DecodeStats()
            for prompt, ids, expected in zip(prompts, encoded, plain, strict=True):
                found = run(pipeline, drafter, k, ids, options)
                if found.tokens != expected.tokens:
                    sys.exit(f"{prompt.id}, {name}, K={k}: ids differ: {found.tokens} instead of {expected.tokens}")
                if found.rows != expected.rows:
                    sys.exit(f"{prompt.id}, {name}, K={k}: logits of committed rows differ in their bits")
                total.add(found.stats)
            if name == "draft = self" and total.draft_acceptance_rate != 1.0:
                sys.exit(f"K={k}: a draft that is the target has acceptance {total.draft_acceptance_rate}, not 1")
            yield name, k, total


def export_pairs(source: str, work: Path, precision: str, tiers: tuple[int, ...] = TIERS) -> dict[str, Pipeline]:
    """The target paired with itself and with its first layers, exported once into ``work``."""
    from outrider.export import ExportOptions, export_bundle

    work.mkdir(parents=True, exist_ok=True)
    pipelines = {}
    for name, path in (("self", source), ("layers", f"layers:0-{DRAFT_LAYERS - 1}")):
        bundle = work / f"{name}-{precision}"
        if not bundle.exists():
            export_bundle(source, path, bundle, ExportOptions(precision=precision, tiers=tiers), threads=2)
        pipelines[name] = in_step(Pipeline.load(bundle, threads=2))
    return pipelines


def in_step(pipeline: Pipeline) -> Pipeline:
    """With draft steps of as many rows as the target's passes have: a draft that is the target has its bits then."""
    assert pipeline.draft is not None
    pipeline.draft.min_rows = pipeline.target.min_rows
    return pipeline


@click.command()
@click.argument("source")
@click.option("--work", type=Path, required=True)
@click.option("--precision", "precisions", multiple=True, default=("int4", "fp32"))
@click.option("--prompts", "count", default=30)
@click.option("--tokens", default=128)
@click.option("--temperature", type=float)
def main(
    source: str, work: Path, precisions: tuple[str, ...], count: int, tokens: int, temperature: float | None
) -> None:
    options = SamplingOptions(max_new_tokens=tokens, temperature=temperature, seed=None if temperature is None else 7)
    prompts = read_prompts(PROMPTS)[:count]
    for precision in precisions:
        pipelines = export_pairs(source, work, precision)
        target = pipelines["self"].target
        print(f"{precision}: plain decoding in passes of {target.min_rows} row(s), {pipelines['self'].exactness}")
        for name, k, stats in compare(pipelines, prompts, options):
            print(
                f"{precision} {name:14} K={k}: {len(prompts)} prompts, {stats.num_output_tokens} tokens, "
                f"ids and logits equal; acceptance {stats.draft_acceptance_rate:.3f}, "
                f"{stats.mean_acceptance_length:.2f} tokens a pass",
                flush=True,
            )


if __name__ == "__main__":
    main()
