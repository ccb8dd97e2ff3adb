#!/usr/bin/env python3
"""What each precision costs in quality, and what it saves: the table of docs/export.md.

    quality.py SOURCE --work FOLDER [--windows N] [--as-stored]

Exports SOURCE in each precision and compares the engines with its own weights in float32 over the text of
export/check.txt, or its first N windows of 512 tokens: perplexity, greedy agreement, KL. Times are of one-row passes
behind 128 tokens, 2 threads, all engines in turn.

Files at hand are often rounded already, in blocks of 32 along the inputs: rounding them again in the same blocks says
little about other weights. So the same model is measured with its channels in another order, which moves each block's
weights to other blocks and changes no logit; --as-stored leaves them where they are.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Iterator
from pathlib import Path

import click
import numpy as np
from make_checkpoint import write_folder
from numpy.typing import NDArray
from tokenizers import Tokenizer

from outrider.engines.bundle import Bundle
from outrider.engines.engine import Engine
from outrider.engines.errors import OutriderError
from outrider.engines.ort import OrtEngine
from outrider.export import ExportOptions, export_bundle
from outrider.export.architectures import decoder_spec
from outrider.export.check import Comparison, check_text, compare
from outrider.export.checkpoint import Checkpoint, open_checkpoint, read_all
from outrider.export.reference import reference_logits

ROWS = {
    "fp32": ExportOptions("fp32"),
    "fp16": ExportOptions("fp16"),
    "int8": ExportOptions("int8"),
    "int4, head fp32": ExportOptions(head_precision="fp32"),
    "int4, head int8": ExportOptions(head_precision="int8"),
    "int4, head int8, `*.down_proj=int8`": ExportOptions(
        head_precision="int8", tensor_precision={"*.down_proj": "int8"}
    ),
    "int4": ExportOptions(),
}
WINDOW, CONTEXT, TURNS, STEPS, THREADS = 512, 128, 9, 8, 2


@click.command()
@click.argument("source")
@click.option("--work", type=Path, required=True, help="Folder for checkpoint and bundles.")
@click.option("--windows", "count", type=int, help="How many of the text's.  [default: all, 4]")
@click.option("--as-stored", is_flag=True, help="Leave the channels in their order.")
def main(source: str, work: Path, count: int | None, as_stored: bool) -> None:
    work.mkdir(parents=True, exist_ok=True)
    checkpoint = open_checkpoint(source)
    if not as_stored:
        source = str(work / "reordered")
        if not Path(source).exists():
            write_folder(Path(source), checkpoint.config, checkpoint, reordered(checkpoint))
        checkpoint = open_checkpoint(source)
    engines, sizes = {}, {}
    for name, options in ROWS.items():
        out = work / "-".join([options.precision, str(options.head_precision), str(len(options.tensor_precision))])
        if not out.exists():
            try:
                export_bundle(source, None, out, options, threads=THREADS)
            except OutriderError as error:  # activations beyond float16
                print(f"{name}: {error}")
                continue
        info = Bundle(out).manifest.target
        engines[name] = OrtEngine(out / info.graph, info, threads=THREADS)
        sizes[name] = (out / info.weights).stat().st_size / 1e6
    ids = Tokenizer.from_str(checkpoint.tokenizer().json).encode(check_text()).ids
    spec = decoder_spec(checkpoint)
    found: dict[str, list[Comparison]] = {name: [] for name in engines}
    windows = [ids[start : start + WINDOW] for start in range(0, len(ids) - WINDOW + 1, WINDOW)][:count]
    for window in windows:
        expected = reference_logits(spec, checkpoint, np.array(window))[:, : info.vocab_size]
        for name, engine in engines.items():
            found[name].append(compare(engine, window, expected))
    milliseconds = step_times(engines)
    reference = mean_perplexity([part.reference_perplexity for part in next(iter(found.values()))])
    print(f"{len(windows)} windows of {WINDOW} tokens; perplexity of the checkpoint in float32: {reference:.2f}\n")
    print("| precision | MB | perplexity | greedy agreement | KL, nats | ms a token |")
    print("|---|---|---|---|---|---|")
    for name, parts in found.items():
        agreement = statistics.mean(part.same_argmax for part in parts)
        kl = statistics.mean(part.kl for part in parts)
        perplexity = mean_perplexity([part.perplexity for part in parts])
        print(
            f"| {name} | {sizes[name]:.0f} | {perplexity:.2f} | {agreement:.1%} | {kl:.2g} | {milliseconds[name]:.1f} |"
        )


def mean_perplexity(parts: list[float]) -> float:
    return math.exp(statistics.mean(map(math.log, parts)))


def step_times(engines: dict[str, Engine]) -> dict[str, float]:
    """Median milliseconds of a one-row pass."""
    seconds: dict[str, list[float]] = {name: [] for name in engines}
    ids, lengths = np.ones((1, 1), np.int64), np.full(1, CONTEXT, np.int32)
    for turn in range(TURNS + 1):
        for name, engine in engines.items():
            plan = engine.plan(1, 1)
            for _ in range(STEPS):
                start = time.perf_counter()
                plan.run(ids, lengths)
                if turn:  # the first warms up
                    seconds[name].append(time.perf_counter() - start)
    return {name: 1e3 * statistics.median(values) for name, values in seconds.items()}


def reordered(checkpoint: Checkpoint) -> Iterator[tuple[str, NDArray[np.float32]]]:
    """The tensors of the same model with its hidden, value and MLP channels in a random order.

    For gated families with RMS norms, without biases, of a tensor a projection.
    """
    spec, rng = decoder_spec(checkpoint), np.random.default_rng(0)
    hidden, within_head = rng.permutation(spec.hidden_size), rng.permutation(spec.head_dim)
    values = _of_heads(within_head, spec.num_kv_heads)
    merged = _of_heads(within_head, spec.num_heads)
    yield f"{spec.embedding}.weight", read_all(checkpoint, f"{spec.embedding}.weight")[:, hidden]
    for layer in range(spec.num_layers):
        inner = rng.permutation(spec.intermediate_size)
        for role in spec.layer_names:
            name = f"{spec.stem(role, layer)}.weight"
            tensor = read_all(checkpoint, name)
            if tensor.ndim == 1:
                yield name, tensor if role in ("q_norm", "k_norm") else tensor[hidden]
                continue
            rows = {"v": values, "o": hidden, "gate": inner, "up": inner, "down": hidden}.get(role, slice(None))
            columns = {"o": merged, "down": inner}.get(role, hidden)
            yield name, tensor[rows][:, columns]
    yield f"{spec.final_norm}.weight", read_all(checkpoint, f"{spec.final_norm}.weight")[hidden]
    if not spec.tied:
        yield f"{spec.head}.weight", read_all(checkpoint, f"{spec.head}.weight")[:, hidden]


def _of_heads(within_head: NDArray[np.int64], heads: int) -> NDArray[np.int64]:
    return (np.arange(heads)[:, None] * len(within_head) + within_head).reshape(-1)


if __name__ == "__main__":
    main()
