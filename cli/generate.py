"""``outrider generate`` and ``outrider chat``"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import click

from outrider.cli import options
from outrider.cli.sampling import SamplingArguments
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
    sampling: SamplingArguments,
    k: int | None,
    drafter: str | None,
    acceptance: str,
    show_rounds: bool,
    load: options.Load,
    as_json: bool,
) -> None:
    """Answer one prompt, streaming."""
    if sampling.logprobs and not as_json:
        raise OutriderError("log-probabilities are printed with --json only; add it, or leave --logprobs out")
    pipeline = load(bundle)
    text = options.standard_input().read() if prompt == "-" else prompt
    if not text:
        raise OutriderError("the prompt is empty; give at least one token of text")
    running = pipeline.stream(
        text if raw else pipeline.codec.turn(text),
        sampling.options(pipeline.codec),
        k=k,
        drafter=drafter,
        acceptance=acceptance,
    )
    if as_json:
        click.echo(json.dumps(running.result().as_dict()))
        return
    _show(running, show_rounds)
    result = running.result()
    click.echo()
    if result.finish_reason == "length" and sampling.grammar:
        click.echo("[cut off before the grammar was complete: raise --max-new-tokens]", err=True)
    if show_rounds:
        used = [origin for origin in Origin if origin in result.origins]
        names = (click.style(_LEGEND[origin], fg=_COLOURS[origin]) for origin in used)
        click.echo(f"[colours: {', '.join(names)}]", err=True)
        for line in choices(result):
            click.echo(line, err=True)
    click.echo(summary(result), err=True)
    if result.tuning and not result.tuning.startswith("tuned"):
        click.echo(f"[K chosen by figures {result.tuning}]", err=True)


@click.command()
@click.argument("bundle", type=Path)
@options.decoding
def chat(
    bundle: Path,
    sampling: SamplingArguments,
    k: int | None,
    drafter: str | None,
    acceptance: str,
    show_rounds: bool,
    load: options.Load,
) -> None:
    """Talk to the target; an empty line or end of input leaves, Ctrl-C stops an answer."""
    if sampling.logprobs:
        raise OutriderError("chat prints no log-probabilities; use `outrider generate --json`")
    pipeline = load(bundle)
    settings = sampling.options(pipeline.codec)
    messages: list[dict[str, str]] = []
    read = _reader()
    while line := read():
        messages = _shortened(pipeline, [*messages, {"role": "user", "content": line}], settings.max_new_tokens)
        running = pipeline.stream(messages, settings, k=k, drafter=drafter, acceptance=acceptance)
        try:
            shown = _show(running, show_rounds)
            if running.result().finish_reason == "length":
                click.echo(" [cut off: --max-new-tokens, or the context is full]", err=True, nl=False)
        except KeyboardInterrupt:
            running.cancel()
            shown = running.result().text
            click.echo(" [stopped]", err=True, nl=False)
        click.echo()
        messages.append({"role": "assistant", "content": shown})


def _shortened(pipeline: Pipeline, messages: list[dict[str, str]], max_new_tokens: int) -> list[dict[str, str]]:
    """Without the oldest turns that leave no room for an answer."""
    room = max(1, pipeline.manifest.max_length - max_new_tokens)
    kept = messages
    while len(kept) > 2 and len(pipeline.codec.encode(kept)) > room:
        kept = kept[2:]
    if len(kept) < len(messages):
        click.echo(f"[the context is full: the oldest {len(messages) - len(kept)} messages are forgotten]", err=True)
    return kept


def summary(result: GenerationResult) -> str:
    """One line: how much, how fast, and what speculation brought."""
    stats = result.stats
    seed = "" if result.seed is None else f", seed {result.seed}"
    head = f"{stats.num_output_tokens} tokens ({result.finish_reason}){seed}"
    if not stats.num_spec_steps:
        return head
    head = f"{head}, {stats.tokens_per_second:.1f} tokens/s"
    if result.k == 0:
        return f"{head}, plain decoding"
    rule = "" if result.acceptance == "exact" else f" {result.acceptance}"
    translated = " (translated)" if result.translated else ""
    k = options.AUTO if result.k is None else result.k
    return (
        f"{head}, {result.drafter}{translated} K={k}{rule}: {stats.mean_acceptance_length:.2f} tokens a verify "
        f"pass, {stats.num_accepted_draft_tokens} of {stats.num_draft_tokens} drafts accepted "
        f"({stats.draft_acceptance_rate:.0%}), exactness {result.exactness}"
    )


def choices(result: GenerationResult) -> list[str]:
    """A line for each source of drafts: how often it was chosen, with how many, and what was expected."""
    lines = []
    for source, stats in result.stats.sources.items():
        mean = sum(k * rounds for k, rounds in stats.rounds_by_k.items()) / stats.rounds
        tokens, milliseconds = stats.expected_tokens / stats.rounds, 1e3 * stats.expected_seconds / stats.rounds
        lines.append(
            f"[{source}: {stats.rounds} rounds, K = {mean:.1f}; {tokens:.2f} tokens in {milliseconds:.1f} ms expected, "
            f"{stats.tokens / stats.rounds:.2f} came; {stats.drafted} tokens drafted by the model]"
        )
    return lines


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
