#!/usr/bin/env python3
"""Plain decoding, one row at a time: Outrider against onnxruntime-genai on the same checkpoint, precision and threads.

    bench_plain.py SOURCE --work FOLDER [--precision int4] [--pairs 5]

SOURCE is a checkpoint (GGUF file or folder). The peer gets a virtual environment of its own in FOLDER, a float32 copy
of the checkpoint, and its own builder's export (block 32, accuracy level 4). Then both decode the same prompts, each
run a fresh process with 2 threads, in turn, the order changing from pair to pair. "outrider" is plain decoding at its
fastest, "exact" plain decoding with the bits of verify rows. Prints the median ratios.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import time
from pathlib import Path

import click

PEER = ["onnxruntime-genai==0.18.0", "onnx", "onnx-ir", "transformers>=5", "sentencepiece"]
PROMPTS = Path(__file__).with_name("prompts.jsonl")
THREADS = 2


@click.group()
def main() -> None:
    pass


@main.command()
@click.argument("source")
@click.option("--work", type=Path, required=True)
@click.option("--precision", type=click.Choice(["int4", "fp32"]), default="int4")
@click.option("--pairs", default=5)
@click.option("--prompts", "count", default=6, help="Prompts a run.")
@click.option("--tokens", default=64, help="Tokens a prompt.")
def compare(source: str, work: Path, precision: str, pairs: int, count: int, tokens: int) -> None:
    work.mkdir(parents=True, exist_ok=True)
    python, peer_model, bundle = prepare(source, work, precision)
    prompts = write_prompts(bundle, work / "prompts.json", count)
    script = str(Path(__file__).resolve())
    commands = {
        "outrider": [sys.executable, script, "outrider", str(bundle), str(prompts), str(tokens), "no"],
        "exact": [sys.executable, script, "outrider", str(bundle), str(prompts), str(tokens), "yes"],
        "genai": [str(python), script, "genai", str(peer_model), str(prompts), str(tokens)],
    }
    seen: dict[str, list[float]] = {name: [] for name in commands}
    for pair in range(pairs):
        for name in list(commands)[:: 1 if pair % 2 == 0 else -1]:
            result = subprocess.run(commands[name], check=True, capture_output=True, text=True)
            seen[name].append(float(result.stdout.split()[-1]))
    print(f"{'genai':9} {precision}: {statistics.median(seen['genai']):.2f} ms a token")
    for name, values in seen.items():
        if name == "genai":
            continue
        ratios = sorted(peer / ours for ours, peer in zip(values, seen["genai"], strict=True))
        print(
            f"{name:9} {precision}: {statistics.median(values):.2f} ms a token; {statistics.median(ratios):.3f}x as "
            f"fast as genai (median of {pairs} pairs, {ratios[0]:.3f} to {ratios[-1]:.3f})"
        )


def prepare(source: str, work: Path, precision: str) -> tuple[Path, Path, Path]:
    """The peer's interpreter, its model, and our bundle, each made once."""
    from make_checkpoint import copy_checkpoint

    from outrider.export import ExportOptions, export_bundle
    from outrider.export.checkpoint import open_checkpoint

    environment, folder = work / "peer-venv", work / "checkpoint"
    python, model, bundle = environment / "bin" / "python", work / f"genai-{precision}", work / f"bundle-{precision}"
    if not python.exists():
        subprocess.run([sys.executable, "-m", "venv", environment], check=True)
        pip = [python, "-m", "pip", "install", "-q"]
        subprocess.run([*pip, "torch==2.13.0"], check=True)
        subprocess.run([*pip, *PEER, "click"], check=True)
    if not folder.exists():
        copy_checkpoint(open_checkpoint(source), folder)
    if not model.exists():
        builder = [
            python,
            "-m",
            "onnxruntime_genai.models.builder",
            "-i",
            folder,
            "-o",
            model,
            "-p",
            precision,
            "-e",
            "cpu",
        ]
        options = ["--extra_options", "int4_block_size=32", "int4_accuracy_level=4", "hf_token=false"]
        subprocess.run([*builder, *options], check=True, capture_output=True)
        config = json.loads((model / "genai_config.json").read_text())
        config["model"]["decoder"]["session_options"]["intra_op_num_threads"] = THREADS
        (model / "genai_config.json").write_text(json.dumps(config))
    if not bundle.exists():
        export_bundle(source, None, bundle, ExportOptions(precision=precision), threads=THREADS)
    return python, model, bundle


def write_prompts(bundle: Path, path: Path, count: int) -> Path:
    from outrider.engines.bundle import Bundle
    from outrider.runtime.text import TextCodec

    codec = TextCodec(Bundle(bundle))
    texts = [json.loads(line)["prompt"] for line in PROMPTS.read_text().splitlines()]
    texts = texts[:: max(1, len(texts) // count)][:count]
    path.write_text(json.dumps([codec.encode([{"role": "user", "content": text}]) for text in texts]))
    return path


@main.command(hidden=True)
@click.argument("bundle")
@click.argument("prompts", type=Path)
@click.argument("tokens", type=int)
@click.argument("exact", type=bool)
def outrider(bundle: str, prompts: Path, tokens: int, exact: bool) -> None:
    """One run: milliseconds a token."""
    from outrider.runtime import Pipeline, SamplingOptions
    from outrider.runtime.decode import decode
    from outrider.runtime.drafters import NoDrafter
    from outrider.runtime.sequence import CachedModel

    pipeline = Pipeline.load(bundle, threads=THREADS)
    model = CachedModel(pipeline.target_engine, pipeline.target.min_rows, exact)
    options = SamplingOptions(max_new_tokens=tokens, ignore_eos=True)
    times = []
    for ids in json.loads(prompts.read_text()):
        request = pipeline.new_request(ids, options)
        for _ in decode(model, NoDrafter(), 0, request):
            pass
        times.append(1e3 / request.stats.tokens_per_second)
    print(statistics.median(times))


@main.command(hidden=True)
@click.argument("model")
@click.argument("prompts", type=Path)
@click.argument("tokens", type=int)
def genai(model: str, prompts: Path, tokens: int) -> None:
    """One run of the peer, greedy, the prefill and the first token left out as well."""
    import onnxruntime_genai as og

    loaded = og.Model(model)
    times = []
    for ids in json.loads(prompts.read_text()):
        params = og.GeneratorParams(loaded)
        params.set_search_options(do_sample=False, max_length=2048, min_length=len(ids) + tokens)
        generator = og.Generator(loaded, params)
        generator.append_tokens(ids)
        generator.generate_next_token()
        start = time.perf_counter()
        for _ in range(tokens - 1):
            generator.generate_next_token()
        times.append(1e3 * (time.perf_counter() - start) / (tokens - 1))
    print(statistics.median(times))


if __name__ == "__main__":
    main()
