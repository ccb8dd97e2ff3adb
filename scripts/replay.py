#!/usr/bin/env python3
"""Replay recorded rounds: the controller beside every fixed K, and beside one who knows which drafts stand.

    replay.py TRACE [TRACE ...] [--drafter cascade]

A trace is written by `outrider bench --trace`. No model runs, and times are the trace's own: what two versions of the
controller differ by is theirs alone. Figures are speed-ups over exact plain decoding, by category; the last line makes
every draft wrong, which no controller knows beforehand.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import click

from outrider.engines.errors import OutriderError
from outrider.runtime.controller import Controller
from outrider.runtime.replay import ASKED, oracle_seconds, replay, replay_fixed
from outrider.runtime.trace import Trace, Traced, TracedRequest, count_priors, read_trace


@click.command()
@click.argument("traces", nargs=-1, required=True, type=Path)
@click.option("--drafter", type=click.Choice(list(ASKED)), default="cascade", show_default=True)
def main(traces: tuple[Path, ...], drafter: str) -> None:
    for path in traces:
        try:
            trace = read_trace(path)
        except OutriderError as error:
            raise click.ClickException(str(error)) from None
        categories = sorted({request.category for request in trace.requests})
        click.echo(f"{path}: {len(trace.requests)} requests, {trace.device}")
        click.echo(" " * 16 + "".join(f"{name:>11}" for name in ["all", *categories]))
        for name, seconds in rows(trace, drafter).items():
            figures = [speed_up(trace, seconds, category) for category in [None, *categories]]
            click.echo(f"{name:16}" + "".join(f"{figure:11.2f}" for figure in figures))


def rows(trace: Trace, drafter: str) -> dict[str, list[float]]:
    """Seconds of each request, by who chooses."""
    costs, requests = trace.costs, trace.requests
    found: dict[str, list[float]] = {"oracle": [oracle_seconds(request, costs) for request in requests]}
    play: Callable[[Controller], list[float]] = lambda one: [replay(each, one, drafter).seconds for each in requests]  # noqa: E731
    found["auto"] = play(Controller(costs))
    found["auto, own priors"] = play(Controller(costs, count_priors(requests)))
    for k in range(1, costs.largest_k + 1):
        found[f"{drafter}, K={k}"] = [replay_fixed(each, costs, drafter, k).seconds for each in requests]
    wrong = Controller(costs)
    found["auto, all wrong"] = [replay(refuse(each), wrong, drafter).seconds for each in requests]
    return found


def refuse(request: TracedRequest) -> TracedRequest:
    """The same request with drafts of which none stands."""
    positions = [{name: Traced(found.evidence, 0) for name, found in entry.items()} for entry in request.positions]
    return replace(request, positions=positions)


def speed_up(trace: Trace, seconds: list[float], category: str | None) -> float:
    chosen = [index for index, each in enumerate(trace.requests) if category in (None, each.category)]
    plain = sum(replay_fixed(trace.requests[index], trace.costs, "none", 0).seconds for index in chosen)
    return plain / sum(seconds[index] for index in chosen)


if __name__ == "__main__":
    main()
