"""The promise: a request gives the same ids, log-probabilities, end and streamed text, whatever K and whoever drafts.

Random requests over all fields of ``SamplingOptions``, on a real model and on a tiny one; seeds; the other rules.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, note, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from refusals import cli

from outrider.runtime import OutriderError, Pipeline, SamplingOptions
from outrider.runtime.accept import Draft
from outrider.runtime.choose import TokenLogprobs
from outrider.runtime.drafters import Drafter, Draw
from outrider.runtime.sampling.history import History
from outrider.runtime.stats import DecodeStats

Logits = NDArray[np.float32]
Prompt = str | list[dict[str, str]]

TIERS = (1, 2, 4, 8)
PROMPTS: dict[str, Prompt] = {
    "prose": "The harbour town was built around a single stone pier. For two hundred years its people fished for",
    "code": "def clamp(value, low, high):\n    if value < low:\n        return low\n    if value > high:\n        return",
    "list": '[{"name": "Maria", "age": 34}, {"name": "Tomas", "age": 29}, {"name": "Ines", "age": 41}, {"name": "',
    "repetition": "one two three four, one two three four, one two three four, one two",
    "chat": [{"role": "user", "content": "Give me three tips for sleeping better."}],
}
GRAMMARS: list[dict[str, Any]] = [
    {"regex": "(yes|no|maybe)"},
    {"regex": r"[a-z ]{1,30}\."},
    {"regex": "[äöü]{1,9}"},  # characters of two tokens
    {"regex": r"\d+(\.\d{1,3})?"},
    {"json_schema": {"enum": ["red", "green", "dark blue"]}},
    {"json_schema": {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}},
    {"lark": 'start: "(" start ")" | "x" start | "."'},
]
SCALES = st.sampled_from([-100.0, -1.0, 0.5, 3.0, 100.0]) | st.floats(-5, 5)


def forbid_last(tokens: Sequence[int], logits: Logits) -> Logits:
    """In place: no token twice in a row."""
    logits[tokens[-1]] = -np.inf
    return logits


def prefer_by_length(tokens: Sequence[int], logits: Logits) -> Logits:
    """A new array: a band of ids that moves with every token."""
    return logits + 4 * (np.arange(len(logits)) % 7 == len(tokens) % 7).astype(np.float32)


class Scripted:
    """Proposes what plain decoding is known to give, but for wrong tokens at the positions that ``wrong`` names.

    Behind the known end it goes on, as a drafter would that does not know of it.
    """

    passes = 0
    seconds = 0.0

    def __init__(self, tokens: Sequence[int], vocab_size: int, wrong: Callable[[int], bool]) -> None:
        self.tokens = tokens
        self.vocab_size = vocab_size
        self.wrong = wrong

    def begin(self) -> None:
        pass

    def propose(self, history: History, k: int, draw: Draw) -> Sequence[Draft]:
        first = history.output_length
        known = [*self.tokens[first : first + k], *[history.tokens[-1]] * k][:k]
        return [
            Draft((token + 1) % self.vocab_size if self.wrong(first + index) else token)
            for index, token in enumerate(known)
        ]


@contextmanager
def drafting(pipeline: Pipeline, drafter: Drafter | None) -> Iterator[None]:
    """``drafter`` in the place of the n-gram drafter."""
    with pytest.MonkeyPatch.context() as patch:
        if drafter is not None:
            patch.setitem(pipeline._drafters, "ngram", drafter)
        yield


@dataclass(frozen=True)
class Outcome:
    """All that a request gives; of a request that fails, what was streamed before and the message."""

    tokens: list[int]
    pieces: list[str]
    logprobs: list[TokenLogprobs | None]
    text: str = ""
    finish_reason: str = ""
    seed: int | None = None
    error: str = ""


def outcome(
    pipeline: Pipeline, prompt: Prompt, options: SamplingOptions, drafter: str, k: int, **more: Any
) -> tuple[Outcome, DecodeStats]:
    streamed = []
    try:
        running = pipeline.stream(prompt, options, drafter=drafter, k=k, **more)
        for token in running:
            streamed.append(token)
        result = running.result()
    except OutriderError as error:
        message, result = str(error), None
    tokens = [token.token_id for token in streamed]
    pieces = [token.text for token in streamed]
    logprobs = [token.logprobs for token in streamed]
    if result is None:
        return Outcome(tokens, pieces, logprobs, error=message), DecodeStats()
    assert result.token_ids == tokens
    assert result.text == "".join(pieces)
    assert result.logprobs == (None if options.logprobs is None else logprobs)
    assert result.stats.num_output_tokens == len(tokens)
    assert (result.drafter, result.k) == ((drafter, k) if k else ("none", 0))
    return Outcome(tokens, pieces, logprobs, result.text, result.finish_reason, result.seed), result.stats


def chance(draw: st.DrawFn, one_in: int) -> bool:
    return draw(st.integers(1, one_in)) == one_in


@st.composite
def option_sets(
    draw: st.DrawFn, vocab_size: int, likely: Sequence[int], budgets: st.SearchStrategy[int]
) -> dict[str, Any]:
    """Any options but those that end a request; ``likely`` are tokens that plain decoding may meet."""
    tokens = st.sampled_from(likely)
    options: dict[str, Any] = {"max_new_tokens": draw(budgets)}
    if chance(draw, 4):
        options["min_new_tokens"] = draw(st.integers(0, options["max_new_tokens"]))
    if chance(draw, 4):
        options["temperature"] = draw(st.sampled_from([None, 0, 1e-6]))
    else:
        options["temperature"] = draw(st.floats(0.3, 1.5))
    if options["temperature"] is not None:
        options["seed"] = draw(st.integers(0, 2**64 - 1))
        filters: dict[str, st.SearchStrategy[Any]] = {
            "top_k": st.sampled_from([1, 2, 3, 40, vocab_size, 10**9]),
            "top_p": st.floats(0, 1, exclude_min=True),
            "min_p": st.floats(0, 1),
            "typical_p": st.floats(0, 1, exclude_min=True),
        }
        options |= {name: draw(values) for name, values in filters.items() if chance(draw, 4)}
    changes: dict[str, st.SearchStrategy[Any]] = {
        "repetition_penalty": st.sampled_from([0.8, 1.1, 1.5, 3.0]),
        "presence_penalty": SCALES,
        "frequency_penalty": SCALES,
        "logit_bias": st.dictionaries(tokens, SCALES, min_size=1, max_size=4),
        "bad_words_ids": st.lists(st.lists(tokens, min_size=1, max_size=3), min_size=1, max_size=3),
        "ignore_eos": st.just(True),
        "processors": st.lists(st.sampled_from([forbid_last, prefer_by_length]), min_size=1, max_size=2),
    }
    options |= {name: draw(values) for name, values in changes.items() if chance(draw, 5)}
    options["penalize_prompt"] = draw(st.sampled_from([None, None, True, False]))
    if chance(draw, 8):
        every = st.integers(1, 3).map(lambda step: range(0, vocab_size, step))
        options["allowed_token_ids"] = draw(every | st.sets(tokens, min_size=1, max_size=20).map(sorted))
    if chance(draw, 5):
        options |= draw(st.sampled_from(GRAMMARS))
    if chance(draw, 2):
        options["logprobs"] = draw(st.integers(0, 5))
        options["logprobs_mode"] = draw(st.sampled_from(["raw", "processed"]))
    return options


@st.composite
def endings(draw: st.DrawFn, found: Outcome) -> dict[str, Any]:
    """Options that end the request which gave ``found`` somewhere inside, as long as they do not change it before."""
    tokens = st.sampled_from(found.tokens)
    ends: dict[str, Any] = {}
    if chance(draw, 3):
        ends["eos_token_id"] = draw(tokens | st.lists(tokens, max_size=2))
    if chance(draw, 4):
        ends["stop_token_ids"] = draw(st.lists(tokens, min_size=1, max_size=2))
    if chance(draw, 3):
        stops = st.sampled_from([" the", "e", ".\n", ",", '"', "\n"])
        if found.text:
            starts = st.integers(0, len(found.text) - 1)
            stops |= st.builds(lambda start, size: found.text[start : start + size], starts, st.integers(1, 9))
        ends["stop_strings"] = draw(st.lists(stops, min_size=1, max_size=3))
    return ends


def test_the_strategies_know_every_option() -> None:
    """An option that is added to ``SamplingOptions`` must be added above, or the promise is not tested for it."""
    seen: set[str] = set()
    found = Outcome([1, 2], ["a", "b"], [None, None], "ab", "length")

    @settings(max_examples=300, derandomize=True, database=None)
    @given(options=option_sets(320, [1, 2, 3], st.integers(0, 9)), ends=endings(found))
    def draw(options: dict[str, Any], ends: dict[str, Any]) -> None:
        SamplingOptions(**options, **ends)
        seen.update(options, ends)

    draw()
    assert seen == {field.name for field in fields(SamplingOptions)}


def likely_tokens(pipeline: Pipeline, prompt: Prompt) -> list[int]:
    """Those of the prompt and of its greedy continuation."""
    tokens = pipeline.generate(prompt, k=0, max_new_tokens=12, ignore_eos=True).token_ids
    return sorted({*pipeline.encode(prompt), *tokens})


def check_every_option(
    pipeline: Pipeline, prompts: dict[str, Prompt], budgets: st.SearchStrategy[int], examples: int
) -> dict[str, DecodeStats]:
    """Random requests, each by every drafter at every K; returns what each drafter proposed in all."""
    vocab_size = pipeline.manifest.target.vocab_size
    requests = {
        name: option_sets(vocab_size, likely_tokens(pipeline, prompt), budgets) for name, prompt in prompts.items()
    }
    totals = {name: DecodeStats() for name in ("ngram", "model", "always wrong", "sometimes wrong")}
    reasons: list[str] = []

    @settings(
        max_examples=examples,
        derandomize=True,
        deadline=None,
        database=None,
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
    )
    @given(data=st.data())
    def check(data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(list(prompts)), label="prompt")
        prompt = prompts[name]
        options = SamplingOptions(**data.draw(requests[name], label="options"))
        plain, _ = outcome(pipeline, prompt, options, "none", 0)
        if plain.tokens and not plain.error:
            options = options.replace(data.draw(endings(plain), label="ends"))
            plain, _ = outcome(pipeline, prompt, options, "none", 0)
        reasons.append(plain.finish_reason)
        wrong = data.draw(st.sets(st.integers(0, max(1, len(plain.tokens)))), label="wrong")
        scripts: dict[str, Scripted | None] = {
            "ngram": None,
            "model": None,
            "always wrong": Scripted(plain.tokens, vocab_size, lambda position: True),
            "sometimes wrong": Scripted(plain.tokens, vocab_size, lambda position: position in wrong),
        }
        for drafter, script in scripts.items():
            for k in TIERS:
                note(f"{drafter}, K = {k}")
                with drafting(pipeline, script):
                    found, stats = outcome(pipeline, prompt, options, "ngram" if script else drafter, k)
                assert found == plain
                totals[drafter].add(stats)

    check()
    assert set(reasons) == {"eos", "stop", "grammar", "length", ""}, "an end, or failure, that no request came to"
    return totals


def assert_drafts_of_both_kinds(totals: dict[str, DecodeStats]) -> None:
    """A run in which nothing is accepted, or nothing refused, shows nothing."""
    for name, stats in totals.items():
        assert stats.num_accepted_draft_tokens < stats.num_draft_tokens, name
        assert (stats.num_accepted_draft_tokens > 0) == (name != "always wrong"), name


def test_every_option_on_a_real_model(smollm2_pair: Pipeline) -> None:
    budgets = st.integers(3, 8) | st.integers(0, 2)
    assert_drafts_of_both_kinds(check_every_option(smollm2_pair, PROMPTS, budgets, examples=200))


def test_every_option_on_a_tiny_model(tiny_pipeline: Pipeline) -> None:
    """More of them, and longer: logits near each other, text of half characters, many ends."""
    prompts = {name: PROMPTS[name] for name in ("repetition", "chat")} | {"short": "a", "code": "def add(a, b):"}
    budgets = st.integers(1, 60)
    assert_drafts_of_both_kinds(check_every_option(tiny_pipeline, prompts, budgets, examples=400))
