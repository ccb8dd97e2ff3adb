"""Prompt lookup: what followed the last tokens when they occurred before, in the prompt or in the output."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from outrider.engines.next_tokens import NextTokens
from outrider.runtime.accept import Draft
from outrider.runtime.drafters import Drafter, Draw
from outrider.runtime.sampling.history import History

MAX_NGRAM = 4
MIN_NGRAM = 2
LONGEST_MATCH = 10  # more agreement tells nothing more


class Match(NamedTuple):
    """What followed an earlier occurrence begins at ``start``; the ``size`` tokens before it agree with the last."""

    start: int
    size: int


class NgramDrafter(Drafter):
    """See ``drafters.Drafter``. The longest match wins, and of equal ones the latest.

    The index grows by a few entries a token and a lookup reads one entry a length, so that a round costs the same at
    any context length.

    Args:
        next_tokens: what is proposed where nothing matches.
    """

    def __init__(self, next_tokens: NextTokens | None = None) -> None:
        self._next_tokens = next_tokens
        self._follower: dict[tuple[int, ...], int] = {}
        self._indexed = 0

    def begin(self) -> None:
        self._follower = {}
        self._indexed = 0

    def propose(self, history: History, k: int, draw: Draw) -> Sequence[Draft]:
        return [Draft(token) for token in self.look_up(history.tokens, k)]

    def look_up(self, tokens: Sequence[int], k: int) -> list[int]:
        """``k`` tokens that followed the last ones before, or none. The same list is to grow from call to call."""
        match = self.match(tokens)
        if match is not None:
            return copied(tokens, match.start, k)
        return self._next_tokens.chain(tokens, k)[0] if self._next_tokens else []

    def match(self, tokens: Sequence[int]) -> Match | None:
        """Where the last tokens occurred before. The same list is to grow from call to call."""
        self._index(tokens)
        for size in range(min(MAX_NGRAM, len(tokens)), MIN_NGRAM - 1, -1):
            start = self._follower.get(tuple(tokens[-size:]))
            if start is not None:
                longest = min(LONGEST_MATCH, start)
                while size < longest and tokens[start - size - 1] == tokens[-size - 1]:
                    size += 1
                return Match(start, size)
        return None

    def _index(self, tokens: Sequence[int]) -> None:
        """Note for each token not yet seen which n-grams it follows; the last n-gram has no follower yet."""
        for position in range(max(self._indexed, MIN_NGRAM), len(tokens)):
            for size in range(MIN_NGRAM, min(MAX_NGRAM, position) + 1):
                self._follower[tuple(tokens[position - size : position])] = position
        self._indexed = len(tokens)


def copied(tokens: Sequence[int], start: int, k: int) -> list[int]:
    """``k`` tokens from ``start`` on; a match that reaches the end goes on into its own copy, as in a repetition."""
    copy = list(tokens[start : start + k])
    period = len(tokens) - start
    while len(copy) < k:
        copy.append(copy[len(copy) - period])
    return copy
