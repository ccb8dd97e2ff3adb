"""``outrider build``"""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

import click

from outrider.cli import options
from outrider.engines.bundle import Bundle, EngineFile
from outrider.engines.errors import OutriderError
from outrider.engines.tensorrt import ANY, LIBRARIES, BuildOptions, build_engine, check_build


@click.command()
@click.argument("bundle", type=Path)
@click.option("--engine", type=click.Choice(tuple(LIBRARIES)), required=True, help="What to build for.")
@click.option(
    "--arch",
    required=True,
    metavar="ARCH,ARCH,...",
    help=f"GPU architectures, as in sm89,sm120, an engine for each; `{ANY}` for one that runs on all (tensorrt-rtx).",
)
@click.option(
    "--k",
    "tiers",
    type=options.tiers,
    metavar="K,K,...",
    help="Of the bundle's tiers, by default all; 0 adds passes of one row, and makes the engine half as large again.",
)
@click.option("--weight-streaming", is_flag=True, help="Let weights that do not fit on the GPU stay on the host.")
@options.as_json
def build(
    bundle: Path, engine: str, arch: str, tiers: tuple[int, ...] | None, weight_streaming: bool, as_json: bool
) -> None:
    """Build TensorRT engines of a bundle's models, ahead of time."""
    opened = Bundle(bundle)
    archs = list(dict.fromkeys(_arch(name) for name in arch.split(",") if name.strip()))
    if not archs:
        raise OutriderError(f"--arch {arch!r} names no architecture; give one, as in sm89")
    settings = [BuildOptions(engine, name, tiers or opened.manifest.tiers, weight_streaming) for name in archs]
    jobs = [(role, one) for one in settings for role in opened.manifest.models]
    for job in jobs:  # before the first is built
        check_build(opened, *job)
    results = []
    for number, (role, wanted) in enumerate(jobs, start=1):
        with options.share_bar(f"{role} {wanted.arch} ({number} of {len(jobs)})") as show:
            results.append(build_engine(opened, role, wanted, show))
    if as_json:
        records = [asdict(record) | opened.files[record.file] | {"built_now": new} for record, new in results]
        click.echo(json.dumps({"bundle": str(bundle), "engines": records}, indent=2))
        return
    for record, new in results:
        click.echo(f"{'built' if new else 'found'}  {describe_engine(record, opened.files[record.file]['bytes'])}")


def _arch(name: str) -> str:
    """``89``, ``SM89`` and ``sm_89`` as ``sm89``."""
    name = name.strip().lower().replace("_", "")
    return f"sm{name}" if name.isdigit() else name


def describe_engine(engine: EngineFile, size: int) -> str:
    """An engine in a line."""
    layers = engine.layers
    parts = [
        f"{engine.role} {engine.engine} {engine.version} {engine.arch}, {size / 1e6:.1f} MB",
        f"plans of {', '.join(str(rows) for rows, _ in engine.plans)} rows",
        f"{layers.get('ATTENTION_INPUT', 0)} fused attentions",
        f"{engine.aliases} caches updated in place",
        f"{layers.get('DEQUANTIZE', 0)} dequantized matrices" if layers.get("DEQUANTIZE") else "",
        "weight streaming" if engine.weight_streaming else "",
        f"built in {engine.build_seconds:.1f} s",
    ]
    return "; ".join(part for part in parts if part)
