"""Whose rows go into the next pass, and which request gets which lane: decisions from numbers alone.

A round of a batch is that of each of its sequences, in step: draft steps until all that draft have drafted, then one
pass of the target for all. A long prompt is fed in chunks beside them, one of the target and one of the draft a round,
whoever has waited longest; so nobody waits for more than a chunk of another's prompt.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import NamedTuple

TARGET, DRAFT = "target", "draft"


class Waiting(NamedTuple):
    """A lane that waits for a pass of ``role``; with ``feeds`` for a chunk of a text, last fed at the time ``fed``."""

    lane: int
    role: str
    feeds: bool = False
    fed: int = 0


class Turn(NamedTuple):
    """The lanes whose rows go into the next pass of ``role``, and whether one of them is fed a chunk."""

    role: str
    lanes: tuple[int, ...]
    feeds: bool


def next_turn(waiting: Sequence[Waiting], fed: Collection[str]) -> Turn | None:
    """The next pass of a round; None when the round has nothing left to do.

    Args:
        fed: the roles that have fed a chunk in this round.
    """
    for role in (DRAFT, TARGET):
        steps = [one.lane for one in waiting if one.role == role and not one.feeds]
        hungry = [one for one in waiting if one.role == role and one.feeds and role not in fed]
        chosen = [min(hungry, key=lambda one: (one.fed, one.lane)).lane] if hungry else []
        if steps or chosen:
            return Turn(role, (*steps, *chosen), bool(chosen))
    return None


class FreeLane(NamedTuple):
    """``common`` is how much of the prompt its cache holds already, ``held`` all that it holds, ``used`` when last."""

    lane: int
    common: int
    held: int
    used: int


def choose_lane(free: Sequence[FreeLane]) -> int:
    """The lane that holds most of the prompt already, where that is most of what it holds; else the longest unused.

    A lane that holds a long text of which the prompt is a short beginning is left to those who go on with that text.
    """
    fitting = [one for one in free if 2 * one.common >= one.held]
    return min(fitting or free, key=lambda one: (-one.common if fitting else 0, one.used, one.lane)).lane
