"""The row probe: does a row of logits depend on how many rows ran with it, or on what those rows hold?

Speculation verifies K+1 rows at once where plain decoding runs one. The text stays the same bit for bit only if a row's
logits do. This is proved on the engine that will run, for every row count that the loop uses, not assumed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from outrider.engines.engine import Engine
from outrider.engines.errors import OutriderError

_CONTEXT = 24
_POSITIONS = 12


@dataclass(frozen=True)
class RowProbe:
    """``exactness`` is ``bitwise`` when all passes of at least ``min_rows`` rows agree bit for bit, else ``tolerance``.

    ``max_difference`` is the largest difference between a one-row pass and a many-row pass, in logits.
    """

    exactness: str
    min_rows: int
    max_difference: float


def probe_rows(engine: Engine, row_counts: Sequence[int], seed: int = 0) -> RowProbe:
    """Compare logits of the same positions computed with different numbers of rows.

    Args:
        engine: batch 1; its cache is overwritten.
        row_counts: the numbers of rows that the loop will use, prefill chunk included.

    Raises:
        OutriderError: rows depend on what the other rows of the pass hold, so that no speculation can be lossless.
    """
    rng = np.random.default_rng(seed)
    text = rng.integers(0, engine.info.vocab_size, _CONTEXT + _POSITIONS)
    most = min(max(_POSITIONS, *row_counts), engine.info.capacity - _CONTEXT - _POSITIONS)
    counts = sorted({1, 2, *(count for count in row_counts if count <= most)})
    by_count = {count: _logits_by(engine, text, count, rng) for count in counts}
    reference = by_count[counts[-1]]
    other = _logits_by(engine, text, counts[-1], rng)
    if not np.array_equal(reference, other):
        difference = float(np.abs(reference - other).max())
        raise OutriderError(
            f"logits of a row change by up to {difference:.3g} when the other rows of the pass change, so no "
            "speculation over this graph can be lossless; export with another --precision"
        )
    # One-row passes may use other kernels; what matters is the fewest rows from which on all passes agree.
    exact = [count for count in counts if np.array_equal(by_count[count], reference)]
    difference = max(float(np.abs(logits - reference).max()) for logits in by_count.values())
    for min_rows in (1, 2):
        if all(count in exact for count in counts if count >= min_rows):
            return RowProbe("bitwise", min_rows, difference)
    return RowProbe("tolerance", 1, difference)


def _logits_by(engine: Engine, text: NDArray[np.int64], count: int, rng: np.random.Generator) -> NDArray[np.float32]:
    """Logits of the last positions of ``text``, from passes of ``count`` rows; rows behind the text hold junk."""
    plan = engine.plan(count, count)
    context = text[None, :_CONTEXT]
    lengths = np.zeros(1, np.int32)
    for start in range(0, _CONTEXT, max(count, 2)):
        chunk = context[:, start : start + max(count, 2)]
        engine.plan(chunk.shape[1], 2 if chunk.shape[1] > 1 else 1).run(chunk, lengths + start)
    rows = []
    for start in range(_CONTEXT, _CONTEXT + _POSITIONS, count):
        ids = rng.integers(0, engine.info.vocab_size, (1, count))
        real = text[start : start + count]
        ids[0, : len(real)] = real
        rows.append(plan.run(ids, lengths + start)[0, : len(real)].copy())
    return np.concatenate(rows)
