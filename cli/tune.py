"""``outrider tune``"""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

import click

from outrider.cli import options
from outrider.engines.errors import OutriderError
from outrider.runtime.controller import EDGES
from outrider.runtime.tuning import Tuning, tune, write_tuning


@click.command("tune")
@click.argument("bundle", type=Path)
@options.loading
@options.as_json
def tune_command(bundle: Path, load: options.Load, as_json: bool) -> None:
    """Measure what passes and drafts cost on this device, and keep it in the bundle for choosing K."""
    pipeline = load(bundle)
    with options.share_bar("tune") as show:
        tuning = tune(pipeline, progress=show)
    if as_json:
        click.echo(json.dumps(asdict(tuning), indent=2))
    else:
        _print(tuning)
    try:
        path = write_tuning(pipeline, tuning)
    except OSError as error:
        raise OutriderError(
            f"{error.filename or bundle} cannot be written ({error.strerror}): these figures are not kept; "
            f"make {bundle} writable, or tune a copy"
        ) from None
    click.echo(f"kept in {path}", err=as_json)


def _print(tuning: Tuning) -> None:
    costs = tuning.costs
    click.echo(f"{'context':>14}" + "".join(f"{length:>9}" for length in costs.lengths))
    for k, row in enumerate(costs.verify):
        cells = (f"{1e3 * seconds:>6.2f} ms" for seconds in row)
        click.echo(
            f"{'verify K = ' + str(k) if k else 'plain':>14}" + "".join(cells) + f"   v = {tuning.verify_cost[k]:.2f}"
        )
    for rows, row in zip(costs.draft_rows, costs.draft, strict=True):
        click.echo(f"{f'draft {rows} rows':>14}" + "".join(f"{1e3 * seconds:>6.2f} ms" for seconds in row))
    if costs.draft_step:
        steps = "".join(f"{1e3 * seconds:>6.2f} ms" for seconds in costs.draft_step)
        click.echo(f"{'draft step':>14}{steps}   c = {tuning.draft_cost:.2f}")
    click.echo(f"host: {1e6 * costs.round_host:.0f} us a round, {1e6 * costs.draft_host:.0f} us a draft step")
    for source, classes in tuning.priors.items():
        stood, judged = (sum(column) for column in zip(*classes, strict=True))
        if judged:
            shares = " ".join(f"{a / b:.2f}" if b else "-" for a, b in classes)
            edges = " ".join(f"{edge:g}" for edge in EDGES[source])
            click.echo(f"{source}: {stood:.0f} of {judged:.0f} drafts stand; by evidence (steps at {edges}): {shares}")
