"""Processors against those of transformers, and what they are told: the tokens before the row, and none after."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from outrider.engines.errors import OutriderError
from outrider.runtime.accept import RULES, acceptance_rule
from outrider.runtime.choose import Chooser
from outrider.runtime.sampling.history import History, TokenCounts
from outrider.runtime.sampling.options import SamplingOptions
from outrider.runtime.sampling.processors import Processors

torch = pytest.importorskip("torch")
theirs = pytest.importorskip("transformers.generation.logits_process")

Logits = NDArray[np.float32]
VOCAB = 12
tokens = st.lists(st.integers(0, VOCAB - 1), max_size=12)
prompts = st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=8)
rows = st.lists(st.floats(-20, 20, width=32) | st.just(0.0), min_size=VOCAB, max_size=VOCAB)
penalties = st.sampled_from([0.5, 0.9, 1.1, 1.5, 3.0])


def history(prompt: Sequence[int], output: Sequence[int] = (), ends: Sequence[int] = ()) -> History:
    """Prompt, and output as it is committed."""
    made = History(prompt, ends, counting=True)
    for token in output:
        made.push(token)
    return made


def processed(
    row: Sequence[float], prompt: Sequence[int], output: Sequence[int] = (), ends: Sequence[int] = (), **options: Any
) -> Logits:
    """The row behind this history as the filters get it."""
    processors = Processors(SamplingOptions(**options), ends, VOCAB)
    assert processors.active
    return processors.apply(np.array(row, np.float32), history(prompt, output, ends))


def by_transformers(row: Sequence[float], context: Sequence[int], *processors: Any) -> Logits:
    ids, scores = torch.tensor([list(context)]), torch.tensor([list(row)], dtype=torch.float32)
    for processor in processors:
        scores = processor(ids, scores)
    return np.asarray(scores)[0]


def assert_same(ours: Logits, expected: Logits) -> None:
    np.testing.assert_allclose(ours, expected, rtol=1e-6, atol=1e-6)


@given(row=rows, prompt=prompts, output=tokens, penalty=penalties)
def test_repetition_penalty_is_that_of_transformers(
    row: list[float], prompt: list[int], output: list[int], penalty: float
) -> None:
    """Over prompt and output; over the output alone where the prompt is not to be penalized."""
    everywhere = theirs.RepetitionPenaltyLogitsProcessor(penalty)
    in_output = theirs.RepetitionPenaltyLogitsProcessor(penalty, prompt_ignore_length=len(prompt))
    context = [*prompt, *output]
    for penalize, processor in ((None, everywhere), (True, everywhere), (False, in_output)):
        ours = processed(row, prompt, output, repetition_penalty=penalty, penalize_prompt=penalize)
        assert_same(ours, by_transformers(row, context, processor))


@given(row=rows, prompt=prompts, output=tokens, presence=st.floats(-2, 2), frequency=st.floats(-2, 2))
def test_presence_and_frequency_penalties_count_the_output(
    row: list[float], prompt: list[int], output: list[int], presence: float, frequency: float
) -> None:
    """By the definition: logit - presence * (count > 0) - frequency * count; transformers has none."""
    for penalize, counted in ((None, output), (False, output), (True, [*prompt, *output])):
        counts = Counter(counted)
        expected = [x - presence * (counts[i] > 0) - frequency * counts[i] for i, x in enumerate(row)]
        options = {"presence_penalty": presence, "frequency_penalty": frequency, "penalize_prompt": penalize}
        if presence or frequency:
            assert_same(processed(row, prompt, output, **options), np.array(expected, np.float32))


@given(row=rows, prompt=prompts, bias=st.dictionaries(st.integers(0, VOCAB - 1), st.floats(-50, 50), min_size=1))
def test_logit_bias_is_the_sequence_bias_of_transformers(
    row: list[float], prompt: list[int], bias: dict[int, float]
) -> None:
    processor = theirs.SequenceBiasLogitsProcessor([[[token], value] for token, value in bias.items()])
    assert_same(processed(row, prompt, logit_bias=bias), by_transformers(row, prompt, processor))


few = st.integers(0, 2)


@given(
    row=rows,
    context=st.lists(few, min_size=1, max_size=6),
    words=st.lists(st.lists(few, min_size=1, max_size=4), min_size=1, max_size=6, unique_by=tuple),
)
def test_bad_words_are_those_of_transformers(row: list[float], context: list[int], words: list[list[int]]) -> None:
    """Of one token and of several; the beginning may lie in the prompt, and be all of it."""
    expected = by_transformers(row, context, theirs.NoBadWordsLogitsProcessor(words))
    for split in range(1, len(context) + 1):
        assert_same(processed(row, context[:split], context[split:], bad_words_ids=words), expected)


def test_a_bad_word_longer_than_the_text_does_not_bite() -> None:
    row = [1.0] * VOCAB
    assert processed(row, [3], bad_words_ids=[[2, 3, 4]]).tolist() == row
    assert processed(row, [2, 3], bad_words_ids=[[2, 3, 4]])[4] == -np.inf
    assert processed(row, [2, 3, 3], bad_words_ids=[[2, 3, 4]]).tolist() == row


@given(
    row=rows,
    prompt=prompts,
    output=st.lists(st.integers(0, VOCAB - 1), max_size=4),
    ends=st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=4, unique=True),
    least=st.integers(1, 4),
)
def test_min_new_tokens_is_that_of_transformers(
    row: list[float], prompt: list[int], output: list[int], ends: list[int], least: int
) -> None:
    """No end of sequence, of several, until so many tokens stand; the prompt does not count."""
    processor = theirs.MinNewTokensLengthLogitsProcessor(len(prompt), least, ends)
    ours = processed(row, prompt, output, ends, min_new_tokens=least)
    assert_same(ours, by_transformers(row, [*prompt, *output], processor))


@given(row=rows, allowed=st.sets(st.integers(0, VOCAB - 1), min_size=1), ends=st.sets(st.integers(0, VOCAB - 1)))
def test_only_allowed_tokens_and_ends_are_left(row: list[float], allowed: set[int], ends: set[int]) -> None:
    """An answer out of few tokens must still be able to end."""
    kept = allowed | ends
    ours = processed(row, [1], [2], sorted(ends), allowed_token_ids=allowed)
    assert ours.tolist() == [x if token in kept else -np.inf for token, x in enumerate(row)]


@given(row=rows, prompt=prompts, output=tokens, penalty=penalties, bias=st.floats(-5, 5))
def test_processors_come_in_the_order_of_transformers(
    row: list[float], prompt: list[int], output: list[int], penalty: float, bias: float
) -> None:
    """As ``generate`` stacks them: bias, repetition penalty, bad words, least length; own processors last."""
    context, ends = [*prompt, *output], [4, 5]
    last, words = context[-1], [[context[-1], 3], [1]]
    seen: list[Logits] = []

    def watch(tokens: Sequence[int], logits: Logits) -> Logits:
        seen.append(logits.copy())
        return logits

    stack = (
        theirs.SequenceBiasLogitsProcessor([[[token], bias] for token in (0, last)]),
        theirs.RepetitionPenaltyLogitsProcessor(penalty),
        theirs.NoBadWordsLogitsProcessor(words),
        theirs.MinNewTokensLengthLogitsProcessor(len(prompt), 6, ends),
    )
    ours = processed(
        row,
        prompt,
        output,
        ends,
        logit_bias={0: bias, last: bias},
        repetition_penalty=penalty,
        bad_words_ids=words,
        min_new_tokens=6,
        processors=[watch],
    )
    assert_same(ours, by_transformers(row, context, *stack))
    assert_same(seen[0], ours)


def test_masks_are_stronger_than_bias() -> None:
    """No bias brings a forbidden token back."""
    row, huge = [0.0] * VOCAB, {3: 1e6, 4: 1e6, 5: 1e6}
    options = {"bad_words_ids": [[3], [7, 4]], "allowed_token_ids": [1, 3, 4, 5], "min_new_tokens": 1}
    ours = processed(row, [7], [], [5], logit_bias=huge, **options)
    assert np.flatnonzero(np.isfinite(ours)).tolist() == [1]


# A request that asks for everything at once.

EVERYTHING: dict[str, Any] = {
    "repetition_penalty": 1.2,
    "presence_penalty": 0.3,
    "frequency_penalty": 0.2,
    "logit_bias": {1: 1.0},
    "bad_words_ids": [[1, 1], [2, 3, 4]],
    "min_new_tokens": 2,
    "allowed_token_ids": list(range(1, VOCAB)),
    "processors": [lambda tokens, logits: logits - np.float32(len(tokens))],
}


def choosing(history: History, temperature: float | None = None, **options: Any) -> Chooser:
    return Chooser(SamplingOptions(temperature=temperature, **options), history, 0, VOCAB)


@pytest.mark.parametrize("temperature", [None, 1.0])
def test_the_models_logits_are_not_changed(temperature: float | None) -> None:
    """They are the engine's buffer; raw log-probabilities are taken from them afterwards."""
    row = np.random.default_rng(0).normal(size=VOCAB).astype(np.float32)
    before = row.copy()
    row.setflags(write=False)
    chooser = choosing(history([1, 2, 3], [2, 3], [0]), temperature, **EVERYTHING)
    chooser.choose(row)
    chooser.distribution(row)
    assert np.array_equal(row, before)


@given(row=rows, prompt=prompts, output=tokens, extra=tokens)
def test_what_is_taken_back_was_never_there(
    row: list[float], prompt: list[int], output: list[int], extra: list[int]
) -> None:
    """Drafts that were pushed and rolled back leave no trace in any processor."""
    fresh = history(prompt, output, [0])
    used = history(prompt, output, [0])
    for token in extra:
        used.push(token)
    used.rollback(len(fresh))
    logits = np.array(row, np.float32)
    one, other = (choosing(each, 1.0, **EVERYTHING).distribution(logits) for each in (fresh, used))
    assert one.ids.tolist() == other.ids.tolist()
    assert one.weights.tolist() == other.weights.tolist()


# Processors of the user's own.


@pytest.mark.parametrize("rule", RULES)
def test_a_custom_processor_gets_the_tokens_before_each_row(rule: str) -> None:
    """As a tuple: prompt, output and the drafts before the row, and none of those behind it."""
    seen: list[tuple[int, ...]] = []

    def forced(tokens: Sequence[int], logits: Logits) -> Logits:
        """Token n + 1 behind n tokens."""
        assert type(tokens) is tuple
        seen.append(tokens)
        forced = np.full_like(logits, -np.inf)
        forced[len(tokens) + 1] = logits.max()
        return forced

    prompt = history([9, 9], [9])
    chooser, judge = choosing(prompt, 1.0, processors=[forced]), acceptance_rule(rule)
    drafts = []
    for _ in range(3):
        drafts.append(judge.draft(chooser, np.zeros(VOCAB, np.float32)))
        prompt.push(drafts[-1].token)
    prompt.rollback(3)
    assert [draft.token for draft in drafts] == [4, 5, 6]
    assert seen == [(9, 9, 9), (9, 9, 9, 4), (9, 9, 9, 4, 5)]
    seen.clear()
    for verdict in judge.accept(chooser, drafts, np.zeros((4, VOCAB), np.float32)):
        prompt.push(verdict.token)
    assert prompt.tokens == [9, 9, 9, 4, 5, 6, 7]
    assert seen == [(9, 9, 9), (9, 9, 9, 4), (9, 9, 9, 4, 5), (9, 9, 9, 4, 5, 6)]


def test_custom_processors_work_one_on_anothers_result() -> None:
    """In place or not, as float32 whatever number type comes back."""

    def in_place(tokens: Sequence[int], logits: Logits) -> Logits:
        logits += 1
        return logits

    def doubled(tokens: Sequence[int], logits: Logits) -> list[float]:
        return [2.0 * x for x in logits.tolist()]

    row = np.linspace(-1, 1, VOCAB)
    ours = processed(row.tolist(), [1], processors=[in_place, doubled, in_place])
    assert ours.dtype == np.float32
    assert_same(ours, (2 * (row + 1) + 1).astype(np.float32))


def test_a_custom_processor_may_keep_what_it_returned() -> None:
    """The next one works on logits of its own, so that a table that is returned again and again stays as it is."""
    table = np.zeros(VOCAB, np.float32)

    def masked(tokens: Sequence[int], logits: Logits) -> Logits:
        logits[3] = -np.inf
        return logits

    assert processed([1.0] * VOCAB, [1], processors=[lambda tokens, logits: table, masked])[3] == -np.inf
    assert table.tolist() == [0.0] * VOCAB


WRONG: dict[str, Callable[[Logits], Any]] = {
    "none": lambda logits: None,
    "number": lambda logits: 1.0,
    "text": lambda logits: "logits",
    "mapping": lambda logits: {0: 1.0},
    "ragged": lambda logits: [[1.0], [2.0, 3.0]],
    "short": lambda logits: logits[:-1],
    "long": lambda logits: np.append(logits, 0),
    "row": lambda logits: logits[None],
    "column": lambda logits: logits[:, None],
}


@pytest.mark.parametrize("wrong", WRONG.values(), ids=WRONG)
def test_a_custom_processor_that_returns_no_logits_is_refused_by_name(wrong: Callable[[Logits], Any]) -> None:
    def my_processor(tokens: Sequence[int], logits: Logits) -> Any:
        return wrong(logits)

    with pytest.raises(OutriderError, match=r"^processor my_processor returned ") as refused:
        processed([0.0] * VOCAB, [1], processors=[my_processor])
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("temperature", [None, 1.0])
def test_a_custom_processor_that_makes_no_numbers_is_refused(temperature: float | None) -> None:
    def divided(tokens: Sequence[int], logits: Logits) -> Logits:
        with np.errstate(invalid="ignore"):
            return logits / np.float32(0)

    with pytest.raises(OutriderError, match="hold nan; check the model or the processors"):
        choosing(history([1]), temperature, processors=[divided]).choose(np.zeros(VOCAB, np.float32))


# The history.


def as_counter(counts: TokenCounts | None) -> Counter[int]:
    assert counts is not None
    assert len(set(counts.ids.tolist())) == len(counts.ids) == len(counts.counts)
    assert (counts.counts > 0).all()
    return Counter(dict(zip(counts.ids.tolist(), counts.counts.tolist(), strict=True)))


@given(first=st.lists(st.integers(0, 5)), steps=st.lists(st.integers(0, 5) | st.none(), max_size=200))
def test_token_counts_are_those_of_a_counter(first: list[int], steps: list[int | None]) -> None:
    """A number is pushed, None takes the last one back; what the sequence began with stays, as a prompt does."""
    counts, pushed = TokenCounts(first), list[int]()
    for token in steps:
        if token is not None:
            counts.push(token)
            pushed.append(token)
        elif pushed:
            counts.pop(pushed.pop())
        assert as_counter(counts) == Counter(first + pushed)


def test_token_counts_grow_beyond_any_room() -> None:
    counts = TokenCounts(range(10))
    for token in range(500):
        counts.push(token)
    assert as_counter(counts) == Counter([*range(10), *range(500)])
    for token in reversed(range(500)):
        counts.pop(token)
    assert as_counter(counts) == Counter(range(10))


class Spelled:
    """Stands for a grammar's state: the tokens it was given, the last of which can be taken back."""

    def __init__(self) -> None:
        self.tokens: list[int] = []

    @property
    def complete(self) -> bool:
        return len(self.tokens) >= 4

    def push(self, token: int) -> None:
        self.tokens.append(token)

    def rollback(self, count: int) -> None:
        assert 0 <= count <= len(self.tokens)
        del self.tokens[len(self.tokens) - count :]


def state(history: History) -> tuple[Any, ...]:
    """All that can be seen of a history."""
    counts = as_counter(history.all_counts), as_counter(history.output_counts)
    assert isinstance(history.grammar, Spelled)
    spelled = list(history.grammar.tokens)
    return list(history.tokens), len(history), history.output_length, *counts, spelled, history.ended()


def grown(prompt: Sequence[int], output: Sequence[int], ends: Sequence[int]) -> History:
    made = History(prompt, ends, Spelled(), counting=True)  # type: ignore[arg-type]
    for token in output:
        made.push(token)
    return made


@given(
    prompt=prompts,
    ends=st.sets(st.integers(0, VOCAB - 1), max_size=3),
    steps=st.lists(st.integers(0, VOCAB - 1) | st.floats(0, 1), max_size=30),
)
def test_rollback_restores_everything(prompt: list[int], ends: set[int], steps: list[int | float]) -> None:
    """Tokens are pushed, and now and then some part of the output is taken back: as if they had never been there."""
    changed, output = grown(prompt, [], ends), list[int]()
    for step in steps:
        if isinstance(step, int):
            changed.push(step)
            output.append(step)
        else:
            del output[int(step * len(output)) :]
            changed.rollback(len(prompt) + len(output))
        assert state(changed) == state(grown(prompt, output, ends))
        assert changed.grammar.tokens == [token for token in output if token not in ends]


def test_an_end_in_the_prompt_ends_nothing() -> None:
    """Chat templates close each message with one."""
    ended = History([5, 0], [0])
    assert not ended.ended()
    ended.push(0)
    assert ended.ended()
    ended.rollback(2)
    assert not ended.ended()
