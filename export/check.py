"""Is the engine that was written the model that was read? Run at the end of every export."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from outrider.engines.engine import Engine
from outrider.engines.errors import OutriderError

# Largest mean Kullback-Leibler divergence (nats) of the engine's next-token law from that of the weights as stored, and
# for float products the largest difference of a logit. Products with blocks round their inputs to int8.
_KL_LIMITS = {"fp32": 1e-6, "fp16": 1e-2, "bf16": 1e-2, "int8": 0.1, "int4": 0.1}
_LOGIT_LIMITS = {"fp32": 1e-2, "fp16": 0.5, "bf16": 0.5}


def check_engine(
    engine: Engine,
    ids: Sequence[int],
    expected: NDArray[np.float32],
    stored: NDArray[np.float32],
    precision: str,
    source: Path,
) -> dict[str, float]:
    """Compare logits over a short text, in a pass over its first half and one behind it, with a reference's.

    Args:
        expected: of the checkpoint; how far the engine is from it is the loss of the precision, and is only reported.
        stored: of the checkpoint as stored in the precision; how far the engine is from it must be within limits.

    Returns:
        ``max_difference`` (logits), ``kl`` (mean over positions, nats), ``same_argmax`` (share of positions) against
        the checkpoint; ``kl_stored`` against the weights as stored.

    Raises:
        OutriderError: the difference is over the limit of the precision, or not a number.
    """
    half = len(ids) // 2
    parts = [_logits(engine, part, start) for part, start in ((ids[:half], 0), (ids[half:], half)) if part]
    found = np.concatenate(parts)
    # What expands its weights to float16 to multiply is as near to them as a float16 graph.
    info = engine.info
    products = ("fp16",) if info.cache_dtype == "float16" else (precision, info.head_precision)
    kl, limit = _kl(stored, found), max(_KL_LIMITS[name] for name in products)
    difference = float(np.abs(stored - found).max())
    if not (kl <= limit and difference <= max(_LOGIT_LIMITS.get(name, np.inf) for name in products)):
        raise OutriderError(
            f"the {precision} engine is not the model in {source}: logits differ by up to {difference:.3g}, "
            f"KL {kl:.3g} nats (limit {limit:g}); no bundle was written"
        )
    return {
        "max_difference": float(np.abs(expected - found).max()),
        "kl": _kl(expected, found),
        "same_argmax": float((expected.argmax(axis=-1) == found.argmax(axis=-1)).mean()),
        "kl_stored": kl,
    }


def _logits(engine: Engine, ids: Sequence[int], start: int) -> NDArray[np.float32]:
    rows = max(2, len(ids))
    tokens = np.asarray(ids, np.int64)[None]
    return np.array(engine.plan(rows, rows).run(tokens, np.full(1, start, np.int32))[0])


def _kl(expected: NDArray[np.float32], found: NDArray[np.float32]) -> float:
    law, other = _log_softmax(expected), _log_softmax(found)
    divergence = float((np.exp(law) * (law - other)).sum(axis=-1).mean())
    return divergence if np.isnan(divergence) else max(divergence, 0.0)


def _log_softmax(logits: NDArray[np.float32]) -> NDArray[np.float64]:
    shifted = logits.astype(np.float64) - logits.max(axis=-1, keepdims=True)
    return np.asarray(shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True)))
