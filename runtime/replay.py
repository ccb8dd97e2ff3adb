"""Recorded rounds played again: what a controller, a fixed K, or one who knows the future would have made of them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from outrider.runtime.controller import BLOCK, LOOKUP, MODEL, TABLE, Choice, Controller
from outrider.runtime.costs import Costs, RoundCosts
from outrider.runtime.trace import Traced, TracedRequest

# What a drafter asks, in order, by its name on the command line.
ASKED = {"ngram": (LOOKUP, TABLE), "model": (MODEL, BLOCK), "cascade": (LOOKUP, MODEL, BLOCK)}
_DRAWN = (MODEL, BLOCK)  # sources that take draft steps


@dataclass
class Replayed:
    """Seconds by the trace's costs, and of each round what was chosen and how many tokens it committed."""

    seconds: float = 0.0
    choices: list[Choice] = field(default_factory=list)
    committed: list[int] = field(default_factory=list)

    def run(self, choice: Choice, seconds: float, committed: int) -> None:
        self.choices.append(choice)
        self.seconds += seconds
        self.committed.append(committed)


def replay(request: TracedRequest, controller: Controller, drafter: str = "cascade") -> Replayed:
    """The rounds that the controller would have run, from among what ``drafter`` may propose.

    With ``cascade`` that is everything, the table of next tokens too.
    """
    costs, total = controller.costs, Replayed()
    allowed = ASKED[drafter] + (TABLE,) * (drafter == "cascade")
    controller.begin()
    end, at, lacking = len(request.positions), 0, request.num_prompt_tokens + 1
    while at < end:
        room = min(costs.largest_k, end - at - 1)
        length = request.num_prompt_tokens + at
        proposals = {source: _cut(found, room) for source, found in request.positions[at].items() if source in allowed}
        offers = {source: found.evidence for source, found in proposals.items() if source != MODEL}
        steps = iter(proposals[MODEL].evidence) if MODEL in proposals else None
        choice = controller.choose(length, room, offers, steps, lacking)
        drafting = _drafting_seconds(costs, choice.drafted, lacking, length)
        stood = min(proposals[choice.source].accepted, choice.k) if choice.source else 0
        committed = stood + 1
        total.run(choice, costs.rounds(length)[choice.k] + drafting, committed)
        controller.learn(choice, committed, dict(_judged(proposals, choice, committed)))
        lacking = _lacking(lacking, committed, choice.drafted, request.positions[at])
        at += committed
    return total


def replay_fixed(request: TracedRequest, costs: Costs, drafter: str, k: int) -> Replayed:
    """The rounds of a drafter with ``k`` drafts each; ``none`` is plain decoding."""
    total = Replayed()
    end, at, lacking = len(request.positions), 0, request.num_prompt_tokens + 1
    while at < end:
        length = request.num_prompt_tokens + at
        found = next(
            ((source, request.positions[at][source]) for source in ASKED.get(drafter, ()) if _has(request, at, source)),
            None,
        )
        proposed = min(k, end - at - 1, len(found[1].evidence)) if found else 0
        drafted = proposed if found and found[0] in _DRAWN else 0
        stood = min(found[1].accepted, proposed) if found else 0
        seconds = costs.rounds(length)[proposed] + _drafting_seconds(costs, drafted, lacking, length)
        choice = Choice(found[0] if found else None, proposed, stood + 1, seconds, drafted)
        total.run(choice, seconds, stood + 1)
        lacking = _lacking(lacking, stood + 1, drafted, request.positions[at])
        at += stood + 1
    return total


def oracle_seconds(request: TracedRequest, costs: Costs) -> float:
    """The least time in which the text can be had from these proposals, by one who knows which of them stand.

    Each round drafts and verifies just what pays; a draft model's catching up is left out. No controller reaches it.
    """
    end = len(request.positions)
    least = [0.0] * (end + 1)  # from each position to the end
    for at in range(end - 1, -1, -1):
        length = request.num_prompt_tokens + at
        rounds = costs.rounds(length)
        least[at] = rounds[0] + least[at + 1]
        for source, (evidence, accepted) in request.positions[at].items():
            for k in range(1, min(accepted, len(evidence), costs.largest_k, end - at - 1) + 1):
                drafting = _drafting_seconds(costs, k, 1, length) if source in _DRAWN else 0.0
                least[at] = min(least[at], rounds[k] + drafting + least[at + k + 1])
    return least[0]


def _has(request: TracedRequest, at: int, source: str) -> bool:
    found = request.positions[at].get(source)
    return found is not None and len(found.evidence) > 0


def _cut(found: Traced, room: int) -> Traced:
    return Traced(found.evidence[:room], min(found.accepted, room))


def _lacking(before: int, committed: int, drafted: int, proposals: dict[str, Traced]) -> int:
    """What the draft model's cache lacks behind a round: of its drafts it holds all but the last."""
    if not drafted:
        return before + committed
    stood = next(proposals[source].accepted for source in _DRAWN if source in proposals)
    return committed - min(stood, committed, drafted - 1)


def _drafting_seconds(costs: RoundCosts, drafted: int, lacking: int, length: int) -> float:
    if not drafted:
        return 0.0
    return costs.first_step(lacking, length) + (drafted - 1) * costs.step(length)


def _judged(
    proposals: dict[str, Traced], choice: Choice, committed: int
) -> Iterator[tuple[str, tuple[Sequence[float], int, bool]]]:
    """What a loop would have seen of each proposal: what was drawn, as far as the text went."""
    for source, (evidence, accepted) in proposals.items():
        seen = evidence[: choice.drafted] if source in _DRAWN else evidence
        stood = min(accepted, len(seen), committed)
        yield source, (seen, stood, stood < min(len(seen), committed))
