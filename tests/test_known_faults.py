"""Faults that users reported of other systems: the case that shows each, and what is right. Docstrings name the fault.

Those that other tests have already:

- a token id behind the vocabulary (llama.cpp 28158), padded vocabularies (vllm 10913):
  ``test_pair.test_padded_vocabularies_are_cut``
- vocabularies of one size and another order (llama.cpp 3812, TensorRT-LLM 2789):
  ``test_pair.test_equal_sizes_are_not_enough``
- an n-gram index of an earlier text (llama.cpp 21815): ``test_drafters.test_ngram_forgets_the_last_request``
- a draft refused in silence (mlx-engine 280): ``test_pair.test_another_tokenizer_is_refused``,
  ``test_bad_requests.test_request_that_the_bundle_has_nothing_for``
- noise of the draft that comes again in the verifier (vllm 205):
  ``test_accept.test_draft_noise_does_not_overlap_the_verifiers``
- verify passes that flip near ties (mlx-lm 1423 and 1470, llama.cpp 23302 and 27975, vllm 7627): ``test_rows``, and
  ``test_same_bits.test_every_option_on_a_real_model``
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from check_identity import in_step
from numpy.typing import NDArray
from test_same_bits import FOX, PROMPTS, TIERS, Scripted, drafting, outcome

from outrider.export import ExportOptions, export_bundle
from outrider.runtime import Origin, Pipeline, SamplingOptions
from outrider.runtime.accept import Draft
from outrider.runtime.decode import decode
from outrider.runtime.drafters import Draw, NoDrafter
from outrider.runtime.sampling.history import History

TOKENS = 40
GREEDY = SamplingOptions(max_new_tokens=TOKENS)


class Constant(NoDrafter):
    """Proposes one token, again and again."""

    def __init__(self, token: int) -> None:
        self.token = token

    def propose(self, history: History, k: int, draw: Draw) -> Sequence[Draft]:
        return [Draft(self.token)] * k


@pytest.fixture(scope="module")
def plain(tiny_pipeline: Pipeline) -> list[int]:
    return tiny_pipeline.generate(FOX, GREEDY, k=0).token_ids


@pytest.fixture(scope="module")
def twins(tiny: Path, workdir: Path) -> Pipeline:
    """A pair whose draft is the target."""
    out = workdir / "known-twins"
    export_bundle(str(tiny), str(tiny), out, ExportOptions(tiers=TIERS, max_length=96), threads=2)
    return in_step(Pipeline.load(out, threads=2))


def perfect(pipeline: Pipeline, tokens: Sequence[int], wrong: Sequence[int] = ()) -> Scripted:
    return Scripted(tokens, pipeline.manifest.target.vocab_size, lambda position: position in wrong)


def prompt_of(pipeline: Pipeline, length: int) -> str:
    """A text of so many tokens."""
    text = pipeline.codec.decode(pipeline.codec.encode("one two three " * length)[:length])
    assert len(pipeline.codec.encode(text)) == length
    return text


# End of sequence, budget, stop


def test_an_accepted_end_ends_the_text(tiny_pipeline: Pipeline, plain: list[int]) -> None:
    """transformers 47912: an end of sequence accepted inside a block did not end the text."""
    end = plain[3]
    assert end not in plain[:3]
    with drafting(tiny_pipeline, perfect(tiny_pipeline, plain)):
        result = tiny_pipeline.generate(FOX, GREEDY, k=4, drafter="ngram", eos_token_id=end)
    assert (result.token_ids, result.finish_reason) == (plain[:4], "eos")
    assert result.stats.num_draft_tokens == result.stats.num_accepted_draft_tokens == 3


@pytest.mark.parametrize("k", TIERS)
def test_an_end_that_a_draft_proposes_ends_nothing(tiny_pipeline: Pipeline, plain: list[int], k: int) -> None:
    """openvino.genai 3293: the draft's own end of sequence marked the sequence as finished."""
    (end,) = tiny_pipeline.manifest.eos_token_ids
    assert end not in plain
    with drafting(tiny_pipeline, Constant(end)):
        result = tiny_pipeline.generate(FOX, GREEDY, k=k, drafter="ngram")
    assert (result.token_ids, result.finish_reason) == (plain, "length")
    assert result.stats.num_accepted_draft_tokens == 0 < result.stats.num_draft_tokens


@pytest.mark.parametrize("ignore", [False, True])
@pytest.mark.parametrize("k", TIERS)
def test_an_end_inside_a_draft_is_honoured_or_ignored(tiny_pipeline: Pipeline, k: int, ignore: bool) -> None:
    """koboldcpp 1276: with a draft the end of sequence was passed over, whether it was to be ignored or not."""
    (end,) = tiny_pipeline.manifest.eos_token_ids
    length = len(tiny_pipeline.encode(FOX))

    def end_at_6(tokens: Sequence[int], logits: NDArray[np.float32]) -> NDArray[np.float32]:
        logits[end] += 100 * (len(tokens) == length + 6)
        return logits

    options = SamplingOptions(max_new_tokens=20, processors=[end_at_6], ignore_eos=ignore)
    expected, _ = outcome(tiny_pipeline, FOX, options, "none", 0)
    assert (len(expected.tokens), expected.finish_reason) == ((20, "length") if ignore else (7, "eos"))
    assert expected.tokens[6] == end
    for drafter in (perfect(tiny_pipeline, expected.tokens), Constant(end), None):
        with drafting(tiny_pipeline, drafter):
            assert outcome(tiny_pipeline, FOX, options, "ngram" if drafter else "model", k)[0] == expected


@pytest.mark.parametrize("first", [1, 2])
def test_a_stop_string_early_in_a_long_block_is_found(tiny_pipeline: Pipeline, plain: list[int], first: int) -> None:
    """sglang 23802: only the end of the block's text was searched."""
    before = tiny_pipeline.codec.decode(plain[:first])
    stop = tiny_pipeline.codec.decode(plain[: first + 2])[len(before) :]
    assert len(stop) > 1 and stop not in before
    with drafting(tiny_pipeline, perfect(tiny_pipeline, plain)):
        result = tiny_pipeline.generate(FOX, GREEDY, k=8, drafter="ngram", stop_strings=[stop])
    assert (result.text, result.finish_reason) == (before, "stop")
    assert result.token_ids == plain[: first + 2]
    assert result.stats.num_draft_tokens == result.stats.num_accepted_draft_tokens == first + 1


def test_one_token_wanted_is_one_token_given(tiny_pipeline: Pipeline) -> None:
    """lattice 242: a whole draft was written into a budget of one token."""
    request = tiny_pipeline.new_request([1, 2, 3, 1, 2], SamplingOptions(max_new_tokens=1))
    drafter = tiny_pipeline.drafter("ngram")
    assert list(decode(tiny_pipeline.target, drafter, 4, request)) == request.output.tokens
    assert (len(request.output.tokens), request.output.finish_reason) == (1, "length")
    drafter.begin()
    assert drafter.propose(History([1, 2, 3, 1, 2]), 4, request.chooser.choose)  # it had something to propose


def test_the_limit_counts_tokens(tiny_pipeline: Pipeline, plain: list[int]) -> None:
    """ferrox 311: a limit of 6 gave 9 tokens where drafts were accepted."""
    with drafting(tiny_pipeline, perfect(tiny_pipeline, plain)):
        result = tiny_pipeline.generate(FOX, max_new_tokens=6, k=4, drafter="ngram")
    assert (result.token_ids, result.finish_reason) == (plain[:6], "length")


@pytest.mark.parametrize("budget", range(1, 14))
def test_counters_end_with_the_budget(tiny_pipeline: Pipeline, plain: list[int], budget: int) -> None:
    """sglang 37450: counters went on behind the budget."""
    for wrong in ([], [3, 7], range(TOKENS)):
        with drafting(tiny_pipeline, perfect(tiny_pipeline, plain, wrong)):
            result = tiny_pipeline.generate(FOX, max_new_tokens=budget, k=4, drafter="ngram")
        stats = result.stats
        assert result.token_ids == plain[:budget]
        assert stats.num_output_tokens == stats.num_round_tokens + 1 == budget
        assert stats.num_accepted_draft_tokens + stats.num_spec_steps == stats.num_round_tokens


# Random numbers


def test_requests_without_a_seed_differ(tiny_bundle: Path, tiny_pipeline: Pipeline) -> None:
    """TensorRT-LLM 19487: equal prompts without a seed got equal texts."""
    options = SamplingOptions(temperature=1.0, max_new_tokens=20)
    pipelines = [tiny_pipeline, tiny_pipeline, Pipeline.load(tiny_bundle, threads=2)]
    texts = {tuple(pipeline.generate(FOX, options).token_ids) for pipeline in pipelines}
    assert len(texts) == 3


LAWS: dict[str, dict[str, float]] = {
    "warm": {"temperature": 1.5},
    "min_p": {"temperature": 2.0, "min_p": 0.3},
    "top_p": {"temperature": 1.0, "top_p": 0.9},
}


@pytest.fixture(scope="module")
def laws(tiny_pipeline: Pipeline) -> dict[str, dict[tuple[int, ...], float]]:
    """The probability of every text of three tokens out of five, by plain decoding's own log-probabilities."""
    found: dict[str, dict[tuple[int, ...], float]] = {}
    for name in LAWS:
        law: dict[tuple[int, ...], float] = {(): 1.0}
        for _ in range(3):
            law = {
                (*text, token): probability * math.exp(logprob)
                for text, probability in law.items()
                for token, logprob in next_tokens(tiny_pipeline, text, name)
            }
        assert math.isclose(sum(law.values()), 1, rel_tol=1e-5)
        found[name] = law
    return found


def law_options(pipeline: Pipeline, name: str, **more: Any) -> SamplingOptions:
    return SamplingOptions(ignore_eos=True, allowed_token_ids=pipeline.encode("abcde"), **LAWS[name], **more)


def next_tokens(pipeline: Pipeline, text: tuple[int, ...], name: str) -> Sequence[tuple[int, float]]:
    options = law_options(pipeline, name, max_new_tokens=1, logprobs=5, logprobs_mode="processed", seed=0)
    request = pipeline.new_request([*pipeline.encode(FOX), *text], options)
    list(decode(pipeline.target, NoDrafter(), 0, request))
    return [(token, logprob) for token, logprob in request.output.logprobs[0].top if logprob > -math.inf]


@pytest.mark.parametrize("name", LAWS)
@pytest.mark.parametrize("rule", ["exact", "residual", "block"])
@pytest.mark.parametrize("drafter", ["model", "constant"])
def test_the_law_of_the_text_is_plain_samplings(
    tiny_pipeline: Pipeline, laws: dict[str, dict[tuple[int, ...], float]], name: str, rule: str, drafter: str
) -> None:
    """speculative-sampling 3 and 9, openvino.genai 4190: sampled with a draft unlike the target, another law's text."""
    runs = 1000
    ids = tiny_pipeline.encode(FOX)
    proposing = tiny_pipeline.drafter("model") if drafter == "model" else Constant(tiny_pipeline.encode("b")[0])
    seen: Counter[tuple[int, ...]] = Counter()
    accepted = proposed = 0
    for seed in range(runs):
        request = tiny_pipeline.new_request(ids, law_options(tiny_pipeline, name, max_new_tokens=4, seed=seed), rule)
        for _ in decode(tiny_pipeline.target, proposing, 2, request):
            pass
        seen[tuple(request.output.tokens[:3])] += 1
        accepted += request.stats.num_accepted_draft_tokens
        proposed += request.stats.num_draft_tokens
    assert 0 < accepted < proposed
    law = laws[name]
    assert set(seen) <= set(law)
    often = [text for text in law if law[text] * runs >= 5]
    expected = [law[text] * runs for text in often]
    found = [seen[text] for text in often]
    expected, found = [*expected, runs - sum(expected)], [*found, runs - sum(found)]
    distance = sum((a - b) ** 2 / max(b, 1) for a, b in zip(found, expected, strict=True))
    freedom = len(often)
    # A chi-square variable is above this once in a few thousand times; the seeds are fixed, so it is always or never.
    assert distance < freedom + 4 * math.sqrt(2 * freedom)


# Log-probabilities, penalties, processors


@pytest.mark.parametrize("k", TIERS)
@pytest.mark.parametrize("temperature", [None, 1.0])
def test_log_probabilities_are_plain_decodings(tiny_pipeline: Pipeline, k: int, temperature: float | None) -> None:
    """llama.cpp 27972: with a draft each token was given the log-probability 0."""
    options = SamplingOptions(temperature=temperature, seed=temperature and 1, max_new_tokens=20, logprobs=5)
    expected, _ = outcome(tiny_pipeline, FOX, options, "none", 0)
    for drafter in (perfect(tiny_pipeline, expected.tokens, [4, 9]), None):
        with drafting(tiny_pipeline, drafter):
            found = tiny_pipeline.generate(FOX, options, k=k, drafter="ngram" if drafter else "model")
        assert found.logprobs == expected.logprobs
        for token, entry in zip(found.token_ids, found.logprobs, strict=True):
            assert entry.logprob < 0
            assert dict(entry.top).get(token, entry.logprob) == entry.logprob
            assert len(entry.top) == 5 and list(entry.top) == sorted(entry.top, key=lambda pair: -pair[1])


@pytest.mark.parametrize("k", TIERS)
def test_a_penalty_counts_every_token_of_a_step(tiny_pipeline: Pipeline, k: int) -> None:
    """sglang 33643 and 28180: tokens that one step brought together were not all counted."""
    for penalty in ({"repetition_penalty": 1.5}, {"frequency_penalty": 100.0}, {"presence_penalty": 100.0}):
        options = SamplingOptions(max_new_tokens=30, **penalty)
        expected, _ = outcome(tiny_pipeline, "a a a a", options, "none", 0)
        if "repetition_penalty" not in penalty:
            assert len(set(expected.tokens)) == 30
        for drafter in (perfect(tiny_pipeline, expected.tokens), Constant(expected.tokens[0])):
            with drafting(tiny_pipeline, drafter):
                found, stats = outcome(tiny_pipeline, "a a a a", options, "ngram", k)
            assert found == expected
        with drafting(tiny_pipeline, perfect(tiny_pipeline, expected.tokens)):
            _, stats = outcome(tiny_pipeline, "a a a a", options, "ngram", k)
        assert stats.draft_acceptance_rate == 1.0


@pytest.mark.parametrize("k", TIERS)
@pytest.mark.parametrize("least", [1, 4, 5, 6, 11])
def test_the_least_length_counts_tokens(tiny_pipeline: Pipeline, k: int, least: int) -> None:
    """sglang 28180: min_new_tokens was compared with a number of steps."""
    (end,) = tiny_pipeline.manifest.eos_token_ids
    options = SamplingOptions(max_new_tokens=30, min_new_tokens=least, logit_bias={end: 100.0})
    expected, _ = outcome(tiny_pipeline, FOX, options, "none", 0)
    for drafter in (perfect(tiny_pipeline, expected.tokens), Constant(end), None):
        with drafting(tiny_pipeline, drafter):
            found, _ = outcome(tiny_pipeline, FOX, options, "ngram" if drafter else "model", k)
        assert (len(found.tokens), found.finish_reason) == (least + 1, "eos")
        assert found == expected
        assert end not in found.tokens[:-1]


@pytest.mark.parametrize("drafter", ["ngram", "model"])
@pytest.mark.parametrize("name", ["repetition_penalty", "presence_penalty", "frequency_penalty"])
def test_penalties_reach_verified_rows(tiny_pipeline: Pipeline, plain: list[int], drafter: str, name: str) -> None:
    """TensorRT-LLM 17701: with a draft the text was the one without the penalty."""
    options = GREEDY.replace({name: 1.5})
    found, _ = outcome(tiny_pipeline, FOX, options, drafter, 4)
    assert found.tokens != plain
    assert found == outcome(tiny_pipeline, FOX, options, "none", 0)[0]


@pytest.mark.parametrize("k", TIERS)
def test_min_p_reaches_every_token(tiny_pipeline: Pipeline, plain: list[int], k: int) -> None:
    """vllm 42744: of the tokens of a round only the last was filtered; min_p = 1 leaves the best one everywhere."""
    options = SamplingOptions(max_new_tokens=TOKENS, temperature=1.5, min_p=1.0, seed=1)
    for drafter in (perfect(tiny_pipeline, plain, [6, 7, 20]), None):
        with drafting(tiny_pipeline, drafter):
            assert outcome(tiny_pipeline, FOX, options, "ngram" if drafter else "model", k)[0].tokens == plain


@pytest.mark.parametrize("drafter", ["ngram", "model"])
@pytest.mark.parametrize("temperature", [None, 1.0])
def test_bias_and_processors_reach_every_token(
    tiny_pipeline: Pipeline, drafter: str, temperature: float | None
) -> None:
    """sglang 26330 and 10617: with a draft neither reached the verified rows."""

    def only_77(tokens: Sequence[int], logits: NDArray[np.float32]) -> NDArray[np.float32]:
        logits[77] += 100
        return logits

    for changes in ({"logit_bias": {77: 100.0}}, {"processors": [only_77]}):
        options = SamplingOptions(temperature=temperature, max_new_tokens=20, **changes)
        result = tiny_pipeline.generate(FOX, options, k=4, drafter=drafter)
        assert result.token_ids == [77] * 20
        assert result.stats.draft_acceptance_rate == 1.0


def test_a_corrected_token_is_not_accepted(tiny_pipeline: Pipeline, plain: list[int]) -> None:
    """mlx-node 11: a miss at the first position counted as one accepted draft, and the cache kept one token more."""
    with drafting(tiny_pipeline, perfect(tiny_pipeline, plain, [1])):
        result = tiny_pipeline.generate(FOX, max_new_tokens=3, k=4, drafter="ngram")
    assert result.origins == [Origin.PLAIN, Origin.CORRECTION, Origin.PLAIN]
    assert result.stats.acceptance_histogram == [2]
    assert tiny_pipeline.target.tokens == [*tiny_pipeline.encode(FOX), *plain[:2]]


# Context


@pytest.mark.parametrize("k", [0, *TIERS])
@pytest.mark.parametrize("short", [1, 2, 3, 9])
def test_drafts_shrink_at_the_end_of_the_context(tiny_pipeline: Pipeline, k: int, short: int) -> None:
    """exllamav2 274, lorax 474: a block was written past the last position, and the request failed."""
    prompt = prompt_of(tiny_pipeline, tiny_pipeline.manifest.max_length - short)
    options = SamplingOptions(max_new_tokens=10**9)
    expected, _ = outcome(tiny_pipeline, prompt, options, "none", 0)
    assert (len(expected.tokens), expected.finish_reason) == (short, "length")
    for drafter in (perfect(tiny_pipeline, expected.tokens), Constant(5), None):
        with drafting(tiny_pipeline, drafter):
            assert outcome(tiny_pipeline, prompt, options, "ngram" if drafter else "model", k)[0] == expected


@pytest.mark.parametrize("rows", [2, 9])
@pytest.mark.parametrize("short", [1, 2, 3, 6])
def test_padding_is_neither_kept_nor_emitted(
    tiny_pipeline: Pipeline, monkeypatch: pytest.MonkeyPatch, rows: int, short: int
) -> None:
    """vllm 53812, tpu-inference 3057: passes of a fixed size near the end of the context or of the budget."""
    prompt = prompt_of(tiny_pipeline, tiny_pipeline.manifest.max_length - short)
    whole, _ = outcome(tiny_pipeline, prompt, SamplingOptions(max_new_tokens=short), "none", 0)
    monkeypatch.setattr(tiny_pipeline.target, "min_rows", rows)
    monkeypatch.setattr(tiny_pipeline.draft, "min_rows", rows)
    for budget in range(1, short + 1):
        options = SamplingOptions(max_new_tokens=budget)
        for drafter in (perfect(tiny_pipeline, whole.tokens), Constant(5), None):
            for k in (0, *TIERS):
                with drafting(tiny_pipeline, drafter):
                    found, _ = outcome(tiny_pipeline, prompt, options, "ngram" if drafter else "model", k)
                assert (found.tokens, found.finish_reason) == (whole.tokens[:budget], "length")
                assert tiny_pipeline.target.tokens == [*tiny_pipeline.encode(prompt), *found.tokens[:-1]]


# Caches


@pytest.mark.parametrize("k", TIERS)
@pytest.mark.parametrize("temperature", [None, 1.0])
def test_a_draft_that_is_the_target_is_always_right(twins: Pipeline, k: int, temperature: float | None) -> None:
    """mlxcel 994, ColossalAI 5449: behind a fully accepted round the draft's cache lacked its last token."""
    seed = None if temperature is None else 11
    result = twins.generate(FOX, k=k, drafter="model", max_new_tokens=50, temperature=temperature, seed=seed)
    stats = result.stats
    assert len(result.token_ids) == 50
    assert stats.num_draft_tokens > 0
    assert stats.draft_acceptance_rate == 1.0
    assert sum(stats.acceptance_histogram[:k]) <= 1  # the last round may have less to draft


@pytest.mark.parametrize("drafter", ["ngram", "model"])
def test_a_rollback_forgets_refused_tokens_only(
    tiny_pipeline: Pipeline, monkeypatch: pytest.MonkeyPatch, drafter: str
) -> None:
    """aprender 2014: a refused draft cost the whole cache; only its own tokens are to be forgotten."""
    original, widths = tiny_pipeline.target.extend, []

    def watched(tokens: Sequence[int], logit_rows: int) -> NDArray[np.float32]:
        widths.append(len(tokens))
        return original(tokens, logit_rows)

    monkeypatch.setattr(tiny_pipeline.target, "extend", watched)
    result = tiny_pipeline.generate("def add(a, b):", k=4, drafter=drafter, max_new_tokens=TOKENS)
    prompt = tiny_pipeline.encode("def add(a, b):")
    assert max(widths[1:]) <= 5
    assert sum(widths[1:]) == result.stats.num_spec_steps + result.stats.num_draft_tokens
    assert result.stats.num_accepted_draft_tokens < result.stats.num_draft_tokens
    assert tiny_pipeline.target.tokens == [*prompt, *result.token_ids[:-1]]


@pytest.mark.parametrize("name", ["prose", "chat"])
def test_a_kept_prompt_is_in_the_drafts_cache_too(smollm2_pair: Pipeline, name: str) -> None:
    """vllm 47930: the same prompt again, served from the cache, had drafts that were seldom accepted."""
    # A narrow choice without an end, so that the draft is right now and then.
    words = smollm2_pair.codec.encode(" the and of in to")
    options = SamplingOptions(max_new_tokens=16, min_new_tokens=16, allowed_token_ids=words)
    smollm2_pair.clear_caches()
    first, second = (smollm2_pair.generate(PROMPTS[name], options, k=4, drafter="model") for _ in range(2))
    assert first.stats.num_cached_tokens == 0
    assert second.stats.num_cached_tokens == second.stats.num_prompt_tokens - 1
    assert second.token_ids == first.token_ids
    assert second.stats.acceptance_histogram == first.stats.acceptance_histogram
    assert 0 < first.stats.num_accepted_draft_tokens < first.stats.num_draft_tokens


@pytest.mark.parametrize("k", TIERS)
def test_no_cache_keeps_refused_rows(tiny_bundle: Path, k: int) -> None:
    """mlx-swift-lm 308: after a partly accepted round one of the caches kept what was refused."""
    tiny_pipeline = in_step(Pipeline.load(tiny_bundle, threads=2))
    options = SamplingOptions(max_new_tokens=30, temperature=1.0, seed=2)
    text, stats = outcome(tiny_pipeline, FOX, options, "model", k)
    assert 0 < stats.num_accepted_draft_tokens < stats.num_draft_tokens
    whole = [*tiny_pipeline.encode(FOX), *text.tokens]
    assert tiny_pipeline.draft is not None
    for model in (tiny_pipeline.target, tiny_pipeline.draft):
        tokens = model.tokens
        model.keep([*whole, 0])
        # A last round without room for drafts leaves the draft behind by the round before it.
        assert len(model.tokens) >= len(whole) - 2 - k, "the text is not in the cache"
        fresh = model.extend(whole[model.length :], 1)[0].copy()
        model.rollback(0)
        assert np.array_equal(model.extend(whole, 1)[0], fresh)
        assert tokens is model.tokens


# Temperature


@pytest.mark.parametrize("temperature", [0, 1e-30, 1e-6, 9e-6, 2e-5])
@pytest.mark.parametrize("k", [0, *TIERS])
def test_a_temperature_near_zero_is_greedy(
    tiny_pipeline: Pipeline, plain: list[int], temperature: float, k: int
) -> None:
    """Automodel 3627: a temperature of 1e-6 gave NaN; it is greedy, and so is one that is only just not."""
    options = GREEDY.replace({"temperature": temperature, "seed": 1, "logprobs": 2, "logprobs_mode": "processed"})
    for rule in ("exact", "residual", "block"):
        found, _ = outcome(tiny_pipeline, FOX, options, "model", k, acceptance=rule)
        assert found.tokens == plain
        assert all(math.isfinite(entry.logprob) for entry in found.logprobs if entry)


@pytest.mark.parametrize("temperature", [None, 0, 1e-6, 1.0])
def test_counters_only_grow(tiny_pipeline: Pipeline, temperature: float | None) -> None:
    """vllm 27077: a stand-in value for greedy made acceptance negative, and counters that only grow broke on it."""
    seed = None if temperature is None else 4
    options = SamplingOptions(max_new_tokens=TOKENS, temperature=temperature, seed=seed)
    expected, _ = outcome(tiny_pipeline, FOX, options, "none", 0)
    request = tiny_pipeline.new_request(tiny_pipeline.encode(FOX), options)
    drafter = perfect(tiny_pipeline, expected.tokens, [1, 2, 8, 20])
    last: dict[str, Any] = {}
    for _ in decode(tiny_pipeline.target, drafter, 4, request):
        now = {name: value for name, value in vars(request.stats).items() if isinstance(value, (int, float))}
        assert all(value >= last.get(name, 0) for name, value in now.items())
        last = now
    assert 0 < request.stats.num_accepted_draft_tokens < request.stats.num_draft_tokens


# Grammar, streaming


@pytest.mark.parametrize("k", TIERS)
@pytest.mark.parametrize("name", ["regex", "json_schema", "lark"])
def test_only_committed_tokens_move_the_grammar(tiny_pipeline: Pipeline, k: int, name: str) -> None:
    """vllm 44006: draft tokens that were refused, or that the grammar does not allow, had moved its state."""
    colours = ["red", "green", "greenish", "dark blue"]
    grammars: dict[str, Any] = {
        "regex": "|".join(colours),
        "json_schema": {"enum": colours},
        "lark": "start: " + " | ".join(f'"{colour}"' for colour in colours),
    }
    texts = [f'"{colour}"' for colour in colours] if name == "json_schema" else colours
    vocab_size = tiny_pipeline.manifest.target.vocab_size
    accepted = 0
    for seed in range(8):
        options = SamplingOptions(max_new_tokens=30, temperature=1.0, seed=seed, **{name: grammars[name]})
        expected, _ = outcome(tiny_pipeline, FOX, options, "none", 0)
        assert expected.text in texts
        assert expected.finish_reason in ("grammar", "eos")  # eos: "green" may go on
        wrong, fine = (Scripted(expected.tokens, vocab_size, lambda _, value=value: value) for value in (True, False))
        for drafter in (None, wrong, fine, perfect(tiny_pipeline, expected.tokens, [2, 4])):
            with drafting(tiny_pipeline, drafter):
                found, stats = outcome(tiny_pipeline, FOX, options, "ngram" if drafter else "model", k)
            assert found == expected
            accepted += stats.num_accepted_draft_tokens
    assert accepted > 0


@pytest.mark.parametrize("budget", range(1, 7))
@pytest.mark.parametrize("drafter", ["none", "ngram", "model", "perfect"])
def test_the_end_of_a_short_stream_arrives(
    tiny_pipeline: Pipeline, plain: list[int], drafter: str, budget: int
) -> None:
    """vmlx-swift 148: text held back as the possible beginning of a stop string never came when the answer ended."""
    text = tiny_pipeline.codec.decode(plain[:budget])
    options = SamplingOptions(max_new_tokens=budget, stop_strings=[text + "never", text[-1] + "never"])
    name, k = ("ngram", 4) if drafter == "perfect" else (drafter, 4 * (drafter != "none"))
    with drafting(tiny_pipeline, perfect(tiny_pipeline, plain) if drafter == "perfect" else None):
        running = tiny_pipeline.stream(FOX, options, drafter=name, k=k)
        pieces = [token.text for token in running]
        assert "".join(pieces) == running.result().text == text
    assert running.result().finish_reason == "length"
    assert pieces[:-1] == [""] * (budget - 1)
