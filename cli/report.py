"""The report of a bench: a page, its figures as JSON, and plots (matplotlib, the `bench` extra)."""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from outrider.runtime.bench import AUTO, EXACT, Arm, BenchReport
from outrider.runtime.controller import BLOCK, SOURCES, Controller
from outrider.runtime.replay import Replayed, oracle_seconds, replay, replay_fixed
from outrider.runtime.stats import DecodeStats
from outrider.runtime.trace import Trace


def write_report(folder: Path, report: BenchReport, trace: Trace, table: str) -> None:
    """Create ``folder`` with ``report.md``, ``report.json`` and plots."""
    predicted = {arm.name: predict(arm, report, trace) for arm in report.arms[1:]}
    plots: dict[str, Callable[[Any], None]] = {
        "speed-up by category": lambda axes: _plot_categories(axes, report),
        "verify pass of K drafts": lambda axes: _plot_costs(axes, report),
        "acceptance by position": lambda axes: _plot_acceptance(axes, trace),
        "tokens a round over time": lambda axes: _plot_time(axes, report, trace),
        "predicted and measured speed-up": lambda axes: _plot_predicted(axes, report, trace, predicted),
    }
    folder.mkdir()
    page = ["# Bench", "", "```", table, "```", "", *_predicted_lines(report, predicted, trace), ""]
    for title, draw in plots.items():
        name = f"{title.replace(' ', '-')}.png"
        figure = Figure(figsize=(8, 4.5), layout="constrained")
        axes = figure.subplots()
        draw(axes)
        axes.set_title(title)
        figure.savefig(folder / name, dpi=120)
        page.append(f"![{title}]({name})")
    record = report.as_dict() | {"predicted_speed_up": predicted}
    (folder / "report.json").write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
    (folder / "report.md").write_text("\n".join(page) + "\n", encoding="utf-8")


def predict(arm: Arm, report: BenchReport, trace: Trace) -> float:
    """Speed-up over exact plain decoding that the costs foretell for what the arm would do with the trace."""
    plain = sum(replay_fixed(request, trace.costs, "none", 0).seconds for request in trace.requests)
    return plain / sum(played.seconds for played in _play(arm, report, trace))


def measured(arm: Arm, report: BenchReport, trace: Trace) -> float:
    """The same of what was measured, over all runs of the prompts that were traced."""
    rates = []
    for one in (arm, report.arm(EXACT)):
        total = DecodeStats()
        for category in {request.category for request in trace.requests}:
            total.add(one.stats_by_category[category])
        rates.append(total.tokens_per_second)
    return rates[0] / rates[1]


def _play(arm: Arm, report: BenchReport, trace: Trace) -> list[Replayed]:
    if arm.k is not None:
        return [replay_fixed(request, trace.costs, arm.drafter, arm.k) for request in trace.requests]
    controller = Controller(trace.costs, report.tuning.priors)
    return [replay(request, controller, arm.drafter) for request in trace.requests]


def _predicted_lines(report: BenchReport, predicted: dict[str, float], trace: Trace) -> list[str]:
    plain = sum(replay_fixed(request, trace.costs, "none", 0).seconds for request in trace.requests)
    oracle = plain / sum(oracle_seconds(request, trace.costs) for request in trace.requests)
    best = report.best_fixed()
    lines = ["| | predicted | measured | off by |", "|---|---|---|---|"]
    for arm in report.arms[2:]:
        ahead, found = predicted[arm.name], measured(arm, report, trace)
        lines.append(f"| {arm.name} | {ahead:.2f}x | {found:.2f}x | {ahead / found - 1:+.1%} |")
    return [
        "Speed-up over `plain, exact`, predicted by replaying recorded drafts with the tuned costs:",
        "",
        *lines,
        "",
        f"`auto` reaches {report.speed_up(report.arm(AUTO)):.2f}x of the fastest plain decoding, the best fixed choice "
        f"({best.name}) {report.speed_up(best):.2f}x. By replay it has {predicted[AUTO] / oracle:.0%} of the speed of "
        f"one who knows beforehand which drafts stand ({oracle:.2f}x).",
    ]


def _plot_categories(axes: Any, report: BenchReport) -> None:
    categories = list(report.arms[0].seconds_per_token)
    arms = [report.arm(EXACT), report.arm(AUTO)]
    width = 0.8 / 3
    for index, arm in enumerate(arms):
        heights = [report.speed_up(arm, name) for name in categories]
        ranges = [report.quartiles(arm, name) for name in categories]
        errors = [
            [height - low for height, (low, _) in zip(heights, ranges, strict=True)],
            [high - height for height, (_, high) in zip(heights, ranges, strict=True)],
        ]
        places = [place + index * width for place in range(len(categories))]
        axes.bar(places, heights, width, yerr=errors, label=arm.name, error_kw={"elinewidth": 0.8})
    best = [report.best_fixed(name) for name in categories]
    places = [place + 2 * width for place in range(len(categories))]
    heights = [report.speed_up(arm, name) for arm, name in zip(best, categories, strict=True)]
    axes.bar(places, heights, width, label="best fixed K of the category")
    for place, height, arm in zip(places, heights, best, strict=True):
        axes.annotate(arm.name, (place, height), ha="center", va="bottom", fontsize=6, rotation=90)
    axes.axhline(1, color="black", linewidth=0.8)
    axes.set_xticks([place + width for place in range(len(categories))], categories)
    axes.set_ylabel("speed-up over the fastest plain decoding")
    axes.legend(fontsize=8)


def _plot_costs(axes: Any, report: BenchReport) -> None:
    costs = report.tuning.costs
    for index, length in enumerate(costs.lengths):
        times = [1e3 * row[index] for row in costs.verify]
        axes.plot(range(len(times)), times, marker="o", label=f"verify, context {length}")
    if costs.draft:
        step = 1e3 * costs.step(costs.lengths[0])
        axes.plot(range(len(costs.verify)), [k * step for k in range(len(costs.verify))], "--", label="K draft steps")
    axes.set_xlabel("K")
    axes.set_ylabel("ms")
    axes.set_ylim(bottom=0)
    axes.legend(fontsize=8)


def _plot_acceptance(axes: Any, trace: Trace) -> None:
    reached: dict[str, dict[int, list[bool]]] = {source: {} for source in SOURCES}
    for request in trace.requests:
        for source, place, _, stood in request.judged():
            reached[source].setdefault(place, []).append(stood)
    for source, found in reached.items():
        if found:
            places = sorted(found)
            label = "model" if source == BLOCK else source
            axes.plot(places, [statistics.mean(found[place]) for place in places], marker="o", label=label)
    axes.set_xlabel("position in the block")
    axes.set_ylabel("accepted, where all before it are")
    axes.set_ylim(0, 1)
    axes.legend(fontsize=8)


def _plot_time(axes: Any, report: BenchReport, trace: Trace) -> None:
    """By output position, means over prompts in windows of 8 tokens."""
    window = 8
    for arm in (report.arm(AUTO), report.best_fixed()):
        found: dict[int, list[int]] = {}
        for played in _play(arm, report, trace):
            at = 0
            for committed in played.committed:
                found.setdefault(at // window, []).append(committed)
                at += committed
        places = sorted(found)
        axes.plot(
            [window * place for place in places], [statistics.mean(found[place]) for place in places], label=arm.name
        )
    axes.set_xlabel("output token")
    axes.set_ylabel("tokens a round")
    axes.set_ylim(bottom=1)
    axes.legend(fontsize=8)


def _plot_predicted(axes: Any, report: BenchReport, trace: Trace, predicted: dict[str, float]) -> None:
    for arm in report.arms[2:]:
        place = predicted[arm.name], measured(arm, report, trace)
        axes.plot(*place, "o", color="C3" if arm.k is None else "C0")
        axes.annotate(arm.name, place, fontsize=7)
    low, high = axes.get_xlim()
    axes.plot([low, high], [low, high], color="black", linewidth=0.8)
    axes.set_xlabel("predicted")
    axes.set_ylabel("measured")
