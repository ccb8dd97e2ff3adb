"""The controller: properties of single choices, recorded rounds replayed, and the same choices in the real loop."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from laws import chi_square_p
from test_accept import PROMPT, World, new_chooser, plain_law

from outrider.runtime import Pipeline, SamplingOptions
from outrider.runtime.accept import Draft, acceptance_rule
from outrider.runtime.controller import (
    BLOCK,
    DEFAULT_PRIORS,
    EDGES,
    LOOKUP,
    MODEL,
    SOURCES,
    TABLE,
    Choice,
    Controller,
    Pace,
    Priors,
)
from outrider.runtime.costs import Costs
from outrider.runtime.drafters import Draw, ModelSource
from outrider.runtime.drafters.adaptive import AdaptiveDrafter
from outrider.runtime.drafters.model import ModelDrafter
from outrider.runtime.replay import ASKED, oracle_seconds, replay, replay_fixed
from outrider.runtime.sampling.history import History
from outrider.runtime.stats import DecodeStats
from outrider.runtime.trace import Trace, Traced, TracedRequest, count_priors, read_trace, record

ROUNDS = Path(__file__).parent / "golden" / "rounds"
# Milliseconds of a plain round, of rounds with 1 to 8 drafts, of draft passes of 1, 2 and 256 rows.
DRAFTING: dict[str, Any] = {"draft_rows": (1, 2, 256), "draft": ((0.5,), (0.5,), (8.0,)), "draft_step": (0.5,)}
STEEP = Costs((128,), ((7.5,), (8,), (9.5,), (10.8,), (12,), (13.2,), (14.3,), (15.5,), (16.6,)), **DRAFTING)
FLAT = Costs((128,), ((21,), (21,), (22.6,), (22.9,), (23.4,), (25,), (26,), (27,), (28.5,)), **DRAFTING)


def evidence(source: str, count: int) -> st.SearchStrategy[list[float]]:
    values = {
        LOOKUP: st.integers(2, 12),
        TABLE: st.integers(1, 2),
        MODEL: st.floats(0, 1),
        BLOCK: st.integers(1, 8),
    }[source]
    return st.lists(values, min_size=count, max_size=count)


@st.composite
def costs_tables(draw: st.DrawFn) -> Costs:
    seconds = st.floats(1e-4, 1.0)
    lengths = draw(st.sampled_from([(64,), (64, 512), (64, 512, 2048)]))
    row = st.tuples(*[seconds] * len(lengths))
    k = draw(st.integers(1, 8))
    verify = draw(st.lists(row, min_size=k + 1, max_size=k + 1))
    draft = draw(st.lists(row, min_size=3, max_size=3))
    return Costs(
        lengths, tuple(verify), (1, 4, 64), tuple(draft), draw(row), draw(st.floats(0, 1e-3)), draw(st.floats(0, 1e-3))
    )


@settings(max_examples=300, deadline=None)
@given(data=st.data(), costs=costs_tables())
def test_a_choice_fits_whatever_the_numbers(data: st.DataObject, costs: Costs) -> None:
    """Never more drafts than there is room for, than were proposed, or than the tiers serve."""
    controller = Controller(costs)
    for _ in range(data.draw(st.integers(1, 6))):
        room = data.draw(st.integers(0, 12))
        offers = {
            source: data.draw(evidence(source, data.draw(st.integers(1, 12))))
            for source in data.draw(st.sets(st.sampled_from([LOOKUP, TABLE, BLOCK])))
        }
        drawn: list[float] = []

        def steps(drawn: list[float] = drawn) -> Iterator[float]:
            for known in data.draw(evidence(MODEL, data.draw(st.integers(0, 12)))):
                drawn.append(known)
                yield known

        stepwise = BLOCK not in offers and data.draw(st.booleans())
        length, lacking = data.draw(st.integers(1, 5000)), data.draw(st.integers(1, 300))
        choice = controller.choose(length, room, offers, steps() if stepwise else None, lacking)
        assert 0 <= choice.k <= min(room, costs.largest_k)
        assert (choice.source is None) == (choice.k == 0)
        assert math.isfinite(choice.tokens) and 1 <= choice.tokens <= choice.k + 1
        assert choice.seconds > 0
        proposed = offers | {MODEL: drawn}
        if choice.source is not None:
            assert choice.k <= len(proposed[choice.source])
        if stepwise:
            assert choice.drafted == len(drawn) <= room
        judged = {}
        committed = 1
        for source, known in proposed.items():
            accepted = data.draw(st.integers(0, len(known)))
            judged[source] = known, accepted, accepted < len(known)
            if source == choice.source:
                committed = 1 + min(accepted, choice.k)
        controller.learn(choice, committed, judged)
        assert all(0 < one.chance(2) < 1 for one in controller.acceptance.values())


@given(costs=costs_tables(), length=st.integers(0, 10_000), rows=st.integers(1, 2000))
def test_costs_are_those_that_were_measured_and_grow_from_there(costs: Costs, length: int, rows: int) -> None:
    for index, measured in enumerate(costs.lengths):
        assert costs.rounds(measured) == pytest.approx([row[index] + costs.round_host for row in costs.verify])
        for count, row in zip(costs.draft_rows, costs.draft, strict=True):
            assert costs.first_step(count, measured) == pytest.approx(row[index] + costs.draft_host)
    assert min(costs.rounds(length)) > 0 and costs.first_step(rows, length) > 0
    assert costs.first_step(5000, length) >= costs.first_step(64, length) - 1e-12


@pytest.mark.parametrize(
    "wrong",
    [
        {"lengths": ()},
        {"verify": ()},
        {"verify": ((1.0, 2.0),)},
        {"verify": ((0.0,),)},
        {"draft_rows": (1, 2)},
        {"lengths": (2, 1), "verify": ((1.0, 1.0),)},
    ],
)
def test_costs_that_are_not_whole_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"costs\."):
        Costs(**({"lengths": (64,), "verify": ((1.0,),)} | wrong))


def world(accepted: Sequence[int], known: float = 0.9, k: int = 8) -> TracedRequest:
    """A draft model that is equally sure of everything, and right so many times in a row at each position."""
    return TracedRequest("", "", 20, [{MODEL: Traced((known,) * k, min(stood, k))} for stood in accepted])


def test_a_round_that_was_all_accepted_says_at_least_so_many() -> None:
    """K = 1, always accepted: that nothing is known of the second token must not count against it."""
    one = Controller(STEEP).acceptance[MODEL]
    before = one.chance(0.9)
    for _ in range(50):
        one.judge([0.9], 1, False)
    assert one.chance(0.9) > before
    for _ in range(50):
        one.judge([0.9, 0.9], 1, True)
    assert one.chance(0.9) < 0.7


def seconds_behind(request: TracedRequest, controller: Controller, begin: int) -> float:
    """Of the rounds that begin behind so many tokens."""
    played = replay(request, controller, "model")
    starts = accumulate(played.committed, initial=0)
    return sum(choice.seconds for choice, start in zip(played.choices, starts, strict=False) if start >= begin)


@pytest.mark.parametrize("costs", [STEEP, FLAT], ids=["steep", "flat"])
@pytest.mark.parametrize("good", [0, 20_000])
def test_a_drafter_that_is_always_wrong_is_left_alone(costs: Costs, good: int) -> None:
    """Sure of itself, and never right: soon only the share for probing is spent, however much was earned before."""
    controller = Controller(costs)
    request = world([8] * good + [0] * 2000)
    assert 2000 * costs.rounds(128)[0] / seconds_behind(request, controller, good) > 0.98
    again = replay(world([0] * 400), controller, "model")
    assert 400 * costs.rounds(128)[0] / again.seconds > 0.98
    assert sum(choice.drafted > 0 for choice in again.choices) >= 2, "it is asked again now and then"


@pytest.mark.parametrize("share", [0.03, 0.06, 0.1, 0.15])
def test_a_drafter_that_is_seldom_right_is_not_believed(share: float) -> None:
    """A draft that stands by luck must not bring back all that was once believed."""
    rng = np.random.default_rng(0)
    accepted = [int(stood) for stood in np.minimum(rng.geometric(1 - share, 4000) - 1, 8)]
    plain = 4000 * STEEP.rounds(128)[0]
    assert plain / replay(world(accepted), Controller(STEEP), "model").seconds > 0.97


@pytest.mark.parametrize("step", [0.2, 0.75])
@pytest.mark.parametrize("costs", [STEEP, FLAT], ids=["steep", "flat"])
def test_acceptance_that_comes_back_is_found(costs: Costs, step: float) -> None:
    """Prose on which nothing stands, then code on which all does: K is above 0 again within some 32 tokens.

    For draft steps of up to a tenth of a plain round; what costs more is probed less often.
    """
    costs = replace(costs, draft=((step,), (step,), (step + 8.0,)), draft_step=(step,))
    bad, good = 300, 200
    accepted = [0] * bad + [good - index for index in range(good)]
    played = replay(world(accepted), Controller(costs), "model")
    starts = accumulate(played.committed, initial=0)
    drafted = [start - bad for choice, start in zip(played.choices, starts, strict=False) if start >= bad and choice.k]
    assert drafted[0] <= 40
    assert len(played.committed) - bad < 70, "and soon K is large"


def test_a_model_that_has_nothing_to_say_is_learned_from() -> None:
    """Drafts that were asked for and did not come are as good as refused."""

    class Silent(ModelSource):
        asked = 0

        def lacking(self, history: History) -> int:
            return 1

        def propose(self, history: History, k: int, draw: Draw) -> Sequence[Draft]:
            self.asked += 1
            return []

    silent, history, stats = Silent(), History([1]), DecodeStats()
    drafter = AdaptiveDrafter(Controller(STEEP), None, silent, free=True, stats=stats)
    drafter.begin()
    for token in range(200):
        assert drafter.propose(history, 8, lambda row: Draft(0)) == []
        history.push(token)
        drafter.learn(history, 1, 7.5)
    assert 1 < silent.asked < 40
    assert stats.sources[BLOCK].rounds_by_k == {0: silent.asked}


def test_a_probe_does_not_take_the_place_of_a_good_round() -> None:
    """A draft model that is only tried again now and then must not cost the tokens that a lookup would have brought."""
    controller = Controller(FLAT)
    for _ in range(400):
        controller.acceptance[BLOCK].judge([1.0], 0, True)
    probes = 0
    for _ in range(600):
        choice = controller.choose(128, 8, {LOOKUP: [12.0] * 8, BLOCK: range(1, 9)}, lacking=9)
        probes += choice.source == BLOCK
        controller.learn(choice, choice.k + 1, {LOOKUP: ([12.0] * 8, 8, False)})
    assert 1 <= probes <= 8  # each loses about 18 of 28 ms, and 0.75 % of the time may be lost


def test_only_tiers_are_drafted_where_there_are_only_tiers() -> None:
    controller = Controller(FLAT)
    for room in range(9):
        choice = controller.choose(128, room, {BLOCK: range(1, room + 1)}, tiers=(2, 4, 8))
        assert choice.k in (0, 2, 4, 8) and choice.k <= room


def test_lookups_need_no_probing() -> None:
    """What they would have proposed is compared with the text whether it was verified or not."""
    positions = [{LOOKUP: Traced((3.0,) * 8, 0)}] * 200 + [{LOOKUP: Traced((3.0,) * 8, 8)}] * 100
    played = replay(TracedRequest("", "", 20, positions), Controller(STEEP), "ngram")
    at = 0
    for choice, committed in zip(played.choices, played.committed, strict=True):
        if at >= 200 and choice.k:
            break
        at += committed
    assert at - 200 <= 16


def test_steps_that_take_longer_are_drafted_less() -> None:
    """As where a sampler adds to them."""
    slow, quick = Controller(STEEP), Controller(STEEP)
    for _ in range(200):
        choice = slow.choose(128, 8, {}, iter([0.8] * 8), lacking=1)
        if choice.drafted:
            slow.took(choice, 5.0 * choice.drafted)
        slow.learn(choice, choice.k + 1, {MODEL: ([0.8] * choice.k, choice.k, False)})
        choice = quick.choose(128, 8, {}, iter([0.8] * 8), lacking=1)
        quick.learn(choice, choice.k + 1, {MODEL: ([0.8] * choice.k, choice.k, False)})
    drafted = [one.choose(128, 8, {}, iter([0.8] * 8), lacking=1).drafted for one in (slow, quick)]
    assert drafted[0] < drafted[1]


def test_costs_are_corrected_while_running() -> None:
    """Figures measured ahead say that verifying is dear, and it is not: K grows. And the other way round."""
    offer = {LOOKUP: [4.0] * 8}

    def settle(costs: Costs, real: Costs) -> float:
        """K of late."""
        controller, chosen, rng = Controller(costs), [], np.random.default_rng(0)
        for _ in range(400):
            choice = controller.choose(128, 8, offer)
            chosen.append(choice.k)
            standing = int(rng.geometric(0.25)) - 1
            stood, judged = min(choice.k, standing), (offer[LOOKUP], min(standing, choice.k), standing < choice.k)
            controller.learn(choice, 1 + stood, {LOOKUP: judged}, real.rounds(128)[choice.k])
        return sum(chosen[-200:]) / 200

    steep, flat = settle(STEEP, STEEP), settle(FLAT, FLAT)
    assert steep + 1 < flat
    assert abs(settle(FLAT, STEEP) - steep) < 1 and abs(settle(STEEP, FLAT) - flat) < 1


def test_a_slower_machine_changes_nothing() -> None:
    """All passes take twice as long: so they do with K drafts, also with those that were not tried."""
    pace = Pace(8)
    for _ in range(200):
        pace.saw(0, 2.0)
        pace.saw(2, 2.0)
    assert pace.ratios() == pytest.approx([2.0] * 9, rel=0.05)


def test_catching_up_is_counted() -> None:
    """A draft model that would have to read a long prompt first is not asked for the last few tokens."""
    controller = Controller(STEEP)
    assert controller.choose(5000, 2, {}, iter([0.99, 0.99]), lacking=5000).drafted == 0
    assert controller.choose(5000, 2, {}, iter([0.99, 0.99]), lacking=1).drafted > 0


@pytest.fixture(scope="module", params=["int4", "fp32"])
def trace(request: pytest.FixtureRequest) -> Trace:
    """SmolLM2 with its own draft, two prompts of each kind: see the folder's README."""
    return read_trace(ROUNDS / f"{request.param}.jsonl")


def total(trace: Trace, drafter: str, k: int, category: str | None = None) -> float:
    chosen = [each for each in trace.requests if category in (None, each.category)]
    return sum(replay_fixed(each, trace.costs, drafter, k).seconds for each in chosen)


def test_no_fixed_choice_is_better(trace: Trace) -> None:
    """Over all prompts none, though chosen with hindsight; for the two prompts of a kind none by more than 12 %."""
    controller = Controller(trace.costs)
    played: dict[str, float] = {}
    for each in trace.requests:
        played[each.category] = played.get(each.category, 0.0) + replay(each, controller).seconds
    fixed = [(drafter, k) for drafter in ASKED for k in range(trace.costs.largest_k + 1)]
    assert sum(played.values()) < min(total(trace, *choice) for choice in fixed)
    for category, seconds in played.items():
        assert seconds < 1.12 * min(total(trace, *choice, category) for choice in fixed), category
        assert seconds < total(trace, "none", 0, category), category


def test_the_oracle_is_not_far(trace: Trace) -> None:
    """Who knows which drafts stand drafts no other: where each row of a pass costs more (int4), that is worth more."""
    controller = Controller(trace.costs)
    played = sum(replay(each, controller).seconds for each in trace.requests)
    oracle = sum(oracle_seconds(each, trace.costs) for each in trace.requests)
    assert all(oracle <= total(trace, drafter, k) for drafter in ASKED for k in range(9))
    steep = trace.costs.rounds(128)[4] / trace.costs.rounds(128)[0] > 1.3
    assert (0.72 if steep else 0.82) < oracle / played <= 1


def test_the_traces_are_of_two_precisions() -> None:
    steep, flat = (read_trace(ROUNDS / f"{name}.jsonl").costs for name in ("int4", "fp32"))
    assert steep.rounds(128)[0] < flat.rounds(128)[0]
    assert steep.rounds(128)[8] / steep.rounds(128)[0] > flat.rounds(128)[8] / flat.rounds(128)[0]


def test_priors_count_each_token_that_was_reached_once() -> None:
    request = world([2, 0, 8], k=4)
    counted = count_priors([request])
    # The text ends behind three tokens: 2 and a miss, a miss, one.
    assert counted[MODEL][EDGES[MODEL].index(0.9) + 1] == (3, 5)
    assert all(judged == 0 for source in (LOOKUP, TABLE) for _, judged in counted[source])
    assert counted[BLOCK] == [(2, 3), (1, 1), (0, 1), (0, 0)], "by place, for rules that are not asked step by step"


@pytest.mark.parametrize("drafter", list(ASKED))
def test_the_loop_chooses_what_the_replay_does(
    tiny_pipeline: Pipeline, drafter: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Round by round, source and K: replayed figures are those of the real thing."""
    ids = tiny_pipeline.encode("a b c d e f g h")
    few = tiny_pipeline.encode("abcdefgh")  # so that n-grams come again
    options = SamplingOptions(
        max_new_tokens=70, ignore_eos=True, temperature=1.3, seed=3, allowed_token_ids=few, repetition_penalty=1.1
    )
    tiny_pipeline.clear_caches()
    traced, _ = record(tiny_pipeline, "", "", ids, options)
    tiny_pipeline.clear_caches()
    expected = replay(traced, Controller(STEEP), drafter)
    monkeypatch.setattr(Controller, "took", lambda self, choice, seconds: None)  # a replay has no clock
    monkeypatch.setattr(Pace, "saw", lambda self, k, ratio: None)
    request = tiny_pipeline.new_request(ids, options)
    for _ in tiny_pipeline.decode(request, drafter, None, controller=Controller(STEEP)):
        pass
    found = request.stats
    rounds: dict[str, dict[int, int]] = {}
    at = 0
    for choice, committed in zip(expected.choices, expected.committed, strict=True):
        if at + 1 < len(traced.positions):  # where one token is left, nothing is chosen
            by_k = rounds.setdefault(choice.source or "plain", {})
            by_k[choice.k] = by_k.get(choice.k, 0) + 1
        at += committed
    assert {source: stats.rounds_by_k for source, stats in found.sources.items()} == rounds
    assert sum(expected.committed) == found.num_round_tokens
    assert len({(source, k) for source, by_k in rounds.items() for k in by_k}) > 1


class Imagined(ModelSource):
    """A draft model of ``World``, drawn from by the rule."""

    def __init__(self, world: World) -> None:
        self._world = world

    def lacking(self, history: History) -> int:
        return 1

    def propose(self, history: History, k: int, draw: Draw) -> Sequence[Draft]:
        start, drafts = len(history), []
        for _ in range(k):
            drafts.append(draw(self._world.draft[tuple(history.tokens[-2:])]))
            history.push(drafts[-1].token)
        history.rollback(start)
        return drafts


class Stepping(ModelDrafter):
    """The same, one by one: K depends on what was drawn."""

    def __init__(self, world: World) -> None:
        self._source = Imagined(world)
        self._world = world

    def begin(self) -> None:
        pass

    def lacking(self, history: History) -> int:
        return 1

    def propose(self, history: History, k: int, draw: Draw) -> Sequence[Draft]:
        return self._source.propose(history, k, draw)

    def steps(self, history: History, draw: Draw) -> Any:
        start = len(history)
        try:
            while True:
                row = self._world.draft[tuple(history.tokens[-2:])]
                draft = draw(row)
                history.push(draft.token)
                yield draft, float(np.exp(row[draft.token]) / np.exp(row).sum())
        finally:
            history.rollback(start)


# Verifying costs more than most drafts are worth, so that much depends on what was drawn.
DEAR = Costs((128,), ((10.0,), (13.0,), (16.0,), (19.0,)), (1, 2), ((0.1,), (0.1,)), (0.1,))
HONEST: Priors = DEFAULT_PRIORS | {
    MODEL: [(place + 0.5, 11) for place in range(11)],
    BLOCK: [(12, 20), (12, 20), (12, 20), (12, 20)],
}


def spoken(world: World, rule_name: str, seed: int, length: int, free: bool) -> list[int]:
    options = SamplingOptions(temperature=1.0)
    chooser, rule = new_chooser(options, seed, world.vocab), acceptance_rule(rule_name)
    history = chooser.history
    drafter = AdaptiveDrafter(Controller(DEAR, HONEST), None, Stepping(world), free=free, stats=DecodeStats())
    drafter.begin()
    while (left := length - len(history) + len(PROMPT)) > 0:
        start = len(history)
        drafts = drafter.propose(history, left - 1, lambda row: rule.draft(chooser, row)) if left > 1 else []
        rows = [world.target[tuple(history.tokens[-2:])]]
        for draft in drafts:
            history.push(draft.token)
            rows.append(world.target[tuple(history.tokens[-2:])])
        history.rollback(start)
        for verdict in rule.accept(chooser, drafts, np.stack(rows)):
            history.push(verdict.token)
        drafter.learn(history, len(history) - start, DEAR.rounds(128)[len(drafts)])
    return history.tokens[len(PROMPT) :]


@pytest.mark.parametrize("rule", ["residual", "block"])
def test_a_chosen_k_leaves_the_law_of_the_text(rule: str) -> None:
    """Rules that judge drafts by the law they were drawn from hold as long as K is chosen before the model draws.

    Leaving a draft out because of what it is does change the law, and this test would see it.
    """
    texts, length, imagined = 3000, 3, World.random(3, seed=1)
    law = plain_law(imagined, SamplingOptions(temperature=1.0), length) * texts
    found = {}
    for free in (False, True):
        counts = np.zeros([3] * length, np.int64)
        for seed in range(texts):
            counts[tuple(spoken(imagined, rule, seed, length, free))] += 1
        found[free] = chi_square_p(counts, law)
    assert found[False] > 1e-4
    assert found[True] < 1e-9


def test_a_choice_names_what_it_expects(tiny_pipeline: Pipeline) -> None:
    result = tiny_pipeline.generate("the quick brown fox", max_new_tokens=40, ignore_eos=True)
    assert result.k is None and result.drafter == "cascade" and result.tuning
    rounds = sum(stats.rounds for stats in result.stats.sources.values())
    assert rounds in (result.stats.num_spec_steps, result.stats.num_spec_steps - 1)  # the last has no choice
    for stats in result.stats.sources.values():
        assert stats.expected_seconds > 0 and stats.expected_tokens >= stats.rounds
    fixed = tiny_pipeline.generate("the quick brown fox", max_new_tokens=4, k=2)
    assert (fixed.k, fixed.tuning, fixed.stats.sources) == (2, None, {})


def test_a_choice_is_as_good_as_named() -> None:
    """``Choice`` of plain decoding where nothing is offered."""
    controller = Controller(STEEP)
    assert controller.choose(128, 8, {}) == Choice(None, 0, 1.0, 7.5)
    assert controller.choose(128, 0, {LOOKUP: [9.0] * 8}, iter([0.99])).k == 0
    assert set(DEFAULT_PRIORS) == set(SOURCES) == set(EDGES)
    assert all(len(DEFAULT_PRIORS[source]) == len(EDGES[source]) + 1 for source in SOURCES)
