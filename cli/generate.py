"""``outrider generate`` and ``outrider chat``"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import click

from outrider.cli import options
from outrider.engines.errors import OutriderError
from outrider.runtime import Generation, GenerationResult, Origin, Pipeline

_COLOURS = {Origin.ACCEPTED: "green", Origin.CORRECTION: "red", Origin.BONUS: "cyan", Origin.PLAIN: None}
_LEGEND = {origin: "accepted draft" if origin is Origin.ACCEPTED else origin.value for origin in Origin}


@click.command()
@click.argument("bundle", type=Path)
@click.option("--prompt", "-p", required=True, help="The text; - reads standard input.")
@click.option("--raw", is_flag=True, help="Continue the text as it is, without the chat template.")
@options.decoding
@options.as_json
def generate(
    bundle: Path,
    prompt: str,
    raw: bool,
    max_new_tokens: int,
    k: int | None,
    drafter: str | None,
    show_rounds: bool,
    threads: int | None,
    provider: str,
    as_json: bool,
) -> None:
    """Answer one prompt, streaming."""
    pipeline = Pipeline.load(bundle, threads=threads, provider=provider)
    text = options.standard_input().read() if prompt == "-" else prompt
    if not text:
        raise OutriderError("the prompt is empty; give at least one token of text")
    chat = not raw and pipeline.bundle.chat_template is not None
    running = pipeline.stream(
        [{"role": "user", "content": text}] if chat else text, max_new_tokens=max_new_tokens, k=k, drafter=drafter
    )
    if as_json:
        click.echo(json.dumps(running.result().as_dict()))
        return
    _show(running, show_rounds)
    result = running.result()
    click.echo()
    if show_rounds:
        used = [origin for origin in Origin if origin in result.origins]
        click.echo("[" + " ".join(click.style(_LEGEND[origin], fg=_COLOURS[origin]) for origin in used) + "]", err=True)
    click.echo(summary(result), err=True)


@click.command()
@click.argument("bundle", type=Path)
@options.decoding
def chat(
    bundle: Path,
    max_new_tokens: int,
    k: int | None,
    drafter: str | None,
    show_rounds: bool,
    threads: int | None,
    provider: str,
) -> None:
    """Talk to the target; an empty line or end of input leaves, Ctrl-C stops an answer."""
    pipeline = Pipeline.load(bundle, threads=threads, provider=provider)
    messages: list[dict[str, str]] = []
    read = _reader()
    while line := read():
        messages.append({"role": "user", "content": line})
        running = pipeline.stream(messages, max_new_tokens=max_new_tokens, k=k, drafter=drafter)
        shown = ""
        try:
            shown = _show(running, show_rounds)
        except KeyboardInterrupt:
            click.echo(" [stopped]", err=True, nl=False)
        click.echo()
        messages.append({"role": "assistant", "content": shown})


def summary(result: GenerationResult) -> str:
    """One line: how much, how fast, and what speculation brought."""
    stats = result.stats
    head = f"{stats.num_output_tokens} tokens ({result.finish_reason}), {stats.tokens_per_second:.1f} tokens/s"
    if not result.k:
        return f"{head}, plain decoding"
    return (
        f"{head}, {result.drafter} K={result.k}: {stats.mean_acceptance_length:.2f} tokens a verify "
        f"pass, {stats.num_accepted_draft_tokens} of {stats.num_draft_tokens} drafts accepted "
        f"({stats.draft_acceptance_rate:.0%}), exactness {result.exactness}"
    )


def _show(running: Generation, colour: bool) -> str:
    """Print the text as it comes; returns it."""
    shown = ""
    for token in running:
        click.echo(click.style(token.text, fg=_COLOURS[token.origin]) if colour else token.text, nl=False)
        shown += token.text
    return shown


def _reader() -> Callable[[], str]:
    """Lines from a person (with a prompt sign) or from a pipe; "" at the end."""

    stdin = options.standard_input()

    def read() -> str:
        if stdin.isatty():
            click.echo("> ", nl=False)
        return stdin.readline().strip()

    return read
