"""Caches of texts whose lane went to another request, kept for whoever goes on with them."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from outrider.engines.packed import SavedCache, SequencesEngine
from outrider.runtime.scheduler import TARGET


@dataclass(frozen=True)
class Prefix:
    """What the models had of a text, by role: the tokens, and their part of the caches."""

    tokens: Mapping[str, list[int]]
    caches: Mapping[str, SavedCache]

    @property
    def size(self) -> int:
        """Bytes."""
        return sum(cache.nbytes for caches in self.caches.values() for cache in caches)


class PrefixStore:
    """Bounded in memory: the longest unused goes first. Args: ``limit`` in bytes, 0 to keep nothing."""

    def __init__(self, engines: Mapping[str, SequencesEngine], limit: int) -> None:
        self._engines = engines
        self._limit = limit
        self._prefixes: OrderedDict[int, Prefix] = OrderedDict()
        self._next = 0
        self.size = 0

    def save(self, lane: int, tokens: Mapping[str, list[int]]) -> None:
        """Keep what the models have in a lane, unless it alone is more than there is room for."""
        lengths = {role: len(held) for role, held in tokens.items()}
        size = sum(self._engines[role].token_bytes * length for role, length in lengths.items())
        if not 0 < size <= self._limit:
            return
        for number in [number for number, one in self._prefixes.items() if _covers(tokens, one.tokens)]:
            self._drop(number)
        while self.size + size > self._limit:
            self._drop(next(iter(self._prefixes)))
        caches = {role: self._engines[role].save(lane, length) for role, length in lengths.items()}
        prefix = Prefix({role: list(held) for role, held in tokens.items()}, caches)
        self._prefixes[self._next] = prefix
        self._next += 1
        self.size += prefix.size

    def find(self, text: Sequence[int]) -> Prefix | None:
        """What has most of the beginning of a text; it leaves the store where the text goes on with all of it."""
        shared = {number: common(one.tokens[TARGET], text) for number, one in self._prefixes.items()}
        best = max(shared, key=shared.__getitem__, default=None)
        if best is None or not shared[best]:
            return None
        found = self._prefixes[best]
        self._prefixes.move_to_end(best)
        if shared[best] == len(found.tokens[TARGET]):
            self._drop(best)
        return found

    def restore(self, found: Prefix, lane: int, role: str, start: int, text: Sequence[int]) -> int:
        """Put what there is of the beginning of ``text`` into a lane that has its first ``start`` tokens.

        Returns:
            How many tokens the lane has then.
        """
        end = common(found.tokens[role], text)
        if end <= start:
            return start
        self._engines[role].restore(lane, found.caches[role], start, end)
        return end

    def _drop(self, number: int) -> None:
        self.size -= self._prefixes.pop(number).size


def common(tokens: Sequence[int], others: Sequence[int]) -> int:
    """How many tokens two texts begin with alike."""
    low, high = 0, min(len(tokens), len(others))
    if tokens[:high] == others[:high]:
        return high
    while high - low > 1:  # the first low are alike, the first high are not
        middle = (low + high) // 2
        if tokens[low:middle] == others[low:middle]:
            low = middle
        else:
            high = middle
    return low


def _covers(tokens: Mapping[str, Sequence[int]], others: Mapping[str, Sequence[int]]) -> bool:
    """Whether all that the others begin with is there."""
    return all(list(tokens.get(role, []))[: len(held)] == list(held) for role, held in others.items())
