"""``outrider inspect``"""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click

from outrider.cli import options


@click.command()
@click.argument("bundle", type=Path)
@options.threads
@options.provider
@options.as_json
def inspect(bundle: Path, threads: int | None, provider: str, as_json: bool) -> None:
    """Show what a bundle holds, how it was checked, and how its engines run here."""
    from outrider.runtime import Pipeline

    pipeline = Pipeline.load(bundle, threads=threads, provider=provider)
    engines = {"target": pipeline.target_engine, "draft": pipeline.draft_engine}
    facts: dict[str, Any] = {
        **asdict(pipeline.manifest),
        "files": pipeline.bundle.files,
        "engines": {role: engine.describe() for role, engine in engines.items() if engine},
        "exactness_here": pipeline.exactness,
        "min_rows_here": pipeline.target.min_rows,
    }
    if as_json:
        click.echo(json.dumps(facts, indent=2))
        return
    for key, value in facts.items():
        if isinstance(value, dict) and value and isinstance(next(iter(value.values())), dict):
            for name, entry in value.items():
                click.echo(f"{key}.{name}: {_inline(entry)}")
        else:
            click.echo(f"{key}: {_inline(value)}")


def _inline(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{name} {_inline(entry)}" for name, entry in value.items()) or "none"
    if isinstance(value, (list, tuple)):
        return " ".join(map(str, value))
    return f"{value:.3g}" if isinstance(value, float) else str(value)
