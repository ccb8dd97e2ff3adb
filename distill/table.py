"""A table of next tokens, counted in the target's text: drafts that cost nothing (``engines/next_tokens.py``)."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from outrider.distill.writer import Written
from outrider.engines.next_tokens import pair_context

_SHARE = 0.5  # of the law behind a context that its best token has on average: a draft worth verifying
_SEEN = 2  # times that a context occurred
_ENTRIES = 32768
_LIKELIEST = 4  # tokens counted of each law

Contexts = NDArray[np.uint64]


def write_next_tokens(path: Path, written: Iterable[Written]) -> int:
    """Returns the number of entries."""
    singles, pairs, tokens, masses = [], [], [], []
    for one in written:
        first = max(one.answer - 1, 1)
        ids = one.ids.astype(np.uint64)
        singles.append(ids[first:])
        pairs.append(pair_context(ids[first - 1 : -1], ids[first:]))
        likely, law = one.laws(first)
        tokens.append(likely[:, :_LIKELIEST].astype(np.uint32))
        masses.append(law[:, :_LIKELIEST])
    behind, law = np.concatenate(tokens), np.concatenate(masses)
    single = _best(np.concatenate(singles), behind, law)
    pair = _best(np.concatenate(pairs), behind, law)
    known = dict(zip(single[0].tolist(), single[1].tolist(), strict=True))
    last = (pair[0] & np.uint64(2**32 - 1)).tolist()
    new = np.array([known.get(key) != token for key, token in zip(last, pair[1].tolist(), strict=True)], bool)
    kept = np.sort(np.argsort(-np.concatenate([single[2], pair[2][new]]), kind="stable")[:_ENTRIES])
    contexts, following = (np.concatenate([single[part], pair[part][new]])[kept] for part in (0, 1))
    np.savez_compressed(path, contexts=contexts, tokens=following)
    return len(kept)


def _best(
    contexts: Contexts, tokens: NDArray[np.uint32], law: NDArray[np.float32]
) -> tuple[Contexts, NDArray[np.uint32], NDArray[np.float64]]:
    """Contexts that leave little open, the likeliest token behind each, and its mass over all occurrences."""
    keys, position, counts = np.unique(contexts, return_inverse=True, return_counts=True)
    rows = np.repeat(position, tokens.shape[1])
    cells, cell_of = np.unique(rows.astype(np.uint64) << np.uint64(32) | tokens.reshape(-1), return_inverse=True)
    mass = np.bincount(cell_of, law.reshape(-1)).astype(np.float64)
    row = (cells >> np.uint64(32)).astype(np.int64)
    order = np.lexsort((-mass, row))
    best = order[np.unique(row[order], return_index=True)[1]]  # of each row the first, in the order of the rows
    kept = (counts >= _SEEN) & (mass[best] >= _SHARE * counts)
    return keys[kept], (cells[best] & np.uint64(2**32 - 1)).astype(np.uint32)[kept], mass[best][kept]
