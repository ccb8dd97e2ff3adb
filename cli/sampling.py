"""The options that decide the text: one for each field of ``SamplingOptions``, under its name."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from outrider.engines.errors import OutriderError
from outrider.runtime.sampling.options import SamplingOptions

Command = Callable[..., Any]


def integers(what: str) -> Callable[[str], tuple[int, ...]]:
    """``2,4,8`` -> (2, 4, 8), the type of an option; ``what`` they are is said with an example."""

    def parse(value: str) -> tuple[int, ...]:
        try:
            return tuple(int(part) for part in value.split(","))
        except ValueError:
            raise click.BadParameter(f"{value!r} is not a list of {what}") from None

    return parse


def _bias(value: str) -> tuple[int, float]:
    try:
        token, _, bias = value.partition("=")
        return int(token), float(bias)
    except ValueError:
        raise click.BadParameter(f"{value!r} is not TOKEN_ID=NUMBER such as 17=-2.5") from None


def _text_or_file(value: str) -> str:
    """A text, or that of ``@FILE`` without its last line break; ``@@`` begins a text with ``@``."""
    if not value.startswith("@"):
        return value
    if value.startswith("@@"):
        return value[1:]
    try:
        return Path(value[1:]).read_text(encoding="utf-8").removesuffix("\n")
    except UnicodeDecodeError:
        raise OutriderError(f"{value[1:]} is not UTF-8 text") from None


_token_ids = integers("token ids such as 2,17")

_OPTIONS = [
    click.Option(["--max-new-tokens"], type=int, default=SamplingOptions.max_new_tokens, show_default=True),
    click.Option(["--min-new-tokens"], type=int, help="So many tokens before anything ends the answer."),
    click.Option(["--temperature"], type=float, help="0 is greedy, 1 the model's own distribution.  [default: greedy]"),
    click.Option(["--top-k"], type=int, help="The k most likely tokens."),
    click.Option(["--top-p"], type=float, help="The fewest most likely tokens with this mass, 0 to 1."),
    click.Option(["--min-p"], type=float, help="Tokens at least so many times as likely as the best."),
    click.Option(["--typical-p"], type=float, help="Tokens of typical information with this mass."),
    click.Option(["--seed"], type=int, help="Same seed, same text, whatever drafts.  [default: a fresh one]"),
    click.Option(["--repetition-penalty"], type=float, help="Above 1: tokens that occurred become less likely."),
    click.Option(["--presence-penalty"], type=float, help="Taken off the logit of each token that occurred."),
    click.Option(["--frequency-penalty"], type=float, help="The same, times how often it occurs."),
    click.Option(["--penalize-prompt/--no-penalize-prompt"], default=None, help="Whether penalties count the prompt."),
    click.Option(
        ["--logit-bias"],
        type=_bias,
        multiple=True,
        metavar="ID=NUMBER",
        help="Add to a token's logit; again and again.",
    ),
    click.Option(
        ["--bad-words"],
        multiple=True,
        metavar="TEXT",
        help="Not to be written, as spelt here; again and again.",
    ),
    click.Option(["--allowed-token-ids"], type=_token_ids, metavar="ID,ID,...", help="The only tokens that may occur."),
    click.Option(["--eos-token-id"], type=_token_ids, metavar="ID,ID,...", help="In place of the bundle's."),
    click.Option(["--ignore-eos"], is_flag=True, default=None, help="Go on behind an end of sequence."),
    click.Option(
        ["--stop-token-ids"], type=_token_ids, metavar="ID,ID,...", help="Further tokens that end the answer."
    ),
    click.Option(["--stop-strings"], multiple=True, metavar="TEXT", help="The answer ends before it; again and again."),
    click.Option(
        ["--json-schema"], type=_text_or_file, metavar="JSON|@FILE", help="The answer is JSON of this schema."
    ),
    click.Option(["--regex"], type=_text_or_file, metavar="REGEX|@FILE", help="The answer matches this expression."),
    click.Option(["--lark"], type=_text_or_file, metavar="LARK|@FILE", help="The answer follows this Lark grammar."),
    click.Option(
        ["--logprobs"], type=int, metavar="N", help="Log-probabilities of each token and the best N (--json)."
    ),
    click.Option(["--logprobs-mode"], type=click.Choice(["raw", "processed"]), help="Before or behind the filters."),
]


class SamplingArguments:
    """The options given on the command line; texts among them become token ids when the tokenizer is there."""

    def __init__(self, given: dict[str, Any]) -> None:
        self._bad_words: tuple[str, ...] = given.pop("bad_words")
        given["logit_bias"] = dict(given["logit_bias"])
        self._options = SamplingOptions.parse({name: value for name, value in given.items() if value is not None})

    def options(self, codec: Any) -> SamplingOptions:
        words = [ids for word in self._bad_words for ids in codec.word_ids(word)]
        return self._options.replace({"bad_words_ids": words} if words else {})

    @property
    def grammar(self) -> bool:
        return bool(self._options.grammar)

    @property
    def logprobs(self) -> bool:
        return self._options.logprobs is not None


def sampling(command: Command) -> Command:
    """Add the options to a command, which gets them as ``sampling``, checked but for what needs the bundle."""

    @functools.wraps(command)
    def collected(**arguments: Any) -> Any:
        given = {str(option.name): arguments.pop(str(option.name)) for option in _OPTIONS}
        return command(sampling=SamplingArguments(given), **arguments)

    # As `click.option` notes them: the last one first.
    collected.__click_params__ = [*getattr(command, "__click_params__", []), *reversed(_OPTIONS)]  # type: ignore[attr-defined]
    return collected
