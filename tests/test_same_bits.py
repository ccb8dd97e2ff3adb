"""The promise: a request gives the same ids, log-probabilities, end and streamed text, whatever K and whoever drafts.

Random requests over all fields of ``SamplingOptions``, on a real model and on a tiny one; seeds; the other rules.
"""

from __future__ import annotations

import re
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
from outrider.runtime.controller import LOOKUP
from outrider.runtime.drafters import Drafter, Draw
from outrider.runtime.drafters.adaptive import Lookups, Proposal
from outrider.runtime.drafters.ngram import LONGEST_MATCH
from outrider.runtime.sampling.history import History
from outrider.runtime.sampling.options import Processor
from outrider.runtime.stats import DecodeStats

Logits = NDArray[np.float32]
Prompt = str | list[dict[str, str]]

TIERS = (1, 2, 4, 8)
PROMPTS: dict[str, Prompt] = {
    "prose": "The harbour town was built around a single stone pier. For two hundred years its people fished for",
    "code": "def clamp(value, low, high):\n    if value < low:\n        return low\n    if value > high:\n",
    "list": '[{"name": "Maria", "age": 34}, {"name": "Tomas", "age": 29}, {"name": "Ines", "age": 41}, {"name": "',
    "repetition": "one two three four, one two three four, one two three four, one two",
    "chat": [{"role": "user", "content": "Give me three tips for sleeping better."}],
}
SHORT_PROMPTS = {name: PROMPTS[name] for name in ("repetition", "chat")} | {"word": "a", "code": "def add(a, b):"}
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


class Scripted(Drafter):
    """Proposes what plain decoding is known to give, but for wrong tokens at the positions that ``wrong`` names.

    Behind the known end it goes on, as a drafter would that does not know of it.
    """

    def __init__(self, tokens: Sequence[int], vocab_size: int, wrong: Callable[[int], bool]) -> None:
        self.tokens = tokens
        self.vocab_size = vocab_size
        self.wrong = wrong

    def propose(self, history: History, k: int, draw: Draw) -> Sequence[Draft]:
        first = history.output_length
        known = [*self.tokens[first : first + k], *[history.tokens[-1]] * k][:k]
        return [
            Draft((token + 1) % self.vocab_size if self.wrong(first + index) else token)
            for index, token in enumerate(known)
        ]


class ScriptedLookups(Lookups):
    """The same for a controller, which is told that they are likely to stand."""

    def __init__(self, drafter: Drafter) -> None:
        super().__init__(None)
        self._drafter = drafter

    def propose(self, history: History, k: int) -> dict[str, Proposal]:
        tokens = [draft.token for draft in self._drafter.propose(history, k, lambda row: Draft(0))]
        return {LOOKUP: Proposal(tokens, [LONGEST_MATCH] * len(tokens))}


@contextmanager
def drafting(pipeline: Pipeline, drafter: Drafter | None) -> Iterator[None]:
    """``drafter`` in the place of the n-gram drafter."""
    with pytest.MonkeyPatch.context() as patch:
        if drafter is not None:
            patch.setattr(pipeline.roster, "ngram", drafter)
            patch.setattr(pipeline.roster, "lookups", ScriptedLookups(drafter))
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
    pipeline: Pipeline, prompt: Prompt, options: SamplingOptions, drafter: str, k: int | None, **more: Any
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
    assert (result.drafter, result.k) == (("none", 0) if k == 0 else (drafter, k))
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
        every = st.integers(2, 20).map(lambda step: range(0, vocab_size, step))
        options["allowed_token_ids"] = draw(every | st.sets(tokens, min_size=1, max_size=20).map(sorted))
    if chance(draw, 4):
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

    @settings(max_examples=1500, derandomize=True, database=None)
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
    pipeline: Pipeline,
    prompts: dict[str, Prompt],
    budgets: st.SearchStrategy[int],
    examples: int,
    tiers: Sequence[int] = TIERS,
) -> dict[str, DecodeStats]:
    """Random requests, each by every drafter at every K; returns what each drafter proposed in all."""
    vocab_size = pipeline.manifest.target.vocab_size
    requests = {
        name: option_sets(vocab_size, likely_tokens(pipeline, prompt), budgets) for name, prompt in prompts.items()
    }
    totals = {name: DecodeStats() for name in ("ngram", "model", "cascade", "always wrong", "sometimes wrong")}
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
            "cascade": None,
            "always wrong": Scripted(plain.tokens, vocab_size, lambda position: True),
            "sometimes wrong": Scripted(plain.tokens, vocab_size, lambda position: position in wrong),
        }
        for drafter, script in scripts.items():
            for k in (None,) if drafter == "cascade" else (*tiers, None):
                note(f"{drafter}, K = {k}")
                with drafting(pipeline, script):
                    found, stats = outcome(pipeline, prompt, options, "ngram" if script else drafter, k)
                assert found == plain
                totals[drafter].add(stats)

    check()
    assert {"eos", "stop", "grammar", "length"} <= set(reasons), "an end that no request came to"
    return totals


def assert_drafts_of_both_kinds(totals: dict[str, DecodeStats]) -> None:
    """A run in which nothing is accepted, or nothing refused, shows nothing."""
    for name, stats in totals.items():
        assert stats.num_accepted_draft_tokens < stats.num_draft_tokens, name
        assert (stats.num_accepted_draft_tokens > 0) == (name != "always wrong"), name


def test_every_option_on_a_real_model(smollm2_pair: Pipeline) -> None:
    budgets = st.sampled_from([1, 2, 4, 8, 12])
    assert_drafts_of_both_kinds(check_every_option(smollm2_pair, PROMPTS, budgets, examples=20, tiers=(1, 8)))


def test_every_option_on_a_tiny_model(tiny_pipeline: Pipeline) -> None:
    """More of them, and longer: logits near each other, text of half characters, many ends."""
    assert_drafts_of_both_kinds(check_every_option(tiny_pipeline, SHORT_PROMPTS, st.integers(0, 60), examples=100))


FOX = "the quick brown fox"


def perfect(pipeline: Pipeline, tokens: Sequence[int]) -> Scripted:
    return Scripted(tokens, pipeline.manifest.target.vocab_size, lambda position: False)


def off_the_path(prompt: Sequence[int], tokens: Sequence[int], fail: Callable[[Logits], Logits]) -> Processor:
    """A processor that fails for every text but the beginnings of ``prompt`` and ``tokens``."""
    whole = (*prompt, *tokens)
    return lambda text, logits: logits if text == whole[: len(text)] else fail(logits)


def forbid_all(logits: Logits) -> Logits:
    return np.full_like(logits, -np.inf)


def raise_an_error(logits: Logits) -> Logits:
    raise ValueError("no such text")


@pytest.mark.parametrize("fail", [forbid_all, raise_an_error])
@pytest.mark.parametrize("k", TIERS)
def test_a_draft_that_ends_up_where_nothing_is_allowed(
    tiny_pipeline: Pipeline, k: int, fail: Callable[[Logits], Logits]
) -> None:
    """The target never goes there, so it is no failure of the request."""
    plain = tiny_pipeline.generate(FOX, k=0, max_new_tokens=30)
    processor = off_the_path(tiny_pipeline.encode(FOX), plain.token_ids, fail)
    options = SamplingOptions(max_new_tokens=30, processors=[processor])
    found, stats = outcome(tiny_pipeline, FOX, options, "model", k)
    assert (found.error, found.tokens) == ("", plain.token_ids)
    assert stats.num_accepted_draft_tokens < stats.num_draft_tokens


def test_a_draft_that_goes_on_behind_a_stop_string(tiny_pipeline: Pipeline) -> None:
    """It does not know of the end, and nothing is allowed behind it."""
    plain = tiny_pipeline.generate(FOX, k=0, max_new_tokens=5)  # whole characters
    processor = off_the_path(tiny_pipeline.encode(FOX), plain.token_ids[:-1], forbid_all)
    options = SamplingOptions(processors=[processor], stop_strings=[plain.text[-2:]])
    expected, _ = outcome(tiny_pipeline, FOX, options, "none", 0)
    assert expected.finish_reason == "stop"
    for drafter, script in {"model": None, "ngram": None, "perfect": perfect(tiny_pipeline, plain.token_ids)}.items():
        with drafting(tiny_pipeline, script):
            assert outcome(tiny_pipeline, FOX, options, "ngram" if script else drafter, 8)[0] == expected


@pytest.mark.parametrize("fail", [forbid_all, raise_an_error])
@pytest.mark.parametrize("k", [0, *TIERS])
def test_tokens_before_a_failure_are_streamed(
    tiny_pipeline: Pipeline, k: int, fail: Callable[[Logits], Logits]
) -> None:
    """As in plain decoding, also those of the round that fails."""
    plain = tiny_pipeline.generate(FOX, k=0, max_new_tokens=6)
    # One draft more than there are tokens, so that the row behind the last one is looked at.
    drafter = Scripted([*plain.token_ids, 0], tiny_pipeline.manifest.target.vocab_size, lambda position: False)
    processor = off_the_path(tiny_pipeline.encode(FOX), plain.token_ids[:-1], fail)
    streamed = []
    with drafting(tiny_pipeline, drafter), pytest.raises((OutriderError, ValueError), match="no "):
        for token in tiny_pipeline.stream(FOX, max_new_tokens=30, processors=[processor], k=k, drafter="ngram"):
            streamed.append(token.token_id)
    assert streamed == plain.token_ids


@pytest.mark.parametrize("k", TIERS)
def test_processors_that_keep_their_array(tiny_pipeline: Pipeline, k: int) -> None:
    """What the next one does in place is not done to it: verify rows and drafts call them more often than steps do."""
    kept = np.linspace(0, 1, tiny_pipeline.manifest.target.vocab_size, dtype=np.float32)

    def lower_the_best(tokens: Sequence[int], logits: Logits) -> Logits:
        logits[logits.argmax()] -= 0.5
        return logits

    options = SamplingOptions(max_new_tokens=20, processors=[lambda tokens, logits: kept.copy(), lower_the_best])
    expected, _ = outcome(tiny_pipeline, FOX, options, "none", 0)
    again = options.replace({"processors": [lambda tokens, logits: kept, lower_the_best]})
    assert outcome(tiny_pipeline, FOX, again, "model", k)[0] == expected


def test_requests_without_a_seed_differ_and_name_it(tiny_pipeline: Pipeline) -> None:
    options = SamplingOptions(temperature=1.0, max_new_tokens=30)
    first, second = (tiny_pipeline.generate(FOX, options, k=2) for _ in range(2))
    assert first.seed != second.seed
    assert first.token_ids != second.token_ids
    for result in (first, second):
        for drafter in ("none", "ngram", "model"):
            again = tiny_pipeline.generate(FOX, options, k=8, drafter=drafter, seed=result.seed)
            assert (again.token_ids, again.text, again.seed) == (result.token_ids, result.text, result.seed)


def test_each_seed_has_a_text_of_its_own(smollm2_pair: Pipeline) -> None:
    """One for every K and drafter."""
    texts = []
    for seed in (0, 1, 2, 2**63, 2**64 - 1):
        options = SamplingOptions(temperature=1.0, max_new_tokens=10, seed=seed)
        plain, _ = outcome(smollm2_pair, PROMPTS["prose"], options, "none", 0)
        for drafter, k in (("ngram", 4), ("model", 2), ("model", 8)):
            assert outcome(smollm2_pair, PROMPTS["prose"], options, drafter, k)[0] == plain
        texts.append(plain.text)
    assert len(set(texts)) == len(texts)


@pytest.mark.parametrize("temperature", [None, 0, 1e-6, 9e-6])
def test_greedy_has_no_seed(tiny_pipeline: Pipeline, temperature: float | None) -> None:
    seed = None if temperature is None else 5
    assert tiny_pipeline.generate(FOX, temperature=temperature, seed=seed, max_new_tokens=2).seed is None


def test_the_command_prints_the_same_text(tiny_bundle: Path) -> None:
    args = ["generate", tiny_bundle, "-p", FOX, "--temperature", 0.8, "--top-p", 0.9, "--max-new-tokens", 30]
    runs = [cli(*args, "--seed", 7, *more) for more in (["--k", 0], ["--k", 4], *DRAFTERS)]
    assert [result.exit_code for result in runs] == [0] * 4
    assert all("seed 7" in result.stderr for result in runs)
    assert len({result.stdout for result in runs}) == 1
    assert len({cli(*args, *more).stdout for more in ([], [], ["--seed", 7])}) == 3


DRAFTERS = (["--drafter", "ngram"], ["--drafter", "model"])
RULES = ("residual", "block", "lossy-typical")


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("drafter", ["ngram", "model"])
@pytest.mark.parametrize("k", TIERS)
def test_other_rules_can_be_repeated(tiny_pipeline: Pipeline, rule: str, drafter: str, k: int) -> None:
    """The same seed, K and drafter give the same text and counters, whatever came between; another seed does not."""
    few = tiny_pipeline.encode("abcdefgh")  # so that n-grams come again
    masks = {"allowed_token_ids": few, "ignore_eos": True}
    options = SamplingOptions(temperature=1.3, max_new_tokens=60, logprobs=1, seed=3, **masks)
    first, stats = outcome(tiny_pipeline, FOX, options, drafter, k, acceptance=rule)
    other, _ = outcome(tiny_pipeline, FOX, options.replace({"seed": 4}), drafter, k, acceptance=rule)
    again, repeated = outcome(tiny_pipeline, FOX, options, drafter, k, acceptance=rule)
    assert again == first
    assert repeated.acceptance_histogram == stats.acceptance_histogram
    assert other.tokens != first.tokens
    assert stats.num_accepted_draft_tokens > 0
    assert stats.num_accepted_draft_tokens < stats.num_draft_tokens or rule == "lossy-typical"


def test_other_rules_give_the_exact_text_when_greedy(tiny_pipeline: Pipeline) -> None:
    """There is nothing to draw then, for any options: the same ids, log-probabilities, end and pieces again."""
    vocab_size = tiny_pipeline.manifest.target.vocab_size
    sets = option_sets(vocab_size, likely_tokens(tiny_pipeline, FOX), st.integers(1, 30))
    total = DecodeStats()

    @settings(max_examples=60, derandomize=True, deadline=None, database=None)
    @given(options=sets, wrong=st.sets(st.integers(0, 30)), data=st.data())
    def check(options: dict[str, Any], wrong: set[int], data: st.DataObject) -> None:
        given = SamplingOptions(**options | {"temperature": 0.0})
        plain, _ = outcome(tiny_pipeline, FOX, given, "none", 0)
        if plain.tokens and not plain.error:
            given = given.replace(data.draw(endings(plain)))
            plain, _ = outcome(tiny_pipeline, FOX, given, "none", 0)
        script = Scripted(plain.tokens, vocab_size, lambda position: position in wrong)
        for rule in RULES:
            for drafter, scripted in {"ngram": None, "model": None, "scripted": script}.items():
                for k in (1, 8):
                    note(f"{rule}, {drafter}, K = {k}")
                    with drafting(tiny_pipeline, scripted):
                        name = "ngram" if scripted else drafter
                        found, stats = outcome(tiny_pipeline, FOX, given, name, k, acceptance=rule)
                    assert found == plain
                    total.add(stats)

    check()
    assert 0 < total.num_accepted_draft_tokens < total.num_draft_tokens


@pytest.mark.parametrize("rule", RULES)
def test_other_rules_keep_to_the_options(tiny_pipeline: Pipeline, rule: str) -> None:
    """Whatever text they give: budget, least length, masks and grammar hold for each token, accepted or not."""
    masks = {"bad_words_ids": [[100], [274, 274]], "allowed_token_ids": range(0, 320, 2), "regex": "[a-z]{1,20}"}
    accepted = 0
    for seed in range(20):
        for drafter in ("ngram", "model"):
            options = SamplingOptions(
                temperature=1.0, seed=seed, min_new_tokens=3, max_new_tokens=5 + seed, ignore_eos=True, **masks
            )
            found, stats = outcome(tiny_pipeline, "a a a a a", options, drafter, 4, acceptance=rule)
            accepted += stats.num_accepted_draft_tokens
            assert not found.error
            assert re.fullmatch(masks["regex"], found.text)
            assert len(found.tokens) <= 5 + seed
            assert all(token % 2 == 0 and token != 100 for token in found.tokens)
            assert (274, 274) not in zip(found.tokens, found.tokens[1:], strict=False)
    assert accepted > 0
