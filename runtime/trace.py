"""Traces: what every source of drafts would propose at every position of a text, and how much of it would stand.

Each round of a recorded run drafts everything and verifies nothing, so that its text is plain decoding's and every
position is visited. Whatever a controller chooses there can then be replayed without a model or a clock
(``replay.py``).
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from outrider.engines.errors import OutriderError
from outrider.runtime.accept import Draft, agreement
from outrider.runtime.controller import BLOCK, EDGES, MODEL, SOURCES, Priors, classify
from outrider.runtime.costs import Costs
from outrider.runtime.decode import decode
from outrider.runtime.drafters import Draw, ModelSource
from outrider.runtime.drafters.adaptive import Lookups, Proposal, SourcesDrafter
from outrider.runtime.sampling.history import History
from outrider.runtime.sampling.options import SamplingOptions
from outrider.runtime.stats import DecodeStats

if TYPE_CHECKING:
    from outrider.runtime.generate import Pipeline

FORMAT = "outrider-trace"
VERSION = 1


class Traced(NamedTuple):
    """A proposal: evidence for each of its tokens (``controller.EDGES``), and how many of them would stand."""

    evidence: tuple[float, ...]
    accepted: int


@dataclass(frozen=True)
class TracedRequest:
    """``positions`` has, for each output token behind the first, the proposals by source."""

    id: str
    category: str
    num_prompt_tokens: int
    positions: list[dict[str, Traced]]

    def judged(self) -> Iterator[tuple[str, int, float, bool]]:
        """Source, place in its block from 1, evidence, and whether it would stand, of each token the text reaches."""
        for index, proposals in enumerate(self.positions):
            left = len(self.positions) - index
            for source, (evidence, accepted) in proposals.items():
                for place, known in enumerate(evidence[: min(accepted + 1, left)]):
                    yield source, place + 1, known, place < accepted


@dataclass(frozen=True)
class Trace:
    """Requests, and what rounds cost on the device that they were recorded on."""

    device: str
    costs: Costs
    requests: list[TracedRequest]


class RecordingDrafter(SourcesDrafter):
    """See ``drafters.Drafter``: asks every source, and proposes nothing.

    Args:
        free: whether the model is asked token by token, as ``AdaptiveDrafter`` does.
    """

    def __init__(self, lookups: Lookups, model: ModelSource | None, *, free: bool) -> None:
        super().__init__(lookups, model, free=free)
        self._seen: list[tuple[int, dict[str, Proposal]]] = []

    def propose(self, history: History, k: int, draw: Draw) -> Sequence[Draft]:
        proposals = self._looked_up(history, k)
        if self._steps is not None:
            with closing(self._steps.steps(history, draw)) as steps:
                drawn = [(draft.token, known) for draft, known in islice(steps, k)]
            proposals[MODEL] = Proposal([token for token, _ in drawn], [known for _, known in drawn])
        elif self._model is not None:
            drafts = self._model.propose(history, k, draw)
            proposals[BLOCK] = Proposal([draft.token for draft in drafts], range(1, len(drafts) + 1))
        self._seen.append((len(history), proposals))
        return ()

    def positions(self, tokens: Sequence[int]) -> list[dict[str, Traced]]:
        """What was proposed, judged by the text that came of it."""
        return [
            {
                source: Traced(tuple(proposal.evidence), agreement(proposal.tokens, tokens[length:]))
                for source, proposal in proposals.items()
            }
            for length, proposals in self._seen
        ]


def record(
    pipeline: Pipeline,
    name: str,
    category: str,
    prompt: Sequence[int],
    options: SamplingOptions,
) -> tuple[TracedRequest, DecodeStats]:
    """Decode a prompt plainly, and note at every position what the bundle's drafters have to say."""
    request = pipeline.new_request(prompt, options)
    drafter = RecordingDrafter(pipeline.roster.lookups, pipeline.roster.model, free=pipeline.drafts_freely(request))
    for _ in decode(pipeline.target, drafter, max(pipeline.tiers), request):
        pass
    positions = drafter.positions(request.history.tokens)
    positions += [{}] * (request.stats.num_round_tokens - len(positions))  # where nothing was asked for: the last
    return TracedRequest(name, category, len(prompt), positions), request.stats


def count_priors(requests: Iterable[TracedRequest]) -> Priors:
    """How often the tokens of each class stood, where all before them did."""
    counts = {source: [[0, 0] for _ in range(len(edges) + 1)] for source, edges in EDGES.items()}
    for request in requests:
        for source, place, known, stood in request.judged():
            classes = [counts[source][classify(source, known)]]
            if source == MODEL:  # for rules under which it is not asked step by step
                classes.append(counts[BLOCK][classify(BLOCK, place)])
            for count in classes:
                count[0] += stood
                count[1] += 1
    return {source: [(stood, judged) for stood, judged in classes] for source, classes in counts.items()}


def write_trace(path: Path, trace: Trace) -> None:
    """As JSON lines: what it is, then a request each; probabilities to three digits."""
    head = {"format": FORMAT, "version": VERSION, "device": trace.device, "costs": asdict(trace.costs)}
    lines = [head, *(_record_of(request) for request in trace.requests)]
    path.write_text("".join(json.dumps(line, separators=(",", ":")) + "\n" for line in lines), encoding="utf-8")


def read_trace(path: Path) -> Trace:
    """Raises OutriderError: no such file, another version, or a line that is no request (with its number)."""
    if not path.is_file():
        raise OutriderError(f"{path} does not exist; record one with `outrider bench --trace {path}`")
    try:
        first, *rest = path.read_text(encoding="utf-8").splitlines() or [""]
        head = json.loads(first)
        found = head["format"], head["version"]
    except (ValueError, KeyError, TypeError):
        raise OutriderError(f"{path}, line 1: no trace; record one with `outrider bench --trace`") from None
    if found != (FORMAT, VERSION):
        raise OutriderError(
            f"{path} is {found[0]} version {found[1]}, this Outrider reads {FORMAT} version {VERSION}; record it again"
        )
    try:
        trace = Trace(str(head["device"]), read_costs(head["costs"]), [])
    except (ValueError, KeyError, TypeError) as error:
        raise OutriderError(f"{path}, line 1: damaged costs ({error}); record it again") from None
    for number, line in enumerate(rest, start=2):
        try:
            trace.requests.append(_read_request(json.loads(line)))
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise OutriderError(f"{path}, line {number}: no traced request ({error}); record it again") from None
    drawn = any({MODEL, BLOCK} & entry.keys() for request in trace.requests for entry in request.positions)
    if drawn and not trace.costs.draft:
        raise OutriderError(f"{path} has drafts of a model and no costs of them; record it again")
    if not trace.requests:
        raise OutriderError(f"{path} holds no request; record it again")
    return trace


def _record_of(request: TracedRequest) -> dict[str, Any]:
    positions = [
        {name: ([round(known, 3) for known in found.evidence], found.accepted) for name, found in entry.items()}
        for entry in request.positions
    ]
    return vars(request) | {"positions": positions}


def _read_request(record: dict[str, Any]) -> TracedRequest:
    positions = []
    for entry in record["positions"]:
        proposals = {name: Traced(tuple(map(float, known)), int(stood)) for name, (known, stood) in entry.items()}
        for source, proposal in proposals.items():
            if source not in SOURCES or not 0 <= proposal.accepted <= len(proposal.evidence):
                raise ValueError(f"{source} {proposal.accepted} of {len(proposal.evidence)}")
        positions.append(proposals)
    return TracedRequest(str(record["id"]), str(record["category"]), int(record["num_prompt_tokens"]), positions)


def read_costs(record: dict[str, Any]) -> Costs:
    """From JSON.

    Raises:
        ValueError, KeyError, TypeError: it is no such table.
    """
    rows = {name: tuple(tuple(map(float, row)) for row in record[name]) for name in ("verify", "draft")}
    return Costs(
        tuple(map(int, record["lengths"])),
        rows["verify"],
        tuple(map(int, record["draft_rows"])),
        rows["draft"],
        tuple(map(float, record["draft_step"])),
        float(record["round_host"]),
        float(record["draft_host"]),
    )
