"""Who drafts, and how many tokens: the choice of each round, from numbers alone.

A round with K drafts takes ``t(K)`` seconds and commits ``1 + p_1 + .. + p_K`` tokens, p_i being the probability that
the first i drafts stand. With ``rate`` the tokens per second that decoding has reached of late, the round to choose is
the one with the largest ``tokens - rate * seconds``: that maximizes tokens per second over many rounds (the renewal
reward theorem), where the largest ``tokens / seconds`` of each round by itself does not.

Nothing here knows of models or clocks, so that recorded rounds can be replayed (``trace.py``).
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from operator import mul
from typing import NamedTuple

from outrider.runtime.costs import RoundCosts

LOOKUP, TABLE, MODEL, BLOCK = "lookup", "table", "model", "block"
SOURCES = (LOOKUP, TABLE, MODEL, BLOCK)
# Evidence for a draft token, and where its classes begin: how many tokens before it agree with those before the one it
# copies; how many tokens the table knows it by; its probability in the draft model; its place, where that is unknown.
EDGES: dict[str, tuple[float, ...]] = {
    LOOKUP: (3, 4, 6, 10),
    TABLE: (2,),
    MODEL: (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.97),
    BLOCK: (2, 3, 5),
}
# (accepted, judged) drafts by class. These are for bundles that were never tuned.
Priors = Mapping[str, Sequence[tuple[float, float]]]
DEFAULT_PRIORS: Priors = {
    LOOKUP: [(12, 20), (14, 20), (15, 20), (16, 20), (18, 20)],
    TABLE: [(12, 20), (13, 20)],
    MODEL: [(1, 20), (4, 20), (5, 20), (8, 20), (9, 20), (11, 20), (12, 20), (15, 20), (18, 20), (18, 20), (19, 20)],
    BLOCK: [(9, 20), (9, 20), (9, 20), (9, 20)],
}

_TRUST = 1.0  # expected acceptances that a prior counts for,
_MEMORY = 0.98  # what is left of a count with each draft token judged after it,
_SURPRISE = 0.2  # share of the prior below which a draft that stands
_DOUBTED = 0.5  # leaves so much of what was known,
_CARRIED = 16.0  # and how many of them the next request still hears of
_RATE_MEMORY = 0.95  # a round
_SHARE_MEMORY = 0.98  # a draft token
_HORIZON = 16  # rounds that pay for the draft model's catching up
_PROBING = 0.0075  # share of the time that is spent on finding out whether the model pays again
_MOST = 0.99  # probability that a draft token is ever given
_PACE_TRUST = 8.0  # passes that the pace of all others counts for,
_PACE_MEMORY = 0.98  # and what is left of a pass with each one after it
_RATIO = 8.0  # of seconds to those expected that is still believed
_HOPELESS = 0.02  # probability of a chain of drafts that is not made longer


def classify(source: str, evidence: float) -> int:
    """The class of a token."""
    return bisect_right(EDGES[source], evidence)


class Choice(NamedTuple):
    """``source`` is None for plain decoding; ``tokens`` and ``seconds`` are what the round is expected to bring and
    take, ``drafted`` the draft tokens that the model was asked for, verified or not, ``drafting`` the seconds of that.
    """

    source: str | None
    k: int
    tokens: float
    seconds: float
    drafted: int = 0
    drafting: float = 0.0


class Drafting(NamedTuple):
    """Seconds of a model's first draft step, with the catching up, and of each one more; and how much of the first
    later rounds pay for.
    """

    first: float
    step: float
    invested: float


NO_DRAFTING = Drafting(0.0, 0.0, 0.0)


@dataclass
class Pace:
    """How long passes take by K, next to the costs: a measurement ahead was of another hour, and of passes in a row."""

    largest_k: int

    def __post_init__(self) -> None:
        self._sums = [0.0] * (self.largest_k + 1)
        self._counts = [0.0] * (self.largest_k + 1)
        self._all = 1.0

    def saw(self, k: int, ratio: float) -> None:
        ratio = min(_RATIO, max(1 / _RATIO, ratio))
        self._all = self._all * _PACE_MEMORY + ratio * (1 - _PACE_MEMORY)
        self._sums[k] = self._sums[k] * _PACE_MEMORY + ratio
        self._counts[k] = self._counts[k] * _PACE_MEMORY + 1

    def ratios(self) -> list[float]:
        """By K; of one that was not run of late, as all others'."""
        found = zip(self._sums, self._counts, strict=True)
        return [(_PACE_TRUST * self._all + total) / (_PACE_TRUST + count) for total, count in found]


@dataclass
class Acceptance:
    """How often the drafts of a source stand: measured ahead by class, corrected by what this text shows."""

    source: str
    prior: Sequence[tuple[float, float]]
    accepted: float = 0.0
    expected: float = 0.0

    def __post_init__(self) -> None:
        self._base = [(accepted + 1) / (judged + 2) for accepted, judged in self.prior]
        total = sum(judged for _, judged in self.prior)
        even = 1 / len(self.prior)
        self.shares = [(judged / total if total else even) for _, judged in self.prior]  # of tokens by class

    def chance(self, evidence: float) -> float:
        """The probability that a token stands when all before it do."""
        return min(_MOST, self._base[classify(self.source, evidence)] * self._factor)

    def by_class(self) -> list[tuple[float, float]]:
        """Share of the tokens, and the chance of each, by class."""
        factor = self._factor
        return [(share, min(_MOST, base * factor)) for share, base in zip(self.shares, self._base, strict=True)]

    def seen(self, evidence: float) -> None:
        """A token of the model, whatever becomes of it."""
        index = classify(self.source, evidence)
        self.shares[:] = [share * _SHARE_MEMORY for share in self.shares]
        self.shares[index] += 1 - _SHARE_MEMORY

    def judge(self, evidence: Sequence[float], accepted: int, refused: bool) -> None:
        """The first tokens stood; the next one was refused, or nothing is known of it."""
        for index, known in enumerate(evidence[: accepted + refused]):
            if index < accepted and self._factor < _SURPRISE:  # perhaps the text is another one than before
                self.expected *= _DOUBTED
            self.expected = self.expected * _MEMORY + self._base[classify(self.source, known)]
            self.accepted = self.accepted * _MEMORY + (index < accepted)

    def carry(self) -> None:
        """Into another request, which may be of another kind."""
        kept = min(1.0, _CARRIED / self.expected) if self.expected else 0.0
        self.accepted *= kept
        self.expected *= kept

    @property
    def _factor(self) -> float:
        return (_TRUST + self.accepted) / (_TRUST + self.expected)


@dataclass
class Controller:
    """The state of numbers behind the choices of one pipeline; ``begin`` starts a request."""

    costs: RoundCosts
    priors: Priors = field(default_factory=lambda: DEFAULT_PRIORS)
    clocked: bool = True  # whether the seconds that it hears of are those of its own passes

    def __post_init__(self) -> None:
        self.acceptance = {source: Acceptance(source, self.priors[source]) for source in SOURCES}
        self._pace = Pace(self.costs.largest_k)
        self._tabled: Sequence[float] = ()  # seconds of verify passes at the length of the last choice
        self._tokens = self._seconds = 0.0
        self._credit = 0.0  # seconds that may be spent on probing
        self._step_ratio = 1.0  # of the model's steps, measured to tabled

    def share_shares(self, other: Controller) -> None:
        """Have one count of how many tokens are of which class: it is the model's, not the text's."""
        for source, acceptance in self.acceptance.items():
            acceptance.shares = other.acceptance[source].shares

    def go_on_from(self, other: Controller) -> None:
        """What another has learned from the request that ended last."""
        for source, acceptance in self.acceptance.items():
            known = other.acceptance[source]
            acceptance.accepted, acceptance.expected = known.accepted, known.expected

    def begin(self) -> None:
        for acceptance in self.acceptance.values():
            acceptance.carry()
        self._tokens = self._seconds = 0.0

    def choose(
        self,
        length: int,
        room: int,
        offers: Mapping[str, Sequence[float]],
        steps: Iterator[float] | None = None,
        lacking: int = 0,
        tiers: Sequence[int] = (),
    ) -> Choice:
        """The round to run.

        Args:
            length: tokens in the target's cache.
            room: the most drafts that fit the request, 0 where nothing can be drafted.
            offers: evidence for the tokens of each source that can propose at once. Those of ``BLOCK`` are a draft
                model's that are not drawn yet.
            steps: draws a token of the draft model and gives its evidence, one at a time, as far as it goes; None where
                the model is not asked step by step.
            lacking: tokens that the draft model's cache lacks.
            tiers: the only numbers of tokens that ``BLOCK`` drafts; empty for any.
        """
        rounds = self._rounds(length)
        room = min(room, self.costs.largest_k)
        asked = room and (steps is not None or BLOCK in offers)
        drafting = self._drafting(length, lacking, room) if asked else NO_DRAFTING
        best = Choice(None, 0, 1.0, rounds[0])
        for source, evidence in offers.items():
            if source == BLOCK:
                best = self._better(best, source, evidence[:room], rounds, drafting, tiers)
            else:
                best = self._better(best, source, evidence[:room], rounds)
        if steps is not None and room:
            best = self._with_model(best, rounds, room, steps, drafting)
        elif BLOCK in offers and room and best.source != BLOCK:
            k = min(tiers, default=1)
            seconds = rounds[min(k, len(rounds) - 1)] + drafting.first + (k - 1) * drafting.step
            lost = seconds - best.seconds + (best.tokens - 1) / self._rate(rounds[0])
            if k <= room and self._may_probe(lost):
                best = Choice(BLOCK, k, 1 + self.acceptance[BLOCK].chance(1), seconds, k)
        return best

    def learn(
        self,
        choice: Choice,
        committed: int,
        judged: Mapping[str, tuple[Sequence[float], int, bool]],
        seconds: float | None = None,
    ) -> None:
        """What became of a round.

        Args:
            judged: by source the evidence for its tokens, how many of them the text went on with, and whether it went
                on otherwise behind them; also of proposals that were not verified.
            seconds: of the verify pass, where there is a clock.
        """
        if seconds is not None and self.clocked:
            self._pace.saw(choice.k, seconds / self._tabled[choice.k])
        for source, (evidence, accepted, refused) in judged.items():
            self.acceptance[source].judge(evidence, accepted, refused)
        self._tokens = self._tokens * _RATE_MEMORY + committed
        self._seconds = self._seconds * _RATE_MEMORY + choice.seconds
        self._credit += _PROBING * choice.seconds

    def took(self, choice: Choice, seconds: float) -> None:
        """How long the drafting of a choice really took: samplers, for one, add to the steps that were measured."""
        if not self.clocked:
            return
        found = self._step_ratio * min(_RATIO, max(1 / _RATIO, seconds / choice.drafting))
        self._step_ratio = self._step_ratio * _RATE_MEMORY + found * (1 - _RATE_MEMORY)

    def _rounds(self, length: int) -> Sequence[float]:
        """Seconds of rounds with 0, 1, .. drafts, drafting left out, as they are of late."""
        if not self.clocked:
            return self.costs.rounds(length)
        host = self.costs.round_host
        self._tabled = [seconds - host for seconds in self.costs.rounds(length)]
        return [host + ratio * seconds for ratio, seconds in zip(self._pace.ratios(), self._tabled, strict=True)]

    def _rate(self, plain: float) -> float:
        """Tokens per second of late, with a plain round before the first; never below plain decoding's."""
        return max(1 / plain, (1 + self._tokens) / (plain + self._seconds))

    def _better(
        self,
        best: Choice,
        source: str,
        evidence: Sequence[float],
        rounds: Sequence[float],
        drafting: Drafting = NO_DRAFTING,
        tiers: Sequence[int] = (),
    ) -> Choice:
        """``best``, or the first so many tokens of ``evidence`` where that is worth more."""
        rate = self._rate(rounds[0])
        worth = best.tokens - rate * best.seconds
        tokens = 1.0
        for k, standing in enumerate(accumulate(map(self.acceptance[source].chance, evidence), mul), start=1):
            tokens += standing
            seconds = rounds[k] + drafting.first + drafting.step * (k - 1)
            if tiers and k not in tiers:
                continue
            if tokens - rate * (seconds - drafting.invested) > worth:
                worth = tokens - rate * (seconds - drafting.invested)
                best = Choice(source, k, tokens, seconds, k if drafting.step else 0)
        return best

    def _drafting(self, length: int, lacking: int, room: int) -> Drafting:
        ratio, costs = self._step_ratio, self.costs
        first, caught_up = (ratio * costs.first_step(rows, length) for rows in (lacking, min(lacking, 2)))
        step = ratio * costs.step(length)
        ends = room < self.costs.largest_k  # within the room
        rounds = min(_HORIZON, room) if ends else _HORIZON
        return Drafting(first, step, max(0.0, first - caught_up) * (1 - 1 / max(1, rounds)))

    def _may_probe(self, seconds: float) -> bool:
        """Whether the share of time for probing pays for these; if so, it is spent: it is saved for one probe only."""
        if seconds > self._credit:
            return False
        self._credit = 0.0
        return True

    def _with_model(
        self,
        best: Choice,
        rounds: Sequence[float],
        room: int,
        steps: Iterator[float],
        drafting: Drafting,
    ) -> Choice:
        """Draft as long as the next token is likely worth its step, then verify what is worth its row."""
        rate = self._rate(rounds[0])
        acceptance = self.acceptance[MODEL]
        classes = acceptance.by_class()
        evidence: list[float] = []
        standing, tokens, spent = 1.0, 1.0, 0.0
        while len(evidence) < room:
            k = len(evidence)
            step = drafting.step if k else drafting.first
            charged = step - (0.0 if k else drafting.invested)
            # Worth over verifying what there is, by the class that the next token may be of.
            here = max(best.tokens - rate * best.seconds, tokens - rate * rounds[k])
            verified = tokens - rate * rounds[k + 1]
            gains = ((share, verified + standing * chance - here) for share, chance in classes)
            gain = sum(share * more for share, more in gains if more > 0)
            if gain < rate * charged and (k or not self._may_probe(step)):
                break
            known = next(steps, None)
            if known is None:
                break
            spent += step
            acceptance.seen(known)
            evidence.append(known)
            standing *= acceptance.chance(known)
            tokens += standing
            if standing < _HOPELESS:
                break
        chosen = self._better(best, MODEL, evidence, rounds)
        if not evidence:
            return chosen
        return Choice(chosen.source, chosen.k, chosen.tokens, chosen.seconds + spent, len(evidence), spent)
