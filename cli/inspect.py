"""``outrider inspect``"""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click

from outrider.cli import options
from outrider.cli.build import describe_engine
from outrider.engines.bundle import Bundle, EngineFile
from outrider.engines.errors import OutriderError

_LAYERS = ("ATTENTION_INPUT", "KV_CACHE_UPDATE", "ROTARY_EMBEDDING", "MATRIX_MULTIPLY", "DEQUANTIZE", "CAST")


@click.command()
@click.argument("bundle", type=Path)
@options.loading
@options.as_json
def inspect(bundle: Path, load: options.Load, as_json: bool) -> None:
    """Show what a bundle holds, how it was checked, the engines built of it, and how it runs here."""
    opened, here = _here(bundle, load)
    facts: dict[str, Any] = {**asdict(opened.manifest), "files": opened.files, **here}
    if as_json:
        click.echo(json.dumps(facts, indent=2))
        return
    facts["engines"] = {engine.file: _engine(opened, engine) for engine in opened.manifest.engines}
    for key, value in facts.items():
        if isinstance(value, dict) and value and (key == "engines" or isinstance(next(iter(value.values())), dict)):
            for name, entry in value.items():
                click.echo(f"{key}.{name}: {_inline(entry)}")
        else:
            click.echo(f"{key}: {_inline(value)}")


def _engine(bundle: Bundle, engine: EngineFile) -> str:
    """An engine in a line, with what is wrong with its file, and the layers that matter (all of them in the JSON)."""
    try:
        bundle.engine_path(engine)
        damage = ""
    except OutriderError as error:
        damage = f"DAMAGED: {error}; "
    layers = {name: engine.layers[name] for name in _LAYERS if name in engine.layers}
    return f"{damage}{describe_engine(engine, bundle.files[engine.file]['bytes'])}; layers {_inline(layers)}"


def _here(bundle: Path, load: options.Load) -> tuple[Bundle, dict[str, Any]]:
    """The bundle, and how its models run on this machine, or why they do not."""
    try:
        pipeline = load(bundle)
    except OutriderError as error:
        return Bundle(bundle), {"not_here": str(error)}
    engines = {"target": pipeline.target_engine, "draft": pipeline.draft_engine}
    return pipeline.bundle, {
        "here": {role: engine.describe() for role, engine in engines.items() if engine},
        "exactness_here": pipeline.exactness,
        "min_rows_here": pipeline.target.min_rows,
    }


def _inline(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{name} {_inline(entry)}" for name, entry in value.items()) or "none"
    if isinstance(value, (list, tuple)):
        return " ".join(map(str, value))
    return f"{value:.3g}" if isinstance(value, float) else str(value)
