"""Options that several commands share."""

from __future__ import annotations

import io
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial, wraps
from pathlib import Path
from typing import Any, TextIO

import click

from outrider.cli.sampling import integers
from outrider.cli.sampling import sampling as sampling
from outrider.engines.errors import OutriderError
from outrider.engines.open import PROVIDERS
from outrider.runtime import Pipeline
from outrider.runtime.accept import RULES
from outrider.runtime.generate import DRAFTERS

Decorator = Callable[[Callable[..., Any]], Callable[..., Any]]
_SHARES = 1000  # that a bar tells apart
Load = Callable[[Path], Pipeline]


def progress_bar(length: int, label: str) -> Any:
    """On standard error, for a person: a log or another program gets no bar."""
    hidden = not sys.stderr.isatty()
    return click.progressbar(
        length=length, label=label, item_show_func=lambda item: item or "", file=sys.stderr, hidden=hidden
    )


@contextmanager
def share_bar(label: str) -> Iterator[Callable[[str, float], None]]:
    """A progress bar that is told what is being done, and the share of the whole that is."""
    with progress_bar(_SHARES, label) as bar:

        def show(stage: str, share: float) -> None:
            bar.update(max(0, int(_SHARES * share) - bar.pos), stage)

        yield show


@contextmanager
def extras(names: str) -> Iterator[None]:
    """Imports of what only some installations have; an OutriderError says which extras bring it."""
    try:
        yield
    except ImportError as error:
        raise OutriderError(f"{error.name} is not installed; run `pip install 'outrider[{names}]'`") from None


def standard_input() -> TextIO:
    """Bytes that are not text come through as they are, and are named where the prompt is encoded."""
    if isinstance(sys.stdin, io.TextIOWrapper):
        sys.stdin.reconfigure(errors="surrogateescape")
    return sys.stdin


def tensor_precision(value: str) -> dict[str, str]:
    """``PATTERN=PRECISION,...``, the type of an option."""
    parts = [part.strip().rpartition("=") for part in value.split(",")] if value else []
    for pattern, _, precision in parts:
        if not pattern or not precision:
            raise click.BadParameter(f"{value!r} is not PATTERN=PRECISION,... such as *.down_proj=int8")
    return {pattern: precision for pattern, _, precision in parts}


tiers = integers("whole numbers such as 2,4,8")
threads: Decorator = click.option(
    "--threads", type=click.IntRange(min=1), help="Threads of each engine.  [default: all processors]"
)
as_json: Decorator = click.option("--json", "as_json", is_flag=True, help="Print JSON for machines.")
drafter: Decorator = click.option(
    "--drafter",
    type=click.Choice(DRAFTERS),
    help="Who drafts.  [default: cascade if there is a draft model, else ngram]",
)


def _draft_tokens(value: str | int) -> int | None:
    try:
        return None if value == AUTO else int(value)
    except ValueError:
        raise click.BadParameter(f"{value!r} is no whole number, and not {AUTO}") from None


AUTO = "auto"
k: Decorator = click.option(
    "--k",
    type=_draft_tokens,
    default=AUTO,
    show_default=True,
    metavar="K",
    help="Draft tokens a round; 0 is plain decoding, auto has it chosen in each round.",
)
acceptance: Decorator = click.option(
    "--acceptance",
    type=click.Choice(list(RULES)),
    default="exact",
    show_default=True,
    help="Which drafts stand: exact gives plain decoding's own text, residual and block another of the same law.",
)
show_rounds: Decorator = click.option(
    "--show-rounds", is_flag=True, help="Colour the text by where each token came from, and say what was chosen."
)


def loading(command: Callable[..., Any]) -> Callable[..., Any]:
    """The options of every command that loads a bundle; it gets ``load``, which takes the bundle's folder."""

    @wraps(command)
    def given(*args: Any, provider: str, draft_provider: str | None, threads: int | None, **rest: Any) -> Any:
        load = partial(Pipeline.load, provider=provider, draft_provider=draft_provider, threads=threads)
        return command(*args, load=load, **rest)

    with_load: Callable[..., Any] = given
    providers = click.Choice(PROVIDERS)
    for option in (
        click.option("--draft-provider", type=providers, help="What runs the draft.  [default: the same]"),
        click.option("--provider", type=providers, default="cpu", show_default=True, help="What runs the models."),
        threads,
    ):
        with_load = option(with_load)
    return with_load


def decoding(command: Callable[..., Any]) -> Callable[..., Any]:
    """The options of every command that generates text."""
    for option in (loading, show_rounds, acceptance, drafter, k, sampling):
        command = option(command)
    return command
