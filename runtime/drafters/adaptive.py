"""The drafter whose controller chooses, round by round, who drafts and how many tokens."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from time import perf_counter
from typing import NamedTuple

from outrider.engines.next_tokens import NextTokens
from outrider.runtime.accept import Draft, agreement
from outrider.runtime.controller import BLOCK, LOOKUP, MODEL, TABLE, Choice, Controller
from outrider.runtime.drafters import Drafter, Draw, ModelSource
from outrider.runtime.drafters.model import ModelDrafter
from outrider.runtime.drafters.ngram import NgramDrafter, copied
from outrider.runtime.sampling.history import History
from outrider.runtime.stats import DecodeStats


class Proposal(NamedTuple):
    """Tokens, and for each the evidence that the controller judges it by."""

    tokens: Sequence[int]
    evidence: Sequence[float]


class Lookups:
    """What can be proposed at no cost: from the text so far, and from a table of what mostly follows."""

    def __init__(self, table: NextTokens | None) -> None:
        self._table = table
        self._text = NgramDrafter()

    def begin(self) -> None:
        self._text.begin()

    def propose(self, history: History, k: int) -> dict[str, Proposal]:
        found: dict[str, Proposal] = {}
        tokens = history.tokens
        match = self._text.match(tokens)
        if match is not None:
            # Where the first tokens stand, the next ones follow a longer agreement.
            found[LOOKUP] = Proposal(copied(tokens, match.start, k), range(match.size, match.size + k))
        if self._table is not None:
            chain, known = self._table.chain(tokens, k)
            if chain:
                found[TABLE] = Proposal(chain, known)
        return found


class SourcesDrafter(Drafter):
    """What drafters over lookups and a model have in common.

    Args:
        lookups: None to ask the model alone.
        model: None to do without.
        free: whether the model is asked token by token, where it can be.
    """

    def __init__(self, lookups: Lookups | None, model: ModelSource | None, *, free: bool) -> None:
        self._lookups = lookups
        self._model = model
        self._steps = model if free and isinstance(model, ModelDrafter) else None

    @property
    def passes(self) -> int:
        return self._model.passes if self._model else 0

    @property
    def seconds(self) -> float:
        return self._model.seconds if self._model else 0.0

    def begin(self) -> None:
        for source in (self._lookups, self._model):
            if source is not None:
                source.begin()

    def _looked_up(self, history: History, k: int) -> dict[str, Proposal]:
        return self._lookups.propose(history, k) if self._lookups else {}


class AdaptiveDrafter(SourcesDrafter):
    """See ``drafters.Drafter``; for one request.

    Args:
        free: whether any part of what was drafted may be verified. Under rules that judge drafts by the law that they
            were drawn from, leaving a token out because of what it is would change the law of the text: there K is
            chosen before the model draws.
        stats: told what was chosen.
    """

    def __init__(
        self,
        controller: Controller,
        lookups: Lookups | None,
        model: ModelSource | None,
        *,
        free: bool,
        stats: DecodeStats,
    ) -> None:
        super().__init__(lookups, model, free=free)
        self._controller = controller
        self._stats = stats
        self._choice: Choice | None = None
        self._proposals: Mapping[str, Proposal] = {}
        self._proposed = 0

    def begin(self) -> None:
        self._controller.begin()
        super().begin()

    def propose(self, history: History, k: int, draw: Draw) -> Sequence[Draft]:
        proposals = self._looked_up(history, k)
        offers: dict[str, Sequence[float]] = {source: proposal.evidence for source, proposal in proposals.items()}
        lacking = self._model.lacking(history) if self._model else 0
        choose, length = self._controller.choose, len(history) - 1
        drafts: Sequence[Draft] = []
        if self._steps is not None:
            drawn: list[Draft] = []
            evidence: list[float] = []
            start = perf_counter()
            with closing(self._steps.steps(history, draw)) as steps:
                choice = choose(length, k, offers, _drawn(steps, drawn, evidence), lacking)
            if drawn:
                self._controller.took(choice, perf_counter() - start)
            proposals[MODEL] = Proposal([draft.token for draft in drawn], evidence)
            drafts = drawn
        else:
            if self._model is not None:
                offers[BLOCK] = range(1, k + 1)
            choice = choose(length, k, offers, None, lacking, self._model.tiers if self._model else ())
            if choice.source == BLOCK and self._model is not None:
                drafts = self._model.propose(history, choice.k, draw)
                # Tokens that it had not are as good as refused.
                proposals[BLOCK] = Proposal([draft.token for draft in drafts], range(1, choice.k + 1))
        if choice.source in (LOOKUP, TABLE):
            drafts = [Draft(token) for token in proposals[choice.source].tokens]
        drafts = drafts[: choice.k]
        self._choice, self._proposals, self._proposed = choice, proposals, len(drafts)
        return drafts

    def learn(self, history: History, committed: int, seconds: float) -> None:
        choice, self._choice = self._choice, None
        if choice is None:
            return
        text = history.tokens[len(history) - committed :]
        judged = {}
        for source, (tokens, evidence) in self._proposals.items():
            accepted = agreement(tokens, text)
            judged[source] = evidence, accepted, accepted < min(len(evidence), committed)
        as_chosen = self._proposed == choice.k
        self._controller.learn(choice, committed, judged, seconds if as_chosen else None)
        self._stats.chose(choice, self._proposed, committed)


def _drawn(steps: Iterator[tuple[Draft, float]], drawn: list[Draft], evidence: list[float]) -> Iterator[float]:
    """The evidence of each draft, which is noted with it."""
    for draft, probability in steps:
        drawn.append(draft)
        evidence.append(probability)
        yield probability
