"""Acceptance rules: how many draft tokens of a round stand."""

from __future__ import annotations

from collections.abc import Sequence


def count_accepted(drafts: Sequence[int], chosen: Sequence[int]) -> int:
    """The exact rule: a draft token stands while it is the token that the target chooses at its position.

    Args:
        drafts: K proposed tokens.
        chosen: K + 1 tokens, the target's choice at each position given the drafts before it.

    Returns:
        a <= K. ``chosen[:a]`` equals ``drafts[:a]``; ``chosen[a]`` is the correction token, or the bonus if a = K.
    """
    for position, token in enumerate(drafts):
        if token != chosen[position]:
            return position
    return len(drafts)
