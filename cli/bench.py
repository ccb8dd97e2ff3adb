"""``outrider bench``"""

from __future__ import annotations

import json
from pathlib import Path

import click

from outrider.cli import options
from outrider.cli.sampling import SamplingArguments, integers
from outrider.engines.errors import OutriderError
from outrider.runtime import Pipeline
from outrider.runtime.bench import Arm, BenchReport, plan_arms, read_prompts, record_trace, run_bench
from outrider.runtime.trace import write_trace

_COLUMNS = (
    ("tok/s", 8),
    ("ms/tok", 8),
    ("speed-up", 10),
    ("quartiles", 13),
    ("length", 8),
    ("alpha", 7),
    ("v(K)", 6),
    ("host us", 9),
    ("choose", 8),
    ("same ids", 11),
)


@click.command()
@click.argument("bundle", type=Path)
@click.option("--prompts", type=Path, required=True, help="JSON lines with `prompt` and, if wanted, `category`.")
@click.option(
    "--k", "tiers", type=options.tiers, metavar="K,K,...", help="Values of K to compare.  [default: the bundle's]"
)
@click.option("--repeats", type=click.IntRange(min=1), default=1, show_default=True, help="Runs of each prompt.")
@click.option(
    "--contexts",
    type=integers("whole numbers such as 512,2048"),
    metavar="N,N,...",
    help="Also prompts of so many tokens, made of all the others.",
)
@click.option("--report", type=Path, help="Folder to create: report.md, report.json and plots.")
@click.option("--trace", type=Path, help="File to write: what every drafter would propose at every position.")
@options.sampling
@options.acceptance
@options.loading
@options.as_json
def bench(
    bundle: Path,
    prompts: Path,
    tiers: tuple[int, ...] | None,
    repeats: int,
    contexts: tuple[int, ...] | None,
    report: Path | None,
    trace: Path | None,
    sampling: SamplingArguments,
    acceptance: str,
    load: options.Load,
    as_json: bool,
) -> None:
    """Compare plain decoding (one row a pass, the fastest) with every drafter and K, and with K chosen by itself."""
    texts = read_prompts(prompts)
    for out in (report, trace):  # before the work
        if out is not None and (out.exists() or not out.parent.is_dir()):
            raise OutriderError(f"{out} exists, or there is no folder {out.parent}; give another place")
    if acceptance != "exact" and (report or trace):
        raise OutriderError(f"--report and --trace judge drafts by the exact rule, and --acceptance is {acceptance}")
    if report is not None:
        with options.extras("bench"):
            from outrider.cli.report import write_report
    pipeline = load(bundle)
    tiers = tiers or pipeline.tiers
    settings = sampling.options(pipeline.codec)
    contexts = contexts or ()
    runs = (len(texts) + len(contexts)) * repeats * len(plan_arms(pipeline, tiers))
    recorded = len(texts) * (report is not None or trace is not None)
    with options.progress_bar(runs + recorded, "bench") as bar:
        step = lambda: bar.update(1)  # noqa: E731
        found = run_bench(
            pipeline,
            texts,
            options=settings,
            tiers=tiers,
            acceptance=acceptance,
            contexts=contexts,
            repeats=repeats,
            progress=step,
        )
        traced = None
        if recorded:
            traced = record_trace(pipeline, texts, options=settings, progress=step)
    page = table(found, pipeline)
    click.echo(json.dumps(found.as_dict(), indent=2) if as_json else page)
    if traced is not None and trace is not None:
        write_trace(trace, traced)
    if traced is not None and report is not None:
        write_report(report, found, traced, page)


def table(report: BenchReport, pipeline: Pipeline) -> str:
    """All arms, and speed-up and acceptance length by category."""
    model, tuning = pipeline.manifest.target, report.tuning
    asked = ", ".join(f"{name} {value}" for name, value in report.changed.items())
    c = f", draft step c = {tuning.draft_cost:.2f} of it" if tuning.draft_cost else ""
    lines = [
        f"{model.architecture} {model.precision}, {pipeline.target_engine.device}",
        f"{report.num_runs} runs, {asked}, acceptance {report.acceptance}",
        f"plain round {1e3 * tuning.costs.rounds(0)[0]:.2f} ms{c}; {tuning.origin}",
        " " * 14 + "".join(f"{name:>{width}}" for name, width in _COLUMNS),
        *(_row(arm, report) for arm in report.arms),
        "choose: the chooser's share of a round, part of `host us`; auto: K chosen in each round",
    ]
    if report.acceptance != "exact":
        lines.append(f"acceptance {report.acceptance}: other text than plain decoding's is no fault")
    lines.append("same ids: as `plain, exact` (`generate --k 0`); `plain` is the fastest, with bits of its own")
    categories = list(report.arms[0].seconds_per_token)
    if len(categories) > 1:
        header = f"{'':14}" + "".join(f"{name:>12}" for name in categories)
        lines += ["", "speed-up by category (median over runs)", header]
        for arm in report.arms[1:]:
            lines.append(f"{arm.name:14}" + "".join(f"{report.speed_up(arm, name):12.2f}" for name in categories))
        lines += ["", "length by category", header]
        for arm in report.arms[2:]:
            lengths = (arm.stats_by_category[name].mean_acceptance_length for name in categories)
            lines.append(f"{arm.name:14}" + "".join(f"{length:12.2f}" for length in lengths))
    return "\n".join(lines)


def _row(arm: Arm, report: BenchReport) -> str:
    stats = arm.stats
    low, high = report.quartiles(arm)
    cells = (
        f"{stats.tokens_per_second:.1f}",
        f"{1e3 / stats.tokens_per_second:.2f}",
        f"{report.speed_up(arm):.2f}x",
        f"{low:.2f}-{high:.2f}",
        f"{stats.mean_acceptance_length:.2f}",
        f"{stats.draft_acceptance_rate:.2f}",
        f"{report.tuning.verify_cost[arm.k]:.2f}" if arm.k else "",
        f"{stats.host_microseconds_per_round:.0f}",
        f"{stats.choose_seconds / stats.decode_seconds:.1%}",
        f"{arm.identical} of {report.num_runs}",
    )
    return f"{arm.name:14}" + "".join(f"{cell:>{width}}" for cell, (_, width) in zip(cells, _COLUMNS, strict=True))
