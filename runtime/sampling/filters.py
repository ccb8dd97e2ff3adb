"""Temperature and the filters behind it: which tokens may be drawn, and how likely each is.

The order is that of transformers: temperature, top-k, top-p, min-p, typical-p, each over what the one before it left.
Tokens tied with the last one that stays all stay.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from outrider.runtime.sampling.noise import log_uniforms, uniform

# Nearly all probability lies within such factors of the best token: looked at first, the rest only if need be.
_HEADS = (1e-3, 1e-6)
_FEW = 32  # tokens that are drawn among one by one, which is faster than calling numpy 15 times
LARGEST_TEMPERATURE = float(np.finfo(np.float32).max)
_BLOCK = 2**14  # tokens that are drawn among at a time: all steps stay in the second-level cache


@dataclass(frozen=True)
class Distribution:
    """Tokens that may be drawn, by rising id: int64 ``ids [n]`` and float64 ``weights [n]`` > 0 with any sum."""

    ids: NDArray[np.int64]
    weights: NDArray[np.float64]

    @classmethod
    def one_hot(cls, token: int) -> Distribution:
        return cls(np.array([token], np.int64), np.ones(1))

    @property
    def probabilities(self) -> NDArray[np.float64]:
        """float64 ``[n]``, of sum 1."""
        probabilities: NDArray[np.float64] = self.weights / self.weights.sum()
        return probabilities

    def probability(self, token: int) -> float:
        index = int(np.searchsorted(self.ids, token))
        if index == len(self.ids) or self.ids[index] != token:
            return 0.0
        return float(self.weights[index] / self.weights.sum())

    def probabilities_of(self, ids: NDArray[np.int64]) -> NDArray[np.float64]:
        """float64, one for each of ``ids``; 0 for those that are not here."""
        if len(ids) == len(self.ids) and np.array_equal(ids, self.ids):
            return self.probabilities
        index = np.minimum(np.searchsorted(self.ids, ids), len(self.ids) - 1)
        return np.where(self.ids[index] == ids, self.probabilities[index], 0.0)


def draw(distribution: Distribution, key: int) -> int:
    """The token that wins under the noise of ``key``: the Gumbel-max trick in its form without a second logarithm.

    -log(u) / weight is exponentially distributed with the weight for its rate, and the smallest belongs to a token with
    the probability of its weight. Equal ones: the smallest id.
    """
    winner, best = 0, -math.inf
    if len(distribution.ids) <= _FEW:
        for token, weight in zip(distribution.ids.tolist(), distribution.weights.tolist(), strict=True):
            score = math.log(uniform(key, token)) / weight
            if score > best:
                winner, best = token, score
        return winner
    for start in range(0, len(distribution.ids), _BLOCK):
        part = slice(start, start + _BLOCK)
        scores = log_uniforms(key, distribution.ids[part])
        scores /= distribution.weights[part]
        index = int(scores.argmax())
        if scores[index] > best:
            winner, best = start + index, float(scores[index])
    return int(distribution.ids[winner])


def filtered(
    logits: NDArray[np.float32],
    best: float,
    temperature: float,
    *,
    top_k: int = 0,
    top_p: float = 1.0,
    min_p: float = 0.0,
    typical_p: float = 1.0,
    out: NDArray[np.float32] | None = None,
) -> Distribution:
    """The distribution that is drawn from.

    Args:
        logits: float32 ``[V]``, read only, none below -1e30 but -inf, for tokens that must not be drawn.
        best: the largest of them, finite.
        out: float32 ``[V]`` to work in; the result does not refer to it.
    """
    shifted = np.subtract(logits, np.float32(best), out=out)
    shifted /= np.float32(min(temperature, LARGEST_TEMPERATURE))
    ids: NDArray[np.int64] | None = None
    if 0 < top_k < len(shifted):
        ids = largest(shifted, top_k)
        shifted = shifted[ids]
    weights: NDArray[np.float32] = np.exp(shifted, out=shifted)
    if top_p < 1:
        weights, ids = _take(weights, ids, _nucleus(weights, top_p))
    if min_p > 0:
        weights, ids = _take(weights, ids, np.flatnonzero(weights >= np.float32(min_p)))  # the best weighs 1
    if typical_p < 1:
        weights, ids = _take(weights, ids, _typical(weights, typical_p))
    if not weights.all():
        weights, ids = _take(weights, ids, np.flatnonzero(weights))
    return Distribution(np.arange(len(weights)) if ids is None else ids, weights.astype(np.float64))


def _take(
    weights: NDArray[np.float32], ids: NDArray[np.int64] | None, kept: NDArray[np.int64]
) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
    return weights[kept], kept if ids is None else ids[kept]


def largest(shifted: NDArray[np.float32], count: int) -> NDArray[np.int64]:
    """Indices of the ``count`` largest values (the best of which is 0) and of those tied with the last."""
    for head in _HEADS:
        kept: NDArray[np.int64] = np.flatnonzero(shifted >= np.float32(math.log(head)))
        if len(kept) >= count:
            break
    else:
        kept = np.arange(len(shifted))
    values = shifted[kept]
    cutoff = np.partition(values, len(values) - count)[len(values) - count]
    largest_ones: NDArray[np.int64] = kept[values >= cutoff]
    return largest_ones


def _nucleus(weights: NDArray[np.float32], top_p: float) -> NDArray[np.int64]:
    """Indices of the fewest largest weights whose sum reaches ``top_p`` of the whole (Holtzman et al. 2020)."""
    total = float(weights.sum())
    # Weights below the second floor sum up to less than 1 - top_p of the whole: none of them is in the nucleus.
    for floor in (_HEADS[0], (1 - top_p) * total / len(weights)):
        head: NDArray[np.int64] = np.flatnonzero(weights >= np.float32(floor))
        values = weights[head].astype(np.float64)
        ordered = np.sort(values)[::-1]
        last = int(ordered.cumsum().searchsorted(top_p * total))
        if last < len(head):
            head = head[values >= ordered[last]]
            break
    return head


def _typical(weights: NDArray[np.float32], typical_p: float) -> NDArray[np.int64]:
    """Indices of the tokens whose information is nearest to the entropy, up to a mass (Meister et al. 2022)."""
    total = float(weights.sum())
    logs = np.log(np.maximum(weights, np.finfo(np.float32).tiny))
    entropy = math.log(total) - float((weights * logs).sum()) / total
    for head in (_HEADS[0], 0.0):
        kept: NDArray[np.int64] = np.flatnonzero(weights > np.float32(head))
        candidates = weights[kept].astype(np.float64)
        distance = np.abs(math.log(total) - np.log(candidates) - entropy)
        order = np.argsort(distance, kind="stable")
        last = int(np.count_nonzero(np.cumsum(candidates[order]) < typical_p * total))
        cutoff = distance[order[min(last, len(kept) - 1)]]
        # Every token behind the head is further from the entropy than this, where it is on that side.
        if last < len(kept) and head and cutoff < math.log(total) - math.log(head) - entropy:
            break
    nearest: NDArray[np.int64] = kept[distance <= cutoff]
    return nearest
