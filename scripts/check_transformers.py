#!/usr/bin/env python3
"""Are greedy fp32 ids those of Hugging Face transformers (float32, CPU)?

    check_transformers.py SOURCE.gguf --work FOLDER [--prompts 30] [--tokens 64]

transformers reads the GGUF file by its own conversion. Where ids part, the gap between its two best logits is printed:
below 1e-3 either choice is right, above it the script exits 1.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import click

from outrider.export import ExportOptions, export_bundle
from outrider.runtime import Pipeline
from outrider.runtime.bench import encode_prompt, read_prompts

PROMPTS = Path(__file__).with_name("prompts.jsonl")
NEAR_TIE = 1e-3


def reference_model(source: Path) -> Any:
    import torch
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(2)
    return AutoModelForCausalLM.from_pretrained(str(source.parent), gguf_file=source.name, dtype=torch.float32).eval()


def first_difference(model: Any, ids: list[int], found: list[int]) -> tuple[int, float] | None:
    """Where the reference's greedy text leaves ``found``, and the gap between its two best logits there."""
    import torch

    with torch.inference_mode():
        logits = model(torch.tensor([ids + found])).logits[0, len(ids) - 1 : -1]
    best = logits.topk(2, dim=-1)
    for position, token in enumerate(found):
        if int(best.indices[position, 0]) != token:
            return position, float(best.values[position, 0] - best.values[position, 1])
    return None


@click.command()
@click.argument("source", type=Path)
@click.option("--work", type=Path, required=True)
@click.option("--prompts", "count", default=30)
@click.option("--tokens", default=64)
def main(source: Path, work: Path, count: int, tokens: int) -> None:
    work.mkdir(parents=True, exist_ok=True)
    bundle = work / "fp32"
    if not bundle.exists():
        export_bundle(str(source), None, bundle, ExportOptions(precision="fp32"), threads=2)
    pipeline = Pipeline.load(bundle, threads=2)
    model = reference_model(source)
    equal = wrong = 0
    for prompt in read_prompts(PROMPTS)[:count]:
        ids = encode_prompt(pipeline, prompt)
        found = pipeline.stream([{"role": "user", "content": prompt.text}], max_new_tokens=tokens).result().token_ids
        difference = first_difference(model, ids, found)
        if difference is None:
            equal += 1
        else:
            position, gap = difference
            wrong += gap >= NEAR_TIE
            print(f"{prompt.id}: differs at token {position}, where the two best logits are {gap:.2g} apart")
    print(f"{equal} of {count} prompts x {tokens} tokens: ids equal those of transformers")
    sys.exit(1 if wrong else 0)


if __name__ == "__main__":
    main()
