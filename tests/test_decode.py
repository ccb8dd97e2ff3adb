"""The loop from the outside: whatever is drafted, the output is plain decoding's own, and every counter is right."""

from __future__ import annotations

from collections.abc import Sequence
from threading import Thread

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from outrider.runtime import Origin, OutriderError, Pipeline, SamplingOptions
from outrider.runtime.accept import Draft
from outrider.runtime.commit import Output
from outrider.runtime.decode import decode
from outrider.runtime.drafters import Drafter, Draw, NoDrafter
from outrider.runtime.sampling.history import History
from outrider.runtime.stats import DecodeStats

PROMPT = "the quick brown fox"
TOKENS = 40


class ScriptedDrafter(Drafter):
    """Proposes the known continuation, with wrong tokens at the positions in ``wrong``."""

    def __init__(self, whole: Sequence[int], vocab_size: int, wrong: frozenset[int] = frozenset()) -> None:
        self.whole = whole
        self.wrong = wrong
        self.vocab_size = vocab_size

    def propose(self, history: History, k: int, draw: Draw) -> Sequence[Draft]:
        right = self.whole[len(history) : len(history) + k]
        first = history.output_length
        return [
            Draft((token + 1) % self.vocab_size if first + index in self.wrong else token)
            for index, token in enumerate(right)
        ]


def run(
    pipeline: Pipeline, drafter: Drafter, k: int, max_new_tokens: int = TOKENS, eos: Sequence[int] = ()
) -> tuple[Output, DecodeStats]:
    ids = pipeline.codec.encode(PROMPT)
    options = SamplingOptions(max_new_tokens=max_new_tokens, eos_token_id=list(eos))
    request = pipeline.new_request(ids, options)
    assert list(decode(pipeline.target, drafter, k, request)) == request.output.tokens
    return request.output, request.stats


@pytest.fixture(scope="module")
def plain(tiny_pipeline: Pipeline) -> list[int]:
    return run(tiny_pipeline, NoDrafter(), 0)[0].tokens


def scripted(pipeline: Pipeline, plain: Sequence[int], wrong: Sequence[int] = ()) -> ScriptedDrafter:
    whole = [*pipeline.codec.encode(PROMPT), *plain]
    return ScriptedDrafter(whole, pipeline.manifest.target.vocab_size, frozenset(wrong))


@pytest.mark.parametrize("k", [1, 2, 3, 4, 8])
def test_perfect_drafts_are_all_accepted(tiny_pipeline: Pipeline, plain: list[int], k: int) -> None:
    output, stats = run(tiny_pipeline, scripted(tiny_pipeline, plain), k)
    assert output.tokens == plain
    assert stats.draft_acceptance_rate == 1.0
    rounds = -(-(TOKENS - 1) // (k + 1))
    assert stats.num_spec_steps == rounds
    assert stats.num_accepted_draft_tokens + rounds == TOKENS - 1
    assert output.origins[0] is Origin.PLAIN
    assert Origin.CORRECTION not in output.origins


@pytest.mark.parametrize("k", [1, 2, 4, 8])
def test_wrong_drafts_cost_rounds_and_nothing_else(tiny_pipeline: Pipeline, plain: list[int], k: int) -> None:
    output, stats = run(tiny_pipeline, scripted(tiny_pipeline, plain, range(TOKENS)), k)
    assert output.tokens == plain
    assert stats.num_accepted_draft_tokens == 0
    assert stats.mean_acceptance_length == 1.0
    assert stats.acceptance_histogram == [TOKENS - 1]
    # The last round has no room for a draft, and its token is plain.
    assert output.origins == [Origin.PLAIN, *[Origin.CORRECTION] * (TOKENS - 2), Origin.PLAIN]


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(wrong=st.sets(st.integers(0, TOKENS - 1)), k=st.integers(1, 8), budget=st.integers(1, TOKENS), data=st.data())
def test_any_mixture_of_drafts(
    tiny_pipeline: Pipeline, plain: list[int], wrong: set[int], k: int, budget: int, data: st.DataObject
) -> None:
    """Random misses, K, budget and end-of-sequence tokens: output and counters follow from the plain text alone."""
    eos = data.draw(st.sets(st.sampled_from(plain), max_size=2))
    output, stats = run(tiny_pipeline, scripted(tiny_pipeline, plain, tuple(wrong)), k, budget, tuple(eos))
    expected, _ = run(tiny_pipeline, NoDrafter(), 0, budget, tuple(eos))
    assert output.tokens == expected.tokens
    assert output.finish_reason == expected.finish_reason
    assert stats.num_output_tokens == len(output.tokens)
    assert sum(stats.acceptance_histogram) == stats.num_spec_steps
    accepted = sum(count * a for a, count in enumerate(stats.acceptance_histogram))
    assert accepted == stats.num_accepted_draft_tokens == output.origins.count(Origin.ACCEPTED)
    assert stats.num_draft_tokens >= accepted
    for position, origin in enumerate(output.origins):
        if origin is Origin.ACCEPTED:
            assert position not in wrong
        if origin is Origin.CORRECTION:
            assert position in wrong


@pytest.mark.parametrize("budget", range(1, 11))
def test_budget_is_exact(tiny_pipeline: Pipeline, plain: list[int], budget: int) -> None:
    """K-1, K, K+1, ... tokens wanted: a perfect drafter never writes past the limit."""
    output, _ = run(tiny_pipeline, scripted(tiny_pipeline, plain), 4, budget)
    assert output.tokens == plain[:budget]
    assert output.finish_reason == "length"


@pytest.mark.parametrize("position", range(9))
def test_end_of_sequence_inside_a_block(tiny_pipeline: Pipeline, plain: list[int], position: int) -> None:
    """What a block holds behind the end does not exist, and is not counted."""
    end = plain[position]
    expected = plain[: plain.index(end) + 1]
    output, stats = run(tiny_pipeline, scripted(tiny_pipeline, plain), 4, eos=[end])
    assert output.tokens == expected
    assert output.finish_reason == "eos"
    assert stats.num_draft_tokens == stats.num_accepted_draft_tokens <= len(expected)


def test_end_of_sequence_as_a_wrong_proposal_ends_nothing(tiny_pipeline: Pipeline, plain: list[int]) -> None:
    """The draft's end of sequence is a proposal like any other."""
    end = next(token for token in range(tiny_pipeline.manifest.target.vocab_size) if token not in plain)

    class AlwaysEnd(NoDrafter):
        def propose(self, history: History, k: int, draw: Draw) -> Sequence[Draft]:
            return [Draft(end)] * k

    output, stats = run(tiny_pipeline, AlwaysEnd(), 4, eos=[end])
    assert output.tokens == plain
    assert stats.num_accepted_draft_tokens == 0


def test_fewer_drafts_than_k(tiny_pipeline: Pipeline, plain: list[int]) -> None:
    """A drafter may propose less than K, or nothing: rounds of any width mix."""

    class Varying(ScriptedDrafter):
        calls = 0

        def propose(self, history: History, k: int, draw: Draw) -> Sequence[Draft]:
            self.calls += 1
            return super().propose(history, k, draw)[: self.calls % 4]

    whole = [*tiny_pipeline.codec.encode(PROMPT), *plain]
    output, _ = run(tiny_pipeline, Varying(whole, 320), 8)
    assert output.tokens == plain
    assert Origin.BONUS in output.origins
    assert Origin.PLAIN in output.origins[1:]


@pytest.mark.parametrize("drafter", ["ngram", "model", "none"])
@pytest.mark.parametrize("k", [0, 1, 2, 4, 8])
def test_pipeline_gives_the_same_text(tiny_pipeline: Pipeline, drafter: str, k: int) -> None:
    plain = tiny_pipeline.generate(PROMPT, k=0, max_new_tokens=TOKENS)
    found = tiny_pipeline.generate(PROMPT, k=k, drafter=drafter, max_new_tokens=TOKENS)
    assert (found.token_ids, found.text, found.finish_reason) == (plain.token_ids, plain.text, plain.finish_reason)
    assert found.exactness == "bitwise"


@pytest.mark.parametrize("k", [0, 1, 4, 8])
@pytest.mark.parametrize("short", [1, 2, 3, 9, 10])
def test_runs_to_the_last_position_of_the_context(tiny_pipeline: Pipeline, k: int, short: int) -> None:
    """Prompts a few tokens short of the context: K shrinks to what fits, and the end is `length`."""
    length = tiny_pipeline.manifest.max_length
    ids = tiny_pipeline.codec.encode("one two three " * length)[: length - short]
    prompt = tiny_pipeline.codec.decode(ids)
    assert len(tiny_pipeline.codec.encode(prompt)) == length - short
    plain = tiny_pipeline.generate(prompt, k=0, max_new_tokens=1000)
    found = tiny_pipeline.generate(prompt, k=k, drafter="model", max_new_tokens=1000)
    assert found.token_ids == plain.token_ids
    assert len(found.token_ids) == short
    assert found.finish_reason == "length"


@pytest.mark.parametrize("tokens", [0, 1])
def test_no_token_and_one_token(tiny_pipeline: Pipeline, tokens: int) -> None:
    result = tiny_pipeline.generate(PROMPT, max_new_tokens=tokens, k=4, drafter="model")
    assert len(result.token_ids) == tokens
    assert result.finish_reason == "length"
    assert result.stats.num_spec_steps == 0


@pytest.mark.parametrize("leave_after", [1, 2, 5, 11])
def test_leaving_a_stream_halfway_leaves_a_clean_pipeline(tiny_pipeline: Pipeline, leave_after: int) -> None:
    whole = tiny_pipeline.generate(PROMPT, k=4, drafter="model", max_new_tokens=TOKENS)
    for count, _ in enumerate(tiny_pipeline.stream("another text", k=4, drafter="model"), start=1):
        if count == leave_after:
            break
    again = tiny_pipeline.generate(PROMPT, k=4, drafter="model", max_new_tokens=TOKENS)
    assert again.token_ids == whole.token_ids
    assert again.stats.acceptance_histogram == whole.stats.acceptance_histogram


@pytest.mark.parametrize("drafter", ["ngram", "model"])
@pytest.mark.parametrize("at", ["target", "draft"])
@pytest.mark.parametrize("late", [False, True])
def test_interrupt_inside_a_round(
    tiny_pipeline: Pipeline, monkeypatch: pytest.MonkeyPatch, drafter: str, at: str, late: bool
) -> None:
    """Ctrl-C in a pass of either model, before or after the engine's work: the next request is as if it never was."""
    whole = tiny_pipeline.generate(PROMPT, k=4, drafter=drafter, max_new_tokens=TOKENS)
    model = getattr(tiny_pipeline, at)
    original, passes = model.extend, 0

    def interrupted(tokens: Sequence[int], logit_rows: int) -> NDArray[np.float32]:
        nonlocal passes
        passes += 1
        if passes == 4 and not late:
            raise KeyboardInterrupt
        logits = original(tokens, logit_rows)
        if passes == 4:
            raise KeyboardInterrupt
        return logits

    stream = tiny_pipeline.stream("another text", k=4, drafter=drafter, max_new_tokens=TOKENS)
    with monkeypatch.context() as patch:
        patch.setattr(model, "extend", interrupted)
        if at == "draft" and drafter == "ngram":
            assert len(stream.result().token_ids) == TOKENS
        else:
            with pytest.raises(KeyboardInterrupt):
                list(stream)
            with pytest.raises(OutriderError, match="cut off before its end"):
                stream.result()
    again = tiny_pipeline.generate(PROMPT, k=4, drafter=drafter, max_new_tokens=TOKENS)
    assert again.token_ids == whole.token_ids
    assert again.stats.acceptance_histogram == whole.stats.acceptance_histogram


def test_a_newer_request_takes_the_cache_over_out_loud(tiny_pipeline: Pipeline) -> None:
    older = iter(tiny_pipeline.stream(PROMPT, k=2))
    next(older)
    tiny_pipeline.generate("another text", max_new_tokens=3)
    with pytest.raises(OutriderError, match="newer request"):
        list(older)


def test_a_taken_over_request_has_no_result(tiny_pipeline: Pipeline) -> None:
    """Neither a part of the text as if it were all, nor a refusal of one that was complete."""
    cut, complete = tiny_pipeline.stream(PROMPT, k=2), tiny_pipeline.stream(PROMPT, k=2, max_new_tokens=3)
    assert len([token for _, token in zip(range(3), complete, strict=False)]) == 3
    next(iter(cut))
    tiny_pipeline.generate("another text", max_new_tokens=3)
    with pytest.raises(OutriderError, match="newer request"):
        cut.result()
    with pytest.raises(OutriderError, match="cut off"):
        cut.result()
    assert len(complete.result().token_ids) == 3


def test_two_threads_on_one_pipeline(tiny_pipeline: Pipeline) -> None:
    """One of two requests may be refused, out loud; none gets another's text."""
    expected = {
        text: tiny_pipeline.generate(text, k=2, max_new_tokens=20).token_ids for text in (PROMPT, "another text")
    }
    problems: list[object] = []

    def work(text: str) -> None:
        for _ in range(25):
            try:
                found = tiny_pipeline.generate(text, k=2, max_new_tokens=20).token_ids
                if found != expected[text]:
                    problems.append(found)
            except OutriderError:
                pass
            except Exception as error:
                problems.append(error)

    threads = [Thread(target=work, args=(text,)) for text in expected]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert problems == []


def test_a_prompt_longer_than_a_prefill_chunk(smollm2_pair: Pipeline) -> None:
    """Several chunks, the last of one token: the same text as for the prompt's own plain decoding."""
    ids = smollm2_pair.codec.encode("The harbour town was built around a single stone pier. " * 60)[:513]
    prompt = smollm2_pair.codec.decode(ids)
    assert len(smollm2_pair.codec.encode(prompt)) == 513
    plain = smollm2_pair.generate(prompt, k=0, max_new_tokens=16)
    found = smollm2_pair.generate(prompt, k=4, drafter="ngram", max_new_tokens=16)
    assert found.token_ids == plain.token_ids
    assert found.stats.mean_acceptance_length > 2  # it repeats the prompt
