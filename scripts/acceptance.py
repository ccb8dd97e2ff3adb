#!/usr/bin/env python3
"""How many drafts stand under each acceptance rule, by temperature, for a draft model and for the n-gram drafter.

    acceptance.py SOURCE --work FOLDER [--k 4] [--prompts 30] [--tokens 64] [--seeds 2]

SOURCE is a checkpoint, the target in int8. The draft is the same checkpoint in int4, which stands in for a trained one:
it is too slow for a draft, and about as often right. The rules decode different texts from the same prompts, so that
figures differ by chance too: the last column is the standard error of the length over prompts and seeds.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from pathlib import Path

import click

from outrider.export import ExportOptions, export_bundle
from outrider.runtime import DecodeStats, Pipeline, SamplingOptions
from outrider.runtime.bench import encode_prompt, read_prompts
from outrider.runtime.decode import decode
from outrider.runtime.drafters import Drafter
from outrider.runtime.drafters.model import ModelDrafter
from outrider.runtime.drafters.ngram import NgramDrafter

PROMPTS = Path(__file__).with_name("prompts.jsonl")
RULES = ("exact", "residual", "block")


def load(source: str, work: Path, precision: str, k: int) -> Pipeline:
    bundle = work / f"{precision}-k{k}"
    if not bundle.exists():
        export_bundle(source, None, bundle, ExportOptions(precision=precision, tiers=(k,)), threads=2)
    return Pipeline.load(bundle, threads=2)


def runs(
    pipeline: Pipeline, drafter: Drafter, k: int, prompts: list[list[int]], options: SamplingOptions, rule: str
) -> Iterator[DecodeStats]:
    for ids in prompts:
        request = pipeline.new_request(ids, options, rule)
        for _ in decode(pipeline.target, drafter, k, request):
            pass
        yield request.stats


@click.command()
@click.argument("source")
@click.option("--work", type=Path, required=True)
@click.option("--k", default=4)
@click.option("--prompts", "count", default=30)
@click.option("--tokens", default=64)
@click.option("--seeds", default=2)
def main(source: str, work: Path, k: int, count: int, tokens: int, seeds: int) -> None:
    work.mkdir(parents=True, exist_ok=True)
    pipeline, draft = load(source, work, "int8", k), load(source, work, "int4", k)
    prompts = [encode_prompt(pipeline, prompt) for prompt in read_prompts(PROMPTS)[:count]]
    drafters: dict[str, Drafter] = {"model": ModelDrafter(draft.target), "ngram": NgramDrafter()}
    print(f"{len(prompts)} prompts x {tokens} tokens x {seeds} seeds, K = {k}")
    print(f"{'drafter':9}{'T':>5}  {'rule':10}{'alpha':>7}{'length':>8}{'+-':>7}")
    for name, drafter in drafters.items():
        for temperature in (0.7, 1.0):
            for rule in RULES:
                total, lengths = DecodeStats(), []
                for seed in range(seeds):
                    options = SamplingOptions(max_new_tokens=tokens, temperature=temperature, seed=seed)
                    for stats in runs(pipeline, drafter, k, prompts, options, rule):
                        total.add(stats)
                        lengths.append(stats.mean_acceptance_length)
                error = statistics.stdev(lengths) / len(lengths) ** 0.5
                print(
                    f"{name:9}{temperature:5.1f}  {rule:10}{total.draft_acceptance_rate:7.3f}"
                    f"{total.mean_acceptance_length:8.2f}{error:7.2f}",
                    flush=True,
                )


if __name__ == "__main__":
    main()
