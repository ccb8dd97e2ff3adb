"""Is the engine that was written the model that was read? Run at the end of every export."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from outrider.engines.engine import Engine
from outrider.engines.errors import OutriderError

# Largest mean Kullback-Leibler divergence (nats) of the engine's next-token law from the checkpoint's, and for float
# weights the largest difference of a logit. Quantization moves logits, so there only the law is bounded.
_KL_LIMITS = {"fp32": 1e-6, "fp16": 1e-2, "int8": 0.05, "int4": 1.5}
_LOGIT_LIMITS = {"fp32": 1e-2, "fp16": 0.5}


def check_engine(
    engine: Engine, expected: NDArray[np.float32], ids: Sequence[int], precision: str, source: Path
) -> dict[str, float]:
    """Compare logits over a short text with those of ``reference.reference_logits``.

    Returns:
        ``max_difference`` (logits), ``kl`` (mean over positions, nats), ``same_argmax`` (share of positions).

    Raises:
        OutriderError: the difference is over the limit of the precision, or not a number.
    """
    tokens = np.asarray(ids, np.int64)
    rows = max(2, len(tokens))
    found = engine.plan(rows, rows).run(tokens[None], np.zeros(1, np.int32))[0].copy()
    law, other = _log_softmax(expected), _log_softmax(found)
    kl = float((np.exp(law) * (law - other)).sum(axis=-1).mean())
    difference = float(np.abs(expected - found).max())
    limit = _LOGIT_LIMITS.get(precision, np.inf)
    if not (kl <= _KL_LIMITS[precision] and difference <= limit):
        raise OutriderError(
            f"the {precision} engine is not the model in {source}: logits differ by up to {difference:.3g}, "
            f"KL {kl:.3g} nats (limit {_KL_LIMITS[precision]:g}); no bundle was written"
        )
    same = float((expected.argmax(axis=-1) == found.argmax(axis=-1)).mean())
    return {"max_difference": difference, "kl": max(kl, 0.0), "same_argmax": same}


def _log_softmax(logits: NDArray[np.float32]) -> NDArray[np.float64]:
    shifted = logits.astype(np.float64) - logits.max(axis=-1, keepdims=True)
    return np.asarray(shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True)))
