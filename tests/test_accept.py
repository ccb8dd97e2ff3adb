"""Acceptance rules: the law of the text is the target's, computed exactly and drawn; and who stands, case by case."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from laws import chi_square_p
from numpy.typing import NDArray

from outrider.engines.errors import OutriderError
from outrider.runtime.accept import (
    RULES,
    AcceptanceRule,
    Draft,
    ResidualRule,
    Verdict,
    acceptance_rule,
    block_thresholds,
    likelihood_ratio,
    residual,
)
from outrider.runtime.choose import Chooser
from outrider.runtime.commit import Origin
from outrider.runtime.sampling.filters import Distribution
from outrider.runtime.sampling.history import History
from outrider.runtime.sampling.noise import Stream
from outrider.runtime.sampling.options import SamplingOptions

LOSSLESS = ["exact", "residual", "block"]
Floats = NDArray[np.float64]
# The probability of the right law failing a check by chance; seeds are fixed, so that none does now.
CHANCE = 1e-4


# The law of the text, exactly: over all draft paths and all numbers of accepted drafts.


@dataclass(frozen=True)
class Laws:
    """``target[i]`` and ``draft[i]``: float64 ``[V] * (i + 1)``, the law of token i given the i tokens before it."""

    vocab: int
    k: int
    target: list[Floats]
    draft: list[Floats]


# (probability, law of the token that follows) of each number of accepted drafts, 0 to K, given K drafts.
Outcomes = Callable[[Sequence[Distribution], Sequence[Distribution], Sequence[int]], list[tuple[float, Distribution]]]


def residual_outcomes(
    targets: Sequence[Distribution], laws: Sequence[Distribution], tokens: Sequence[int]
) -> list[tuple[float, Distribution]]:
    reached, outcomes = 1.0, []
    for target, law, token in zip(targets, laws, tokens, strict=False):
        ratio = min(1.0, likelihood_ratio(target, law, token))
        outcomes.append((reached * (1 - ratio), residual(target, law)))
        reached *= ratio
    return [*outcomes, (reached, targets[-1])]


def block_outcomes(
    targets: Sequence[Distribution], laws: Sequence[Distribution], tokens: Sequence[int]
) -> list[tuple[float, Distribution]]:
    """The largest i whose number passes its threshold h_i, so that all behind it missed theirs."""
    thresholds, scales = block_thresholds(targets[:-1], laws, tokens)
    following = [*map(residual, targets, laws, scales), targets[-1]]
    missed, outcomes = 1.0, []
    for threshold, law in zip([*thresholds[::-1], 1.0], following[::-1], strict=True):
        outcomes.append((missed * threshold, law))
        missed *= 1 - threshold
    return outcomes[::-1]


OUTCOMES: dict[str, Outcomes] = {"residual": residual_outcomes, "block": block_outcomes}


def distribution(row: Floats) -> Distribution:
    """Weights of any sum are a law."""
    return Distribution(np.flatnonzero(row), 3 * row[row > 0])


def joint(steps: Sequence[Floats], begun: Sequence[Floats] | None = None) -> Floats:
    """The law of whole sequences from that of each token; ``begun[i]`` adds sequences that go on behind token i."""
    law = steps[0] if begun is None else begun[0]
    for i, step in enumerate(steps[1:], 1):
        law = law[..., None] * step + (0 if begun is None else begun[i])
    return law


def spoken(laws: Laws, outcomes: Outcomes) -> tuple[Floats, float]:
    """The law of K + 1 tokens of which the first come from one round and the rest from the target; mean accepted."""
    emitted = [np.zeros_like(step) for step in laws.target]
    accepted = 0.0
    for path in itertools.product(range(laws.vocab), repeat=laws.k):
        drawn = math.prod(law[path[: i + 1]] for i, law in enumerate(laws.draft))
        if drawn == 0:
            continue
        targets = [distribution(law[path[:i]]) for i, law in enumerate(laws.target)]
        drafts = [distribution(law[path[:i]]) for i, law in enumerate(laws.draft)]
        for count, (probability, following) in enumerate(outcomes(targets, drafts, path)):
            emitted[count][path[:count]][following.ids] += drawn * probability * following.probabilities
            accepted += drawn * probability * count
    return joint(laws.target, emitted), accepted


@st.composite
def laws_by_prefix(draw: st.DrawFn, one_hot_drafts: bool = False) -> Laws:
    """Rows of few different numbers: zeros, one-hot rows and rows equal in target and draft are common."""
    vocab, k = draw(st.tuples(st.integers(3, 6), st.integers(1, 4)).filter(lambda size: size[0] ** size[1] <= 256))
    one_hot = st.integers(0, vocab - 1).map(lambda token: np.eye(vocab)[token])
    numbers = st.lists(st.integers(0, 4), min_size=vocab, max_size=vocab).filter(any).map(np.array)
    rows = st.lists(st.one_of(numbers, one_hot), min_size=2, max_size=6)
    target, draft = draw(rows), draw(st.lists(one_hot, min_size=1, max_size=4) if one_hot_drafts else rows)
    if draw(st.booleans()) and not one_hot_drafts:
        draft = target
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    return Laws(vocab, k, tables(target, vocab, k + 1, rng), tables(draft, vocab, k, rng))


def tables(rows: Sequence[NDArray[Any]], vocab: int, length: int, rng: np.random.Generator) -> list[Floats]:
    """A law for each prefix shorter than ``length``, out of ``rows``."""
    stacked = np.array([row / row.sum() for row in rows])
    return [stacked[rng.integers(len(rows), size=[vocab] * i)] for i in range(length)]


def random_laws(vocab: int, k: int, seed: int) -> Laws:
    rng = np.random.default_rng(seed)
    target, draft = ([rng.dirichlet(np.full(vocab, 0.5), [vocab] * i) for i in range(n)] for n in (k + 1, k))
    return Laws(vocab, k, target, draft)


@pytest.mark.parametrize("rule", OUTCOMES)
@settings(deadline=None, max_examples=60)
@given(laws=laws_by_prefix())
def test_the_law_of_the_text_is_the_targets(rule: str, laws: Laws) -> None:
    law, _ = spoken(laws, OUTCOMES[rule])
    assert np.abs(law - joint(laws.target)).max() < 1e-12


@pytest.mark.parametrize("rule", OUTCOMES)
@pytest.mark.parametrize(("vocab", "k"), [(6, 4), (3, 4), (5, 3)])
def test_the_law_of_the_text_is_the_targets_for_any_numbers(rule: str, vocab: int, k: int) -> None:
    laws = random_laws(vocab, k, seed=vocab * k)
    law, accepted = spoken(laws, OUTCOMES[rule])
    assert np.abs(law - joint(laws.target)).max() < 1e-12
    assert 0.2 < accepted < k


def test_the_exact_law_finds_a_fault() -> None:
    """What the tests above would say of a block rule that judges token by token, or whose residual is not scaled."""
    laws = random_laws(4, 2, seed=0)

    def unscaled(targets: Any, drafts: Any, tokens: Any) -> list[tuple[float, Distribution]]:
        plain = [*map(residual, targets, drafts), targets[-1]]
        return [(chance, law) for (chance, _), law in zip(block_outcomes(targets, drafts, tokens), plain, strict=True)]

    def token_criterion(targets: Any, drafts: Any, tokens: Any) -> list[tuple[float, Distribution]]:
        chances = [chance for chance, _ in residual_outcomes(targets, drafts, tokens)]
        return [
            (chance, law) for chance, (_, law) in zip(chances, block_outcomes(targets, drafts, tokens), strict=True)
        ]

    for wrong in (unscaled, token_criterion):
        assert np.abs(spoken(laws, wrong)[0] - joint(laws.target)).max() > 1e-6


@settings(deadline=None, max_examples=60)
@given(laws=laws_by_prefix())
def test_block_accepts_no_fewer_drafts(laws: Laws) -> None:
    assert spoken(laws, block_outcomes)[1] >= spoken(laws, residual_outcomes)[1] - 1e-12


def test_block_accepts_more_in_the_papers_example() -> None:
    """Two tokens, target (1/3, 2/3), draft (2/3, 1/3), K = 2: 11/9 drafts stand instead of 10/9."""
    target, draft = np.array([1 / 3, 2 / 3]), np.array([2 / 3, 1 / 3])
    everywhere = [np.broadcast_to(target, [2] * i + [2]) for i in range(3)]
    laws = Laws(2, 2, everywhere, [np.broadcast_to(draft, [2] * i + [2]) for i in range(2)])
    assert spoken(laws, residual_outcomes)[1] == pytest.approx(10 / 9, abs=1e-12)
    assert spoken(laws, block_outcomes)[1] == pytest.approx(11 / 9, abs=1e-12)


@settings(deadline=None, max_examples=60)
@given(laws=laws_by_prefix(one_hot_drafts=True))
def test_block_and_residual_are_one_rule_for_one_hot_drafts(laws: Laws) -> None:
    """A draft that was not drawn leaves nothing to share between positions."""
    (one, one_accepted), (other, other_accepted) = (spoken(laws, OUTCOMES[rule]) for rule in ("block", "residual"))
    assert np.abs(one - other).max() < 1e-12
    assert one_accepted == pytest.approx(other_accepted, abs=1e-12)


@settings(deadline=None, max_examples=60)
@given(laws=laws_by_prefix(), data=st.data())
def test_block_needs_no_target_behind_an_impossible_draft(laws: Laws, data: st.DataObject) -> None:
    """Behind it nothing stands, and a history with it may have no law at all."""
    path = tuple(data.draw(st.integers(0, laws.vocab - 1)) for _ in range(laws.k))
    targets = [distribution(law[path[:i]]) for i, law in enumerate(laws.target[:-1])]
    drafts = [Distribution.one_hot(token) for token in path]
    thresholds, scales = block_thresholds(targets, drafts, path)
    impossible = [i for i, target in enumerate(targets) if target.probability(path[i]) == 0]
    needed = impossible[0] + 1 if impossible else laws.k
    assert block_thresholds(targets[:needed], drafts, path) == (thresholds[:needed], scales[: needed + 1])
    assert not any(thresholds[needed:])
    assert not impossible or thresholds[needed - 1] == 0


# The rule objects, driven by the project's own chooser and history.


@dataclass(frozen=True)
class World:
    """Logits of target and draft, float32 ``[V, V, V]``, given the last two tokens."""

    target: NDArray[np.float32]
    draft: NDArray[np.float32]

    @classmethod
    def random(cls, vocab: int, seed: int) -> World:
        rng = np.random.default_rng(seed)
        target = rng.normal(size=(vocab, vocab, vocab))
        return cls(target.astype(np.float32), (target + 1.5 * rng.normal(size=target.shape)).astype(np.float32))

    @property
    def vocab(self) -> int:
        return len(self.target)


PROMPT = (0, 0)


def spoken_by(
    world: World, rule: AcceptanceRule, chooser: Chooser, length: int, k: int, proposed: Sequence[int] = ()
) -> list[Verdict]:
    """``length`` tokens, round by round as ``decode`` does; drafts are ``proposed`` at their positions, or drawn."""
    history, verdicts = chooser.history, []
    while len(verdicts) < length:
        start, room = len(history), min(k, length - len(verdicts) - 1)
        rows, drafts = [world.target[tuple(history.tokens[-2:])]], []
        for _ in range(room):
            logits = world.draft[tuple(history.tokens[-2:])]
            at = len(history) - len(PROMPT)
            drafts.append(Draft(proposed[at]) if proposed else rule.draft(chooser, logits))
            history.push(drafts[-1].token)
            rows.append(world.target[tuple(history.tokens[-2:])])
        history.rollback(start)
        for verdict in rule.accept(chooser, drafts, np.stack(rows)):
            history.push(verdict.token)
            verdicts.append(verdict)
    return verdicts


def new_chooser(options: SamplingOptions, seed: int, vocab: int, kind: type[Chooser] = Chooser) -> Chooser:
    return kind(options, History(PROMPT, counting=options.penalizing), seed, vocab)


def counts_of_texts(
    world: World, rule: Callable[[], AcceptanceRule], options: SamplingOptions, texts: int, length: int, k: int
) -> NDArray[np.int64]:
    """How often each text of ``length`` tokens was spoken, over the seeds 0 to ``texts - 1``."""
    counts = np.zeros([world.vocab] * length, np.int64)
    for seed in range(texts):
        verdicts = spoken_by(world, rule(), new_chooser(options, seed, world.vocab), length, k)
        counts[tuple(verdict.token for verdict in verdicts)] += 1
    return counts


def plain_law(world: World, options: SamplingOptions, length: int) -> Floats:
    """The law of ``length`` tokens of plain sampling, from the definitions of the options."""
    law = np.zeros([world.vocab] * length)
    for text in itertools.product(range(world.vocab), repeat=length):
        tokens = [*PROMPT, *text]
        law[text] = math.prod(
            plain_row(world.target[tokens[i], tokens[i + 1]], options, text[:i])[text[i]] for i in range(length)
        )
    return law


def plain_row(logits: NDArray[np.float32], options: SamplingOptions, output: Sequence[int]) -> Floats:
    assert options.temperature is not None
    scores = logits - options.frequency_penalty * np.bincount(output, minlength=len(logits))
    law = np.exp(scores / options.temperature)
    ordered = np.sort(law)[::-1]
    if options.top_k:
        law = np.where(law >= ordered[options.top_k - 1], law, 0)
    if options.top_p < 1:
        enough = int(np.argmax(np.cumsum(ordered) >= options.top_p * ordered.sum()))
        law = np.where(law >= ordered[enough], law, 0)
    law = np.where(law >= options.min_p * ordered[0], law, 0)
    return law / law.sum()


SAMPLING = {
    "temperature 1": SamplingOptions(temperature=1.0),
    "top-k": SamplingOptions(temperature=0.8, top_k=3),
    "top-p": SamplingOptions(temperature=1.0, top_p=0.8),
    "min-p": SamplingOptions(temperature=1.2, min_p=0.2),
    "frequency penalty": SamplingOptions(temperature=1.0, frequency_penalty=1.0),
}
TEXTS = {"exact": 10_000, "residual": 5_000, "block": 5_000}


@pytest.mark.parametrize("options", SAMPLING.values(), ids=[name.replace(" ", "-") for name in SAMPLING])
@pytest.mark.parametrize("rule", LOSSLESS)
def test_what_is_spoken_has_the_law_of_plain_sampling(rule: str, options: SamplingOptions) -> None:
    """Four tokens in one to four rounds: positions behind a miss are drafted again."""
    world = World.random(4, seed=0)
    counts = counts_of_texts(world, lambda: acceptance_rule(rule), options, TEXTS[rule], length=4, k=3)
    law = plain_law(world, options, 4)
    filtering = options.top_k or options.top_p < 1 or options.min_p
    assert bool((law == 0).any()) is bool(filtering), "the filters are at work"
    assert chi_square_p(counts, law * TEXTS[rule]) > CHANCE


class NewEachRound:
    """A rule that forgets how many rounds there were: a position that is drafted again gets its old noise again."""

    def __init__(self, name: str) -> None:
        self._name = name

    def draft(self, chooser: Chooser, logits: NDArray[np.float32]) -> Draft:
        return acceptance_rule(self._name).draft(chooser, logits)

    def accept(self, chooser: Chooser, drafts: Sequence[Draft], rows: NDArray[np.float32]) -> Any:
        return acceptance_rule(self._name).accept(chooser, drafts, rows)


def test_block_needs_new_noise_each_round() -> None:
    """Whether a draft stood under block tells something about those behind it, so their noise may not come again."""
    world, options = World.random(3, seed=0), SAMPLING["temperature 1"]
    expected = plain_law(world, options, 4) * 5000
    kept = counts_of_texts(world, lambda: acceptance_rule("block"), options, 5000, length=4, k=3)
    used_again = counts_of_texts(world, lambda: NewEachRound("block"), options, 5000, length=4, k=3)
    assert chi_square_p(kept, expected) > CHANCE
    assert chi_square_p(used_again, expected) < 1e-12


def first_tokens(
    rule: Callable[[], AcceptanceRule],
    logits: NDArray[np.float32],
    propose: Callable[[AcceptanceRule, Chooser], Draft],
    seeds: int,
) -> NDArray[np.int64]:
    """How often each token comes first in a round of one draft, at temperature 1."""
    counts = np.zeros(len(logits), np.int64)
    for seed in range(seeds):
        one, chooser = rule(), new_chooser(SAMPLING["temperature 1"], seed, len(logits))
        draft = propose(one, chooser)
        counts[next(iter(one.accept(chooser, [draft], np.stack([logits, logits])))).token] += 1
    return counts


def logs(*row: float) -> NDArray[np.float32]:
    with np.errstate(divide="ignore"):
        return np.log(np.array(row)).astype(np.float32)


class TargetNoiseRule(ResidualRule):
    """Draws its drafts by the numbers that the correction is drawn by."""

    def draft(self, chooser: Chooser, logits: NDArray[np.float32]) -> Draft:
        law = chooser.distribution(logits)
        return Draft(chooser.draw(law, Stream.TARGET), law)


def test_draft_noise_does_not_overlap_the_verifiers() -> None:
    """A correction drawn by the numbers that chose the draft is no draw from the residual."""
    target, draft = logs(0.02, 0.60, 0.38), logs(0.60, 0.38, 0.02)
    expected = np.exp(target.astype(float)) * 4000

    def counts(rule: Callable[[], AcceptanceRule]) -> NDArray[np.int64]:
        return first_tokens(rule, target, lambda one, chooser: one.draft(chooser, draft), 4000)

    assert chi_square_p(counts(lambda: acceptance_rule("residual")), expected) > CHANCE
    assert chi_square_p(counts(lambda: acceptance_rule("block")), expected) > CHANCE
    assert chi_square_p(counts(TargetNoiseRule), expected) < 1e-12


class Recording(Chooser):
    """Notes the place of each random number: (position, stream, round)."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.used: list[tuple[int, Stream, int]] = []

    def choose(self, logits: NDArray[np.float32]) -> int:
        self.used.append((len(self.history), Stream.TARGET, 0))
        return super().choose(logits)

    def draw(self, distribution: Distribution, stream: Stream = Stream.TARGET, round_number: int = 0) -> int:
        self.used.append((len(self.history), stream, round_number))
        return super().draw(distribution, stream, round_number)

    def uniform(self, stream: Stream, round_number: int) -> float:
        self.used.append((len(self.history), stream, round_number))
        return super().uniform(stream, round_number)


@pytest.mark.parametrize("rule", ["residual", "block", "lossy-typical"])
def test_no_random_number_is_used_twice(rule: str) -> None:
    """In a request with misses: each draft, each judgement and each of the target's tokens has numbers of its own."""
    world, drafted_again = World.random(5, seed=3), 0
    for seed in range(20):
        chooser = new_chooser(SAMPLING["temperature 1"], seed, world.vocab, Recording)
        assert isinstance(chooser, Recording)
        spoken_by(world, acceptance_rule(rule), chooser, length=12, k=4)
        assert len(set(chooser.used)) == len(chooser.used)
        drafts = Counter(position for position, stream, _ in chooser.used if stream is Stream.DRAFT)
        drafted_again += sum(count > 1 for count in drafts.values())
    assert drafted_again > 20


@pytest.mark.parametrize("rule", ["residual", "block"])
def test_argmax_draft_with_softmax_q(rule: str) -> None:
    """q is the law that the draft was drawn from: one-hot for an argmax, whatever the logits behind it."""
    target, draft = logs(0.4, 0.3, 0.2, 0.1), logs(0.5, 0.1, 0.2, 0.2)
    expected = np.exp(target.astype(float)) * 3000

    def counts(law: Distribution | None) -> NDArray[np.int64]:
        return first_tokens(lambda: acceptance_rule(rule), target, lambda *_: Draft(0, law), 3000)

    softmax = Distribution(np.arange(4), np.exp(draft.astype(float)))
    assert chi_square_p(counts(None), expected) > CHANCE
    assert chi_square_p(counts(Distribution.one_hot(0)), expected) > CHANCE
    assert chi_square_p(counts(softmax), expected) < 1e-12


# Exact means token for token.

requests = st.builds(
    SamplingOptions,
    temperature=st.sampled_from([None, 0.6, 1.0, 1.5]),
    repetition_penalty=st.sampled_from([1.0, 1.3]),
    frequency_penalty=st.sampled_from([0.0, 0.7]),
    bad_words_ids=st.sampled_from([(), ((1, 2), (2, 2, 0))]),
    logit_bias=st.sampled_from([{}, {3: 1.5}]),
)


@settings(deadline=None)
@given(
    options=requests,
    seed=st.integers(0, 2**64 - 1),
    k=st.integers(1, 6),
    proposed=st.lists(st.integers(0, 4), max_size=12),
)
def test_exact_speaks_the_text_of_plain_decoding(
    options: SamplingOptions, seed: int, k: int, proposed: list[int]
) -> None:
    """The same seed gives the same tokens for any K and any drafts, drawn or made up."""
    world = World.random(5, seed=1)
    length = len(proposed) or 12
    plain = spoken_by(world, acceptance_rule("exact"), new_chooser(options, seed, 5), length, 0)
    speculative = spoken_by(world, acceptance_rule("exact"), new_chooser(options, seed, 5), length, k, proposed)
    assert [verdict.token for verdict in speculative] == [verdict.token for verdict in plain]
    assert {verdict.origin for verdict in plain} == {Origin.PLAIN}


@pytest.mark.parametrize("rule", RULES)
@settings(deadline=None, max_examples=30)
@given(k=st.integers(0, 5), seed=st.integers(0, 100), options=requests.filter(lambda options: options.greedy))
def test_every_rule_is_exact_when_greedy(rule: str, k: int, seed: int, options: SamplingOptions) -> None:
    """The same tokens, of the same origins."""
    world = World.random(5, seed)
    exact, other = (
        spoken_by(world, acceptance_rule(name), new_chooser(options, 0, 5), 12, k) for name in ("exact", rule)
    )
    assert [verdict[:2] for verdict in other] == [verdict[:2] for verdict in exact]


# Rounds, one by one.


class Numbered(Chooser):
    """Whether drafts stand is decided by these numbers, one for each position of a round."""

    numbers: Sequence[float] = ()

    def uniform(self, stream: Stream, round_number: int) -> float:
        return self.numbers[len(self.history) - self.history.prompt_length]


def judge(
    rule: str,
    rows: NDArray[np.float32],
    drafts: Sequence[Draft],
    numbers: Sequence[float] | None = None,
    options: SamplingOptions = SAMPLING["temperature 1"],
    seed: int = 0,
) -> list[Verdict]:
    """The verdicts of one round on ``drafts``."""
    chooser = new_chooser(options, seed, rows.shape[1], Chooser if numbers is None else Numbered)
    if numbers is not None:
        assert isinstance(chooser, Numbered)
        chooser.numbers = numbers
    verdicts = []
    for verdict in acceptance_rule(rule).accept(chooser, drafts, rows):
        chooser.history.push(verdict.token)
        verdicts.append(verdict)
    return verdicts


def accepted(verdicts: Sequence[Verdict]) -> int:
    """Accepted drafts, which come first; then comes one token of the target's own."""
    count = sum(verdict.origin is Origin.ACCEPTED for verdict in verdicts)
    assert all(verdict.origin is Origin.ACCEPTED for verdict in verdicts[:count])
    assert len(verdicts) == count + 1
    return count


@st.composite
def rounds(draw: st.DrawFn) -> tuple[NDArray[np.float32], list[Draft], list[float]]:
    """Target logits of K + 1 rows, K drafts with a law each, and the numbers that decide."""
    vocab, k = 5, draw(st.integers(1, 5))
    row = st.lists(st.integers(0, 4), min_size=vocab, max_size=vocab).filter(any)
    rows = np.stack([logs(*draw(row)) for _ in range(k + 1)])
    drafts = []
    for _ in range(k):
        law = distribution(np.array(draw(row), float))
        drafts.append(Draft(int(draw(st.sampled_from(law.ids.tolist()))), law if draw(st.booleans()) else None))
    return rows, drafts, draw(st.lists(st.floats(2**-54, 1 - 2**-53), min_size=k, max_size=k))


@settings(deadline=None)
@given(case=rounds())
def test_the_rules_do_what_the_formulas_say(case: tuple[NDArray[np.float32], list[Draft], list[float]]) -> None:
    """Residual stops at the first miss; block takes the largest i that passes; the next token is from the residual."""
    rows, drafts, numbers = case
    chooser = new_chooser(SAMPLING["temperature 1"], 0, rows.shape[1])
    targets = [chooser.distribution(row) for row in rows]
    laws = [law or Distribution.one_hot(token) for token, law in drafts]
    tokens = [draft.token for draft in drafts]

    ratios = [likelihood_ratio(*of) for of in zip(targets, laws, tokens, strict=False)]
    missed = [i for i, (number, ratio) in enumerate(zip(numbers, ratios, strict=True)) if not number < ratio]
    stand = missed[0] if missed else len(drafts)
    check(judge("residual", rows, drafts, numbers), drafts, stand, [*map(residual, targets, laws), targets[-1]][stand])

    thresholds, scales = block_thresholds(targets[:-1], laws, tokens)
    passed = [i for i, (number, threshold) in enumerate(zip(numbers, thresholds, strict=True), 1) if number < threshold]
    stand = max(passed, default=0)
    following = [*map(residual, targets, laws, scales), targets[-1]][stand]
    check(judge("block", rows, drafts, numbers), drafts, stand, following)


def check(verdicts: Sequence[Verdict], drafts: Sequence[Draft], stand: int, following: Distribution) -> None:
    assert accepted(verdicts) == stand
    assert [verdict.token for verdict in verdicts[:stand]] == [draft.token for draft in drafts[:stand]]
    assert verdicts[stand].token in following.ids
    assert verdicts[stand].origin is (Origin.BONUS if stand == len(drafts) else Origin.CORRECTION)


@pytest.mark.parametrize("rule", RULES)
def test_each_verdict_names_the_row_that_decided_it(rule: str) -> None:
    """Log-probabilities are taken from it."""
    rows = np.stack([logs(*np.roll((0.97, 0.01, 0.01, 0.01), i)) for i in range(4)])
    for wrong in range(4):
        drafts = [Draft((i + (i == wrong)) % 4) for i in range(3)]
        verdicts = judge(rule, rows, drafts, options=SamplingOptions())
        assert accepted(verdicts) == wrong
        assert all(np.array_equal(verdict.logits, row) for verdict, row in zip(verdicts, rows, strict=False))


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("number", [0.0, 2**-54], ids=["zero", "smallest"])
def test_an_impossible_draft_never_stands(rule: str, number: float) -> None:
    """The comparison is strict: u < p/q is false for p = 0, even with the smallest u."""
    rows = np.stack([logs(0, 0.5, 0.5)] * 3)
    for drafts in ([Draft(0), Draft(1)], [Draft(0, distribution(np.array([0.9, 0.1, 0])))] * 2):
        assert accepted(judge(rule, rows, drafts, [number, number])) == 0
    rows[0] = logs(0, 1, 0)
    assert accepted(judge(rule, rows, [Draft(1), Draft(0)], [number, number])) == 1


@pytest.mark.parametrize("rule", ["residual", "block"])
def test_a_number_equal_to_the_ratio_is_a_miss(rule: str) -> None:
    """Strict here too, or a ratio of 1 - x would stand with a probability above it."""
    rows, draft = np.stack([logs(0.25, 0.75)] * 2), Draft(0, Distribution(np.arange(2), np.array([1.0, 1.0])))
    target = new_chooser(SAMPLING["temperature 1"], 0, 2).distribution(rows[0])
    ratio = likelihood_ratio(target, draft.law or target, 0)
    assert ratio == pytest.approx(0.5)
    assert accepted(judge(rule, rows, [draft], [ratio])) == 0
    assert accepted(judge(rule, rows, [draft], [math.nextafter(ratio, 0)])) == 1


@pytest.mark.parametrize("rule", RULES)
def test_num_accepted_after_a_miss_at_position_zero(rule: str) -> None:
    """Drafts behind the miss are the target's favourites, and still none of them stands."""
    rows = np.stack([logs(0, 0.5, 0.5, 0), *[logs(0.01, 0.01, 0.01, 0.97)] * 3])
    for seed in range(50):
        verdicts = judge(rule, rows, [Draft(0), Draft(3), Draft(3)], seed=seed)
        assert accepted(verdicts) == 0
        assert (verdicts[0].origin, len(verdicts)) == (Origin.CORRECTION, 1)
        assert verdicts[0].token in (1, 2)


@pytest.mark.parametrize("rule", RULES)
def test_min_p_at_each_position(rule: str) -> None:
    """A token below min-p is no draft that stands and no token of the target's, whatever its row in the pass."""
    rows = np.stack([logs(0.1, 0.5, 0.4)] * 4)
    filtering, free = (SamplingOptions(temperature=1.0, min_p=min_p) for min_p in (0.3, 0.0))
    for rare in range(3):
        drafts = [Draft(0 if i == rare else 1) for i in range(3)]
        loose = []
        for seed in range(150):
            verdicts = judge(rule, rows, drafts, options=filtering, seed=seed)
            assert accepted(verdicts) <= rare
            assert 0 not in [verdict.token for verdict in verdicts]
            loose.append(accepted(judge(rule, rows, drafts, options=free, seed=seed)))
        assert max(loose) > rare, "without min-p it does stand"


@pytest.mark.parametrize("rule", RULES)
def test_rows_behind_an_impossible_draft_are_not_looked_at(rule: str) -> None:
    """They continue a text that is not there, and may hold anything."""
    rows = np.stack([logs(0, 1), logs(0, 1), *[np.full(2, np.nan, np.float32)] * 2])
    assert accepted(judge(rule, rows, [Draft(1), Draft(0), Draft(1)])) == 1


@pytest.mark.parametrize("rule", RULES)
def test_a_rule_leaves_the_history_to_the_commit(rule: str) -> None:
    """What it pushes to look at rows further on is taken back, counts included, before it yields."""
    options = SamplingOptions(temperature=1.0, frequency_penalty=0.1)
    chooser = new_chooser(options, 0, 3)
    rows = np.stack([logs(0.3, 0.4, 0.3)] * 4)
    tokens, rule_object = [*PROMPT], acceptance_rule(rule)
    for verdict in rule_object.accept(chooser, [Draft(1), Draft(2), Draft(1)], rows):
        assert chooser.history.tokens == tokens
        assert chooser.history.output_counts is not None
        counts = dict(zip(chooser.history.output_counts.ids, chooser.history.output_counts.counts, strict=True))
        assert counts == Counter(tokens[len(PROMPT) :])
        chooser.history.push(verdict.token)
        tokens.append(verdict.token)


class OneWord:
    """A grammar of one token; nothing may follow it."""

    def __init__(self) -> None:
        self.length = 0

    @property
    def may_end(self) -> bool:
        return self.length == 1

    complete = may_end

    def allowed(self) -> NDArray[np.bool_]:
        return np.array([False, self.length == 0])

    def push(self, token: int) -> None:
        self.length += 1

    def rollback(self, count: int) -> None:
        self.length -= count


@pytest.mark.parametrize("rule", RULES)
def test_drafts_behind_the_end_of_a_grammar_are_not_judged(rule: str) -> None:
    """Prompt lookup drafts on behind an end; there no token is allowed, and that is no error of the request."""
    options = SamplingOptions(temperature=1.0, regex="b", ignore_eos=True)
    history = History(PROMPT, (), OneWord())  # type: ignore[arg-type]
    chooser = Chooser(options, history, 0, 2)
    verdicts = acceptance_rule(rule).accept(chooser, [Draft(1), Draft(1)], np.zeros((3, 2), np.float32))
    assert next(iter(verdicts))[:2] == (1, Origin.ACCEPTED)


@pytest.mark.parametrize("rule", RULES)
def test_a_round_without_drafts_is_plain_decoding(rule: str) -> None:
    """And it chooses what plain decoding chooses."""
    rows = World.random(5, seed=2).target[0]
    for seed in range(20):
        chosen = new_chooser(SAMPLING["temperature 1"], seed, 5).choose(rows[0])
        assert [verdict[:2] for verdict in judge(rule, rows[:1], [], seed=seed)] == [(chosen, Origin.PLAIN)]


@given(
    logits=st.lists(st.floats(-6, 6, width=32), min_size=6, max_size=6),
    token=st.integers(0, 5),
    seed=st.integers(0, 99),
)
def test_lossy_typical_accepts_by_its_formula(logits: list[float], token: int, seed: int) -> None:
    """p(x) > min(epsilon, delta * exp(-H)) with 0.09 and 0.3, as in Medusa's paper; no random number takes part."""
    rows = np.stack([np.array(logits, np.float32)] * 2)
    law = np.exp(rows[0].astype(float))
    law /= law.sum()
    threshold = min(0.09, 0.3 * math.exp((law * np.log(law)).sum()))
    if abs(law[token] - threshold) > 1e-6:
        assert accepted(judge("lossy-typical", rows, [Draft(token)], seed=seed)) == (law[token] > threshold)


def test_a_rule_belongs_to_one_request() -> None:
    """It counts rounds: a second request must not go on from the first one's count."""
    for name in RULES:
        assert acceptance_rule(name) is not acceptance_rule(name)


def test_an_unknown_rule_is_refused() -> None:
    with pytest.raises(OutriderError, match=r"unknown acceptance rule 'typical'.*exact, .*block"):
        acceptance_rule("typical")
