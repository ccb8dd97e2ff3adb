"""The round, in the order of the paper (Leviathan et al., arXiv 2211.17192): draft, verify, accept, commit, roll back.

Plain decoding is the same loop with nothing drafted.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from time import perf_counter

from outrider.runtime.accept import AcceptanceRule, Draft, Verdict
from outrider.runtime.choose import Chooser
from outrider.runtime.commit import Origin, Output
from outrider.runtime.drafters import Drafter
from outrider.runtime.sampling.history import History
from outrider.runtime.sequence import SequenceModel
from outrider.runtime.stats import DecodeStats


@dataclass(frozen=True)
class Request:
    """One request: ``history`` begins as its prompt, of at least one token; ``output`` has room for what fits."""

    history: History
    chooser: Chooser
    rule: AcceptanceRule
    output: Output
    stats: DecodeStats


def decode(target: SequenceModel, drafter: Drafter, k: int, request: Request) -> Iterator[int]:
    """Generate into ``request.output``; yields each token when it is committed, and can be left at any of them.

    Args:
        k: K, the most tokens drafted in a round; 0 is plain decoding.
        request: new, with room for at least one token; prompt and output together fit the target's cache.
    """
    history, chooser, rule = request.history, request.chooser, request.rule
    output, stats = request.output, request.stats
    draw = partial(rule.draft, chooser)
    drafter.begin()
    start = perf_counter()
    target.keep(history.tokens)
    cached = target.length
    row = target.extend(history.tokens[cached:], 1)[0]
    running = _commit(Verdict(chooser.choose(row), Origin.PLAIN, row), request)
    stats.prefill(perf_counter() - start, cached)
    yield history.tokens[-1]

    while running:
        with stats.round(target, drafter, chooser):
            # Draft. The target adds a token of its own to each round, so K leaves room for it.
            room = min(k, output.remaining - 1)
            drafts: Sequence[Draft] = drafter.propose(history, room, draw) if room > 0 else ()
            # Verify the last committed token and the drafts in one pass.
            verifying = target.seconds
            rows = target.extend([history.tokens[-1], *(draft.token for draft in drafts)], len(drafts) + 1)
            # Accept and commit, token by token, as far as the request goes.
            before = len(output.tokens)
            running, failure = _accept(rule.accept(chooser, drafts, rows), request)
            committed = len(output.tokens) - before
            accepted = output.origins[before:].count(Origin.ACCEPTED)
            # Roll back: the cache keeps every token but the last one, which the next round brings.
            target.rollback(len(history) - 1)
            # Drafts behind the end of the request do not exist, and are not counted.
            judged = len(drafts) if running else min(len(drafts), committed)
            stats.count(committed, proposed=judged, accepted=accepted)
            drafter.learn(history, committed, target.seconds - verifying)
        yield from output.tokens[before:]
        if failure is not None:
            raise failure


def _accept(verdicts: Iterator[Verdict], request: Request) -> tuple[bool, Exception | None]:
    """Commit until verdicts or request end: whether it goes on, and what failed behind the tokens that stand."""
    try:
        for verdict in verdicts:
            if not _commit(verdict, request):
                return False, None
    except Exception as error:  # masks that allow nothing, a processor: the tokens before it are good, as in plain
        return False, error
    return True, None


def _commit(verdict: Verdict, request: Request) -> bool:
    logprobs = request.chooser.logprobs(verdict.logits, verdict.token)
    return request.output.commit_token(verdict.token, verdict.origin, logprobs)
