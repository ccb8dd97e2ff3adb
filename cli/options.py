"""Options that several commands share."""

from __future__ import annotations

import io
import sys
from collections.abc import Callable
from typing import Any, TextIO

import click

from outrider.cli.sampling import integers
from outrider.cli.sampling import sampling as sampling
from outrider.runtime.accept import RULES
from outrider.runtime.generate import DRAFTERS

Decorator = Callable[[Callable[..., Any]], Callable[..., Any]]


def progress_bar(length: int, label: str) -> Any:
    """On standard error, for a person: a log or another program gets no bar."""
    hidden = not sys.stderr.isatty()
    return click.progressbar(
        length=length, label=label, item_show_func=lambda item: item or "", file=sys.stderr, hidden=hidden
    )


def standard_input() -> TextIO:
    """Bytes that are not text come through as they are, and are named where the prompt is encoded."""
    if isinstance(sys.stdin, io.TextIOWrapper):
        sys.stdin.reconfigure(errors="surrogateescape")
    return sys.stdin


tiers = integers("whole numbers such as 2,4,8")
threads: Decorator = click.option(
    "--threads", type=click.IntRange(min=1), help="Threads of each engine.  [default: all processors]"
)
as_json: Decorator = click.option("--json", "as_json", is_flag=True, help="Print JSON for machines.")
drafter: Decorator = click.option(
    "--drafter",
    type=click.Choice(DRAFTERS),
    help="Who drafts.  [default: the draft model if there is one]",
)
k: Decorator = click.option(
    "--k", type=int, help="Draft tokens a round; 0 is plain decoding.  [default: the middle tier]"
)
acceptance: Decorator = click.option(
    "--acceptance",
    type=click.Choice(list(RULES)),
    default="exact",
    show_default=True,
    help="Which drafts stand: exact gives plain decoding's own text, residual and block another of the same law.",
)
provider: Decorator = click.option("--provider", type=click.Choice(["cpu", "cuda"]), default="cpu", show_default=True)
show_rounds: Decorator = click.option(
    "--show-rounds", is_flag=True, help="Colour the text by where each token came from."
)


def decoding(command: Callable[..., Any]) -> Callable[..., Any]:
    """The options of every command that generates text."""
    for option in (provider, threads, show_rounds, acceptance, drafter, k, sampling):
        command = option(command)
    return command
