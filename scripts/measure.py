#!/usr/bin/env python3
"""The figures of the README that `outrider bench` does not print.

measure.py export SOURCE [--precision int4]   seconds and peak memory of an export, checks included
measure.py spare-row SOURCE                   what the spare attention row costs a one-row int4 pass
measure.py chooser SOURCE                     what choosing a token costs, by sampler and size of the vocabulary
measure.py translation BUNDLE                 what a round costs the host more where the draft has another tokenizer
measure.py install                            size of a new environment with `outrider[cpu]`, and the import time
"""

from __future__ import annotations

import json
import os
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from functools import partial
from pathlib import Path

import click
import numpy as np

ROOT = Path(__file__).resolve().parents[1]
THREADS = 2
PASSES = 60


@click.group()
def main() -> None:
    pass


@main.command()
@click.argument("source")
@click.option("--precision", default="int4")
def export(source: str, precision: str) -> None:
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "bundle"
        command = ["outrider", "export", "--target", source, "--draft", "none", "--out", str(out)]
        start = time.perf_counter()
        subprocess.run([*command, "--precision", precision, "--threads", str(THREADS)], check=True)
        seconds = time.perf_counter() - start
        peak = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * 1024
        print(f"export {precision}: {seconds:.1f} s, peak memory {peak / 1e9:.2f} GB")


@main.command("spare-row")
@click.argument("source")
def spare_row(source: str) -> None:
    """Interleaved one-row passes with and without the spare row, by context length."""
    from outrider.engines.bundle import Bundle
    from outrider.engines.ort import OrtEngine
    from outrider.export import ExportOptions, export_bundle

    with tempfile.TemporaryDirectory() as folder:
        export_bundle(source, None, Path(folder) / "bundle", ExportOptions(), threads=THREADS)
        bundle = Bundle(Path(folder) / "bundle")
        engine = OrtEngine(bundle.path("target/model.onnx"), bundle.manifest.target, threads=THREADS)
        ids = np.ones((1, 1), np.int64)
        for context in (64, 128, 256, 512, 1024):
            lengths = np.full(1, context, np.int32)
            seconds: dict[bool, list[float]] = {True: [], False: []}
            for turn in range(PASSES):
                for exact in (True, False) if turn % 2 else (False, True):
                    start = time.perf_counter()
                    engine.plan(1, 1, exact).run(ids, lengths)
                    seconds[exact].append(time.perf_counter() - start)
            ratio = statistics.median(a / b for a, b in zip(seconds[True], seconds[False], strict=True))
            milliseconds = {exact: 1e3 * statistics.median(times) for exact, times in seconds.items()}
            print(
                f"one-row int4 pass over {context} tokens: {milliseconds[False]:.2f} ms, "
                f"with the spare row {milliseconds[True]:.2f} ms, ratio {ratio:.3f}"
            )


@main.command()
@click.argument("source")
def chooser(source: str) -> None:
    """Microseconds a row with cold caches: rows of a real model, and of a large vocabulary made of them."""
    from outrider.export import ExportOptions, export_bundle
    from outrider.runtime import Pipeline, SamplingOptions
    from outrider.runtime.choose import Chooser
    from outrider.runtime.sampling.history import History

    with tempfile.TemporaryDirectory() as folder:
        export_bundle(source, None, Path(folder) / "bundle", ExportOptions("int8"), threads=THREADS)
        pipeline = Pipeline.load(Path(folder) / "bundle", threads=THREADS)
        ids = pipeline.encode(
            "The harbour town was built around a single stone pier, and its people lived from the sea."
        )
        ids += pipeline.generate("The harbour town", temperature=1.0, seed=1, max_new_tokens=200).token_ids
        real = pipeline.target.extend(ids[-PASSES:], PASSES).copy()
    # A vocabulary of 262,144: the same best tokens, and a tail five times as long, 4 nats below.
    copies = [real, *(np.roll(real, shift, axis=0) - 4 for shift in range(1, 6))]
    large = np.ascontiguousarray(np.concatenate(copies, axis=1)[:, :262_144])
    flush = np.zeros(10_000_000, np.float32)
    samplers: list[dict[str, float]] = [
        {},
        {"temperature": 0.8, "top_p": 0.9},
        {"temperature": 0.8, "top_k": 50},
        {"temperature": 0.8, "min_p": 0.05},
        {"temperature": 0.8, "typical_p": 0.9},
        {"temperature": 1.0},
        {"repetition_penalty": 1.1},
    ]
    for options in samplers:
        figures = []
        for rows in (real, large):
            history = History(ids, counting=True)
            chooses = Chooser(SamplingOptions(**options), history, 7, rows.shape[1])  # type: ignore[arg-type]
            times = []
            for row in rows:
                flush += 1
                start = time.perf_counter()
                chooses.choose(row)
                times.append(time.perf_counter() - start)
            figures.append(f"V = {rows.shape[1]:,}: {1e6 * statistics.median(times):.0f} us")
        name = ", ".join(f"{key} {value}" for key, value in options.items()) or "greedy"
        print(f"{name:32} {figures[0]:24} {figures[1]}")


@main.command()
@click.argument("bundle", type=Path)
def translation(bundle: Path) -> None:
    """Microseconds a round: three tokens read, and the draft's text of the next four proposed."""
    from outrider.engines.bundle import Bundle
    from outrider.runtime.bench import read_prompts
    from outrider.runtime.text import TextCodec
    from outrider.runtime.translate import Translation

    opened = Bundle(bundle)
    assert opened.manifest.draft is not None and opened.manifest.translated, f"{bundle}: not exported for translation"
    target, draft = TextCodec(opened), TextCodec(opened, opened.manifest.draft.tokenizer)
    between = Translation(target, draft)
    text = "\n\n".join(prompt.text for prompt in read_prompts(ROOT / "scripts" / "prompts.jsonl"))
    tokens = target.encode(text)
    flush = np.zeros(10_000_000, np.float32)
    for caches in ("warm", "cold"):
        between.begin()
        read, proposed = [], []
        for length in range(100, len(tokens) - 4, 3):
            drafted = draft.tokenizer.encode(target.decode(tokens[length : length + 4])).ids
            for times, call in (
                (read, partial(between.follow, tokens[:length])),
                (proposed, partial(between.translate, drafted)),
            ):
                if caches == "cold":
                    flush += 1
                start = time.perf_counter()
                call()
                times.append(1e6 * (time.perf_counter() - start))
        medians = f"read {statistics.median(read):.0f} us, propose {statistics.median(proposed):.0f} us"
        print(f"{caches} caches: {medians} (medians of {len(read)} rounds)")


@main.command()
def install() -> None:
    with tempfile.TemporaryDirectory() as folder:
        environment = Path(folder) / "venv"
        subprocess.run([sys.executable, "-m", "venv", environment], check=True)
        python = environment / "bin" / "python"
        empty = _bytes(environment)
        # From a copy: pip builds in place, and would leave its build folder in the source tree.
        source = Path(folder) / "source"
        shutil.copytree(ROOT, source, ignore=shutil.ignore_patterns(".*", "build", "bundles"))
        subprocess.run([python, "-m", "pip", "install", "-q", f"{source}[cpu]"], check=True)
        print(f"base + cpu: {_bytes(environment) / 1e6:.0f} MB, {empty / 1e6:.0f} MB of it pip and setuptools")
        code = "import time; t = time.perf_counter(); import outrider.runtime; print(time.perf_counter() - t)"
        runs = [float(subprocess.run([python, "-c", code], check=True, capture_output=True).stdout) for _ in range(7)]
        print(f"import outrider.runtime: {statistics.median(runs):.2f} s (median of {len(runs)})")
        packages = subprocess.run([python, "-m", "pip", "list", "--format", "json"], check=True, capture_output=True)
        print("packages:", ", ".join(entry["name"] for entry in json.loads(packages.stdout)))


def _bytes(folder: Path) -> int:
    return sum(os.lstat(Path(root) / file).st_size for root, _, files in os.walk(folder) for file in files)


if __name__ == "__main__":
    main()
