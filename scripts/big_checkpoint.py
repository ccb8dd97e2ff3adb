#!/usr/bin/env python3
"""What exporting costs: memory at the size of Llama 3 70B, and megabytes of checkpoint a second.

big_checkpoint.py shape FOLDER [--precision int4]   a 70B-shaped checkpoint in sparse files: its plan, and its first and
                                                    last layers written and checked, with the peak of memory
big_checkpoint.py rate FOLDER                       a random 1B checkpoint (2.5 GB): copied, exported in fp16, int4
"""

from __future__ import annotations

import json
import resource
import shutil
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import click
import numpy as np
from make_checkpoint import llama_config, random_checkpoint

from outrider.export.architectures import decoder_spec, llama
from outrider.export.checkpoint import TokenizerFiles, open_checkpoint
from outrider.export.huggingface import HuggingFaceCheckpoint
from outrider.export.model import ModelExport

LLAMA_70B = {"hidden": 8192, "intermediate": 28672, "layers": 80, "heads": 64, "kv_heads": 8, "head_dim": 128}
LLAMA_1B = {"hidden": 2048, "intermediate": 8192, "layers": 16, "heads": 32, "kv_heads": 8, "head_dim": 64}
VOCAB = 128256
FILES_OF_70B = 30
TEXT = list(range(1000, 1032))


class NoTokenizer:
    def tokenizer(self) -> TokenizerFiles:
        return TokenizerFiles("{}", None, {}, ())


@click.group()
def main() -> None:
    pass


@main.command()
@click.argument("folder", type=Path)
@click.option("--precision", default="int4", show_default=True)
def shape(folder: Path, precision: str) -> None:
    if not folder.exists():
        write_sparse(folder, llama_config(vocab=VOCAB, tie_word_embeddings=False, **LLAMA_70B))
    checkpoint = open_checkpoint(str(folder))
    start, base = time.perf_counter(), peak_mb()
    spec = decoder_spec(checkpoint)
    print(f"plan: {_export(folder, precision).planned_bytes() / 1e9:.1f} GB of weights in {precision}", end=" ")
    print(f"({time.perf_counter() - start:.1f} s, peak of memory {peak_mb():.0f} MB, {base:.0f} MB before)")
    ends = (0, spec.num_layers - 1)
    seconds, exported = run_export(folder, folder.with_name("ends"), precision, ends)
    read = sum(np.prod(size) for _, size in spec.of_layers(ends).expected_shapes()) * 2 / 1e6
    print(f"layers {ends[0]} and {ends[1]}, embedding, head: {read:.0f} MB of checkpoint in {seconds:.0f} s,", exported)


@main.command()
@click.argument("folder", type=Path)
@click.option("--runs", default=3, show_default=True)
def rate(folder: Path, runs: int) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    source = folder / "1b"
    if not source.exists():
        random_checkpoint(source, llama_config(vocab=VOCAB, **LLAMA_1B), NoTokenizer())
    size = sum(path.stat().st_size for path in source.glob("*.safetensors")) / 1e6
    copies = [copy_seconds(source, folder / "copy") for _ in range(runs)]
    print(f"copy: {size / statistics.median(copies):.0f} MB/s of {size:.0f} MB")
    for precision in ("fp16", "int4"):
        times, said = zip(*(run_export(source, folder / "out", precision, None) for _ in range(runs)), strict=True)
        print(f"{precision}: {size / statistics.median(times):.0f} MB/s written, {said[0]}")


def write_sparse(folder: Path, config: dict[str, Any]) -> None:
    """Tensors of the right names and shapes whose bytes are holes."""
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config))
    shapes = list(llama.decoder_spec(config).expected_shapes())
    weight_map = {}
    for number in range(FILES_OF_70B):
        part = shapes[number * len(shapes) // FILES_OF_70B : (number + 1) * len(shapes) // FILES_OF_70B]
        header, offset = {}, 0
        for name, size in part:
            end = offset + 2 * int(np.prod(size))
            header[name] = {"dtype": "BF16", "shape": list(size), "data_offsets": [offset, end]}
            weight_map[name], offset = f"model-{number:05d}.safetensors", end
        text = json.dumps(header).encode()
        with (folder / f"model-{number:05d}.safetensors").open("wb") as file:
            file.write(len(text).to_bytes(8, "little") + text)
            file.truncate(8 + len(text) + offset)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))


def run_export(source: Path, out: Path, precision: str, layers: tuple[int, ...] | None) -> tuple[float, str]:
    """Write and check in a process of its own: seconds of writing, and the rest in words."""
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir()
    command = [sys.executable, __file__, "child", str(source), str(out), precision, json.dumps(layers)]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    shutil.rmtree(out)
    seconds, said = json.loads(done.stdout)
    return seconds, said


@main.command(hidden=True)
@click.argument("source", type=Path)
@click.argument("out", type=Path)
@click.argument("precision")
@click.argument("layers")
def child(source: Path, out: Path, precision: str, layers: str) -> None:
    job = _export(source, precision, json.loads(layers))
    start = time.perf_counter()
    info = job.write(out, lambda part: None)
    seconds, written = time.perf_counter() - start, peak_mb()
    info = job.check(out, info, TEXT, 2, lambda part: None)
    largest = max(4 * int(np.prod(size)) for _, size in job.spec.expected_shapes()) / 1e6
    said = (
        f"peak of memory {written:.0f} MB; checked in {time.perf_counter() - start - seconds:.0f} s (KL "
        f"{info.check['kl_stored']:.1g}, {info.exactness}), peak {peak_mb():.0f} MB; the largest tensor is "
        f"{largest / 2:.0f} MB in bf16, {largest:.0f} MB in float32"
    )
    print(json.dumps([seconds, said]))


def _export(source: Path, precision: str, layers: list[int] | None = None) -> ModelExport:
    checkpoint = HuggingFaceCheckpoint(source)
    spec = decoder_spec(checkpoint)
    spec = spec if layers is None else spec.of_layers(tuple(layers))
    return ModelExport("target/model.onnx", spec, checkpoint, "fused", precision, precision, (2, 4, 8), 2048)


def copy_seconds(source: Path, out: Path) -> float:
    start = time.perf_counter()
    shutil.copytree(source, out)
    seconds = time.perf_counter() - start
    shutil.rmtree(out)
    return seconds


def peak_mb() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e3


if __name__ == "__main__":
    main()
