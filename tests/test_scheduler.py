"""Whose rows go next, and who gets which lane: for all states of small batches."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from outrider.runtime.scheduler import DRAFT, TARGET, FreeLane, Waiting, choose_lane, next_turn

ROLES = (DRAFT, TARGET)
WAITING = st.lists(st.tuples(st.sampled_from(ROLES), st.booleans(), st.integers(0, 9)), max_size=7).map(
    lambda given: [Waiting(lane, *one) for lane, one in enumerate(given)]
)
FREE = st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9), st.integers(0, 9)), min_size=1, max_size=6).map(
    lambda given: [FreeLane(lane, min(common, held), held, used) for lane, (common, held, used) in enumerate(given)]
)


@given(WAITING, st.sets(st.sampled_from(ROLES)))
def test_a_turn_is_of_one_role_and_feeds_one(waiting: list[Waiting], fed: set[str]) -> None:
    turn = next_turn(waiting, fed)
    steps = {role: [one.lane for one in waiting if one.role == role and not one.feeds] for role in ROLES}
    hungry = {role: [one for one in waiting if one.role == role and one.feeds] for role in ROLES}
    if turn is None:
        assert not any(steps.values()) and all(role in fed for role in ROLES if hungry[role])
        return
    chosen = set(turn.lanes)
    assert set(steps[turn.role]) <= chosen  # all that take a step take it together
    fed_now = chosen - set(steps[turn.role])
    assert len(fed_now) == turn.feeds <= 1
    if turn.feeds:
        assert turn.role not in fed
        (lane,) = fed_now
        assert all(waiting[lane].fed <= one.fed for one in hungry[turn.role])
    if turn.role == TARGET:  # drafts come first
        assert not steps[DRAFT] and (DRAFT in fed or not hungry[DRAFT])


@given(WAITING)
def test_a_round_ends_and_leaves_nobody_out(waiting: list[Waiting]) -> None:
    """With drafts of a step each, every lane that takes a step is at the target within the round."""
    state = {one.lane: one for one in waiting}
    fed: set[str] = set()
    served = set()
    for _ in range(2 * len(waiting) + 2):
        turn = next_turn(list(state.values()), fed)
        if turn is None:
            break
        served |= set(turn.lanes)
        if turn.feeds:
            fed.add(turn.role)
        if turn.role == TARGET:
            break
        for lane in turn.lanes:
            state[lane] = Waiting(lane, TARGET) if not state[lane].feeds else state[lane]
    else:
        raise AssertionError("the round does not end")
    assert {one.lane for one in waiting if not one.feeds} <= served


def test_the_hungry_take_turns() -> None:
    """A short prompt that came later waits for one chunk of the long one, not for all of them."""
    state = [Waiting(0, TARGET, feeds=True), Waiting(1, TARGET, feeds=True)]
    order = []
    for time in range(1, 7):
        turn = next_turn(state, set())
        assert turn is not None
        order.append(turn.lanes[-1])
        state = [one._replace(fed=time) if one.lane == turn.lanes[-1] else one for one in state]
    assert order == [0, 1, 0, 1, 0, 1]


@given(FREE)
def test_the_lane_is_one_that_fits(free: list[FreeLane]) -> None:
    chosen = next(one for one in free if one.lane == choose_lane(free))
    fitting = [one for one in free if 2 * one.common >= one.held]
    if fitting:
        assert chosen in fitting and chosen.common == max(one.common for one in fitting)
    else:  # all hold much else: the longest unused goes
        assert chosen.used == min(one.used for one in free)


def test_a_long_conversation_is_not_given_up_for_a_short_beginning() -> None:
    system_prompt_only = [FreeLane(0, 20, 500, used=1), FreeLane(1, 0, 0, used=2)]
    assert choose_lane(system_prompt_only) == 1
    assert choose_lane([FreeLane(0, 480, 500, used=1), FreeLane(1, 0, 0, used=0)]) == 0
