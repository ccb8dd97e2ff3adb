"""The row probe: does a row of logits depend on how many rows ran with it, or on what those rows hold?

Speculation verifies K+1 rows at once where plain decoding runs one. The text stays the same bit for bit only if a row's
logits do. This is tested on the engine that will run, for every number of rows that the loop uses, not assumed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from outrider.engines.engine import Engine, row_counts
from outrider.engines.errors import OutriderError

_CONTEXT = 24
_POSITIONS = 12


@dataclass(frozen=True)
class RowProbe:
    """``exactness`` is ``bitwise`` when all passes of at least ``min_rows`` rows agree, else ``tolerance``."""

    exactness: str
    min_rows: int


def probe_rows(engine: Engine, tiers: Sequence[int], seed: int = 0) -> RowProbe:
    """Compare logits of the same positions computed in passes of every width from 1 to K+1, and of a prefill chunk.

    Args:
        engine: batch 1; its cache is overwritten.
        tiers: the values of K.

    Raises:
        OutriderError: rows depend on what the other rows of the pass hold, so that no speculation can be lossless.
    """
    rng = np.random.default_rng(seed)
    text = rng.integers(0, engine.info.vocab_size, _CONTEXT + _POSITIONS)
    room = engine.info.capacity - _CONTEXT - _POSITIONS
    widths = sorted({*range(1, max(tiers) + 2), 2, *(width for width in row_counts(tiers) if width <= room)})
    by_width = {width: _logits_by(engine, text, width, rng) for width in widths}
    # The widest passes again, with other junk behind the text: at least one row of each is junk.
    junk_width = max(widths[-1], 2)
    first, second = (_logits_by(engine, text, junk_width, rng, valid=junk_width - 1) for _ in range(2))
    if not np.array_equal(first, second):
        difference = float(np.abs(first - second).max())
        raise OutriderError(
            f"logits of a row change by up to {difference:.3g} when the other rows of the pass change, so no "
            "speculation over this graph can be lossless; export with another --precision"
        )
    # One-row passes may use other kernels; what matters is the fewest rows from which on all passes agree.
    exact = {width for width in widths if np.array_equal(by_width[width], first)}
    for min_rows in (1, 2):
        if all(width in exact for width in widths if width >= min_rows):
            return RowProbe("bitwise", min_rows)
    return RowProbe("tolerance", 1)


def _logits_by(
    engine: Engine, text: NDArray[np.int64], width: int, rng: np.random.Generator, valid: int | None = None
) -> NDArray[np.float32]:
    """Logits of the last positions of ``text``, from passes of ``width`` rows, of which at most ``valid`` are text."""
    valid = width if valid is None else valid
    plan = engine.plan(width, width)
    lengths = np.zeros(1, np.int32)
    for start in range(0, _CONTEXT, max(width, 2)):
        chunk = text[None, start : min(_CONTEXT, start + max(width, 2))]
        engine.plan(chunk.shape[1], 1).run(chunk, lengths + start)
    rows = []
    for start in range(_CONTEXT, _CONTEXT + _POSITIONS, valid):
        ids = rng.integers(0, engine.info.vocab_size, (1, width))
        real = text[start : start + valid]
        ids[0, : len(real)] = real
        rows.append(plan.run(ids, lengths + start)[0, : len(real)].copy())
    return np.concatenate(rows)
