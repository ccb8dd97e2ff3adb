"""Acceptance rules: which draft tokens of a round stand, and which token follows them.

``exact`` gives, token for token, the text of plain decoding with the same seed. ``residual`` and ``block`` give text of
the same law but not the same text, and accept more drafts of a model. ``lossy-typical`` gives text of another law.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from outrider.engines.errors import OutriderError
from outrider.runtime.choose import Chooser, Row
from outrider.runtime.commit import Origin
from outrider.runtime.sampling.filters import Distribution
from outrider.runtime.sampling.noise import Stream


class Draft(NamedTuple):
    """A proposed token and the law it was drawn from; None for a token that came without one."""

    token: int
    law: Distribution | None = None

    @property
    def drawn_from(self) -> Distribution:
        """The law, one-hot for a token that came without."""
        return self.law or Distribution.one_hot(self.token)


class Verdict(NamedTuple):
    """A token to commit, and the row of the verify pass that decided it."""

    token: int
    origin: Origin
    logits: Row


class AcceptanceRule(Protocol):
    """How draft tokens are drawn and judged. One object a request; ``accept`` is called once a round."""

    def draft(self, chooser: Chooser, logits: Row) -> Draft:
        """Draw the draft token behind the chooser's history from the draft model's logits ``[V]``."""
        ...

    def accept(self, chooser: Chooser, drafts: Sequence[Draft], rows: Sequence[Row]) -> Iterator[Verdict]:
        """The tokens of a round, in order: accepted drafts, then the target's own token.

        Each is to be pushed to the chooser's history before the next is asked for.

        Args:
            drafts: K proposals.
            rows: K + 1, row i of the target's logits given the drafts before it.
        """
        ...


class ExactRule:
    """A draft token stands while it is the token that the target chooses at its position."""

    def draft(self, chooser: Chooser, logits: Row) -> Draft:
        return Draft(chooser.choose(logits))

    def accept(self, chooser: Chooser, drafts: Sequence[Draft], rows: Sequence[Row]) -> Iterator[Verdict]:
        for draft, row in zip(drafts, rows, strict=False):
            token = chooser.choose(row)
            if token != draft.token:
                yield Verdict(token, Origin.CORRECTION, row)
                return
            yield Verdict(token, Origin.ACCEPTED, row)
        yield _last(chooser, drafts, rows)


class _SamplingRule:
    """Drafts drawn by random numbers of their own, new in each round."""

    def __init__(self) -> None:
        self._round = 0

    def draft(self, chooser: Chooser, logits: Row) -> Draft:
        law = chooser.distribution(logits)
        return Draft(chooser.draw(law, Stream.DRAFT, self._round), law)


class _TokenByTokenRule(_SamplingRule):
    """Drafts judged one after the other, up to the first that does not stand."""

    def accept(self, chooser: Chooser, drafts: Sequence[Draft], rows: Sequence[Row]) -> Iterator[Verdict]:
        for draft, row in zip(drafts, rows, strict=False):
            target = chooser.distribution(row)
            if not self._stands(chooser, draft, target):
                yield Verdict(chooser.draw(self._correction(draft, target)), Origin.CORRECTION, row)
                break
            yield Verdict(draft.token, Origin.ACCEPTED, row)
        else:
            yield _last(chooser, drafts, rows)
        self._round += 1

    def _stands(self, chooser: Chooser, draft: Draft, target: Distribution) -> bool:
        raise NotImplementedError

    def _correction(self, draft: Draft, target: Distribution) -> Distribution:
        raise NotImplementedError


class ResidualRule(_TokenByTokenRule):
    """Rejection sampling token by token (Leviathan et al., arXiv 2211.17192; Chen et al., arXiv 2302.01318)."""

    def _stands(self, chooser: Chooser, draft: Draft, target: Distribution) -> bool:
        ratio = likelihood_ratio(target, draft.drawn_from, draft.token)
        return chooser.uniform(Stream.ACCEPT, self._round) < ratio

    def _correction(self, draft: Draft, target: Distribution) -> Distribution:
        return residual(target, draft.drawn_from)


class BlockRule(_SamplingRule):
    """Block verification (Sun et al., arXiv 2403.10444): the drafts are judged together, never fewer stand."""

    def accept(self, chooser: Chooser, drafts: Sequence[Draft], rows: Sequence[Row]) -> Iterator[Verdict]:
        history, start = chooser.history, len(chooser.history)
        targets: list[Distribution] = []
        numbers: list[float] = []
        for index, ((token, _), row) in enumerate(zip(drafts, rows, strict=False)):
            try:
                target = chooser.distribution(row)
                numbers.append(chooser.uniform(Stream.ACCEPT, self._round))
                possible = target.probability(token) > 0
                if possible:
                    history.push(token)
            except Exception:  # behind drafts that may not stand: they are judged without it, as if it had no draft
                drafts = drafts[:index]
                break
            targets.append(target)
            if not possible:  # nor can anything behind it stand
                break
        history.rollback(start)
        laws = [draft.drawn_from for draft in drafts]
        thresholds, scales = block_thresholds(targets, laws, [token for token, _ in drafts])
        passed = [i + 1 for i, threshold in enumerate(thresholds) if numbers[i] < threshold]
        accepted = passed[-1] if passed else 0
        for draft, row in zip(drafts[:accepted], rows, strict=False):
            yield Verdict(draft.token, Origin.ACCEPTED, row)
        if accepted < len(drafts):
            law = residual(targets[accepted], laws[accepted], scales[accepted])
            yield Verdict(chooser.draw(law), Origin.CORRECTION, rows[accepted])
        else:
            yield _last(chooser, drafts, rows)
        self._round += 1


class LossyTypicalRule(_TokenByTokenRule):
    """A draft stands when the target finds it likely enough for its entropy (Cai et al., arXiv 2401.10774, section 3).

    The text is not distributed as the target's.
    """

    EPSILON = 0.09
    DELTA = 0.3

    def _stands(self, chooser: Chooser, draft: Draft, target: Distribution) -> bool:
        probabilities = target.probabilities
        entropy = -float((probabilities * np.log(probabilities)).sum())
        return target.probability(draft.token) > min(self.EPSILON, self.DELTA * math.exp(-entropy))

    def _correction(self, draft: Draft, target: Distribution) -> Distribution:
        return target


RULES: dict[str, type[AcceptanceRule]] = {
    "exact": ExactRule,
    "residual": ResidualRule,
    "block": BlockRule,
    "lossy-typical": LossyTypicalRule,
}


def acceptance_rule(name: str) -> AcceptanceRule:
    """A new rule object for a request.

    Raises:
        OutriderError: there is no such rule.
    """
    if not isinstance(name, str) or name not in RULES:
        raise OutriderError(f"unknown acceptance rule {name!r}; choose one of {', '.join(RULES)}")
    return RULES[name]()


def agreement(drafts: Sequence[int], text: Sequence[int]) -> int:
    """How many of the first tokens are those of the text, as far as it goes."""
    pairs = zip(drafts, text, strict=False)
    return next((index for index, (mine, its) in enumerate(pairs) if mine != its), min(len(drafts), len(text)))


def likelihood_ratio(target: Distribution, draft: Distribution, token: int) -> float:
    """p(token) / q(token), which may be above 1; the token was drawn from q."""
    return target.probability(token) / draft.probability(token)


def residual(target: Distribution, draft: Distribution, scale: float = 1.0) -> Distribution:
    """norm(max(scale * p - q, 0)): what the correction is drawn from."""
    left = _surplus(target, draft, scale)
    kept = np.flatnonzero(left)
    if not len(kept):  # p = q up to rounding
        return target
    return Distribution(target.ids[kept], left[kept])


def _surplus(target: Distribution, draft: Distribution, scale: float) -> NDArray[np.float64]:
    """max(scale * p - q, 0) for each of the target's tokens, float64 ``[n]``."""
    surplus: NDArray[np.float64] = np.maximum(scale * target.probabilities - draft.probabilities_of(target.ids), 0)
    return surplus


def block_thresholds(
    targets: Sequence[Distribution], laws: Sequence[Distribution], tokens: Sequence[int]
) -> tuple[list[float], list[float]]:
    """Algorithm 2 of arXiv 2403.10444.

    Args:
        targets: p_1, p_2, ..., the target's law at each draft given the drafts before it, at least up to the first
            draft that it gives no probability.
        laws: q_1 .. q_K.
        tokens: x_1 .. x_K.

    Returns:
        ``h_1 .. h_n``, the probability that the first i drafts stand when no more do, for the n drafts that have a
        target; and ``b_0 .. b_n``, the scale of p in the residual behind i accepted drafts.
    """
    scales = [1.0]
    for target, law, token in zip(targets, laws, tokens, strict=False):
        scales.append(min(1.0, scales[-1] * likelihood_ratio(target, law, token)))
    thresholds = []
    for i in range(1, len(targets) + 1):
        if i == len(tokens) or scales[i] == 0:
            thresholds.append(scales[i])
            continue
        mass = float(_surplus(targets[i], laws[i], scales[i]).sum())
        room = mass + 1 - scales[i]
        thresholds.append(mass / room if room > 0 else 1.0)
    return thresholds, scales


def _last(chooser: Chooser, drafts: Sequence[Draft], rows: Sequence[Row]) -> Verdict:
    """The target's token behind drafts that all stand, or where there were none."""
    row = rows[len(drafts)]
    return Verdict(chooser.choose(row), Origin.BONUS if drafts else Origin.PLAIN, row)
