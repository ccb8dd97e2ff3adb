"""``outrider bench``"""

from __future__ import annotations

import json
from pathlib import Path

import click

from outrider.cli import options
from outrider.cli.sampling import SamplingArguments
from outrider.runtime import Pipeline
from outrider.runtime.bench import Arm, BenchReport, plan_arms, read_prompts, run_bench

_COLUMNS = (
    ("tok/s", 8),
    ("ms/tok", 8),
    ("speed-up", 10),
    ("length", 8),
    ("alpha", 7),
    ("v(K)", 6),
    ("host us", 9),
    ("choose", 8),
    ("same ids", 10),
)


@click.command()
@click.argument("bundle", type=Path)
@click.option("--prompts", type=Path, required=True, help="JSON lines with `prompt` and, if wanted, `category`.")
@click.option(
    "--k", "tiers", type=options.tiers, metavar="K,K,...", help="Values of K to compare.  [default: the bundle's]"
)
@options.sampling
@options.acceptance
@options.loading
@options.as_json
def bench(
    bundle: Path,
    prompts: Path,
    tiers: tuple[int, ...] | None,
    sampling: SamplingArguments,
    acceptance: str,
    load: options.Load,
    as_json: bool,
) -> None:
    """Compare plain decoding (one row a pass, the fastest) with every drafter and K, side by side."""
    texts = read_prompts(prompts)
    pipeline = load(bundle)
    tiers = tiers or pipeline.tiers
    with options.progress_bar(len(texts) * len(plan_arms(pipeline, tiers)), "bench") as bar:
        report = run_bench(
            pipeline,
            texts,
            options=sampling.options(pipeline.codec),
            tiers=tiers,
            acceptance=acceptance,
            progress=lambda: bar.update(1),
        )
    if as_json:
        click.echo(json.dumps(report.as_dict(), indent=2))
    else:
        _print(report, pipeline)


def _print(report: BenchReport, pipeline: Pipeline) -> None:
    model = pipeline.manifest.target
    click.echo(f"{model.architecture} {model.precision}, {pipeline.target_engine.device}")
    asked = ", ".join(f"{name} {value}" for name, value in report.changed.items())
    click.echo(f"{report.num_prompts} prompts, {asked}, acceptance {report.acceptance}")
    draft_cost = f", draft step c = {report.draft_cost:.2f} of it" if report.draft_cost else ""
    click.echo(f"one-row pass {report.one_row_ms:.2f} ms{draft_cost}")
    click.echo(" " * 14 + "".join(f"{name:>{width}}" for name, width in _COLUMNS))
    for arm in report.arms:
        click.echo(_row(arm, report))
    click.echo("choose: the chooser's share of a round, part of `host us`")
    if report.acceptance != "exact":
        click.echo(f"acceptance {report.acceptance}: other text than plain decoding's is no fault")
    click.echo("same ids: as `plain, exact` (`generate --k 0`); `plain` is the fastest, with bits of its own")
    categories = list(report.arms[0].seconds_per_token)
    if len(categories) > 1:
        header = f"{'':14}" + "".join(f"{name:>11}" for name in categories)
        click.echo(f"\nspeed-up by category (median over prompts)\n{header}")
        for arm in report.arms[1:]:
            click.echo(f"{arm.name:14}" + "".join(f"{report.speed_up(arm, name):11.2f}" for name in categories))
        click.echo(f"\nlength by category\n{header}")
        for arm in report.arms[2:]:
            lengths = (arm.stats_by_category[name].mean_acceptance_length for name in categories)
            click.echo(f"{arm.name:14}" + "".join(f"{length:11.2f}" for length in lengths))


def _row(arm: Arm, report: BenchReport) -> str:
    stats = arm.stats
    cells = (
        f"{stats.tokens_per_second:.1f}",
        f"{1e3 / stats.tokens_per_second:.2f}",
        f"{report.speed_up(arm):.2f}x",
        f"{stats.mean_acceptance_length:.2f}",
        f"{stats.draft_acceptance_rate:.2f}",
        f"{report.verify_cost[arm.k]:.2f}" if arm.k else "",
        f"{stats.host_microseconds_per_round:.0f}",
        f"{stats.choose_seconds / stats.decode_seconds:.1%}",
        f"{arm.identical} of {report.num_prompts}",
    )
    return f"{arm.name:14}" + "".join(f"{cell:>{width}}" for cell, (_, width) in zip(cells, _COLUMNS, strict=True))
