"""The round, in the order of the paper (Leviathan et al., arXiv 2211.17192): draft, verify, accept, commit, roll back.

Plain decoding is the same loop with nothing drafted.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from outrider.runtime.accept import count_accepted
from outrider.runtime.choose import choose
from outrider.runtime.commit import Origin, Output
from outrider.runtime.drafters import Drafter
from outrider.runtime.sequence import CachedModel
from outrider.runtime.stats import DecodeStats


def decode(
    target: CachedModel,
    drafter: Drafter,
    prompt: Sequence[int],
    k: int,
    output: Output,
    stats: DecodeStats,
) -> Iterator[int]:
    """Generate into ``output``; yields each token when it is committed, and can be left at any of them.

    Args:
        prompt: at least one token; prompt and output together must fit the target's cache.
        k: K, the most tokens drafted in a round; 0 is plain decoding.
        output: empty, with room for at least one token.
    """
    tokens = list(prompt)
    target.rollback(0)
    drafter.begin(tokens)
    with stats.prefill():
        first = int(choose(target.extend(tokens, 1))[0])
    running = output.commit_token(first, Origin.PLAIN)
    tokens.append(first)
    yield first

    while running:
        with stats.round(target, drafter):
            # Draft. The target adds a token of its own to each round, so K leaves room for it.
            room = min(k, output.remaining - 1)
            drafts = drafter.propose(tokens, room) if room > 0 else []
            # Verify the last committed token and the drafts in one pass.
            chosen = choose(target.extend([tokens[-1], *drafts], len(drafts) + 1)).tolist()
            # Accept.
            accepted = count_accepted(drafts, chosen)
            # Commit, as far as the request goes.
            committed = 0
            while running and committed <= accepted:
                running = output.commit_token(chosen[committed], _origin(committed, accepted, len(drafts)))
                committed += 1
            emitted = chosen[:committed]
            # Roll back: the cache keeps every token but the last one, which the next round brings.
            target.rollback(len(tokens) + committed - 1)
            tokens += emitted
            # Drafts behind the end of the request do not exist, and are not counted.
            judged = len(drafts) if running else min(len(drafts), committed)
            stats.count(committed, proposed=judged, accepted=min(accepted, committed))
        yield from emitted


def _origin(position: int, accepted: int, proposed: int) -> Origin:
    if position < accepted:
        return Origin.ACCEPTED
    if proposed == 0:
        return Origin.PLAIN
    return Origin.BONUS if accepted == proposed else Origin.CORRECTION
