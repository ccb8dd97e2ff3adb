"""Is the engine that was written the model that was read? Run at the end of every export."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from outrider.engines.engine import Engine
from outrider.engines.errors import OutriderError
from outrider.export.spec import NO_TOKEN

# Largest mean Kullback-Leibler divergence (nats) of the engine's next-token law from that of the weights as stored, and
# for float products the largest difference of a logit. Products with blocks round their inputs to int8.
_KL_LIMITS = {"fp32": 1e-6, "fp16": 1e-2, "bf16": 1e-2, "int8": 0.1, "int4": 0.1}
_LOGIT_LIMITS = {"fp32": 1e-2, "fp16": 0.5, "bf16": 0.5}
_ROWS = 64  # of a pass: logits of a large vocabulary are large


def check_text() -> str:
    """What every export is compared over: prose, dialogue, code, facts, letters; written for it, about 2300 tokens."""
    return Path(__file__).with_name("check.txt").read_text(encoding="utf-8")


class Comparison(NamedTuple):
    """An engine beside a reference over one sequence.

    ``kl`` is the mean and ``median_kl`` the median over positions of the Kullback-Leibler divergence of the engine's
    next-token law from the reference's (nats), ``max_difference`` the largest of a logit, ``same_argmax`` the share of
    positions where both would choose the same token greedily; perplexities are of the sequence's own tokens from the
    second on.
    """

    kl: float
    median_kl: float
    max_difference: float
    same_argmax: float
    perplexity: float
    reference_perplexity: float


def compare(engine: Engine, ids: Sequence[int], reference: NDArray[np.float32]) -> Comparison:
    """Run an engine over ``ids``, two or more, and compare with logits ``reference``, ``[len(ids), vocab_size]``."""
    tokens = np.asarray(ids, np.int64)
    # More passes than one: what is wrong with a cache that is not empty shows in the second.
    rows = min(_ROWS, max(2, -(-len(tokens) // 2)))
    plan = engine.plan(rows, rows)
    parts = []  # of the passes: sums over their positions
    divergences: list[NDArray[np.float64]] = []
    difference = 0.0
    for start in range(0, len(tokens), rows):
        given, following = tokens[start : start + rows], tokens[start + 1 : start + rows + 1]
        found = plan.run(given[None], np.full(1, start, np.int32))[0]
        expected = reference[start : start + rows]
        difference = np.maximum(difference, np.abs(expected - found).max())  # not a number where one is not
        law, other = _log_softmax(expected), _log_softmax(found)
        divergences.append((np.exp(law) * (law - other)).sum(axis=-1))
        same = (expected.argmax(axis=-1) == found.argmax(axis=-1)).sum()
        likelihoods = [part[np.arange(len(following)), following] for part in (other, law)]  # none follows the last
        # A reduced head gives some tokens no chance: perplexity is over the others.
        known = likelihoods[1] > NO_TOKEN / 2
        parts.append([same, known.sum(), *(part[known].sum() for part in likelihoods)])
    total_same, followed, log_likelihood, reference_log_likelihood = np.sum(parts, axis=0)
    divergence = np.maximum(np.concatenate(divergences), 0.0)
    return Comparison(
        kl=float(divergence.mean()),
        median_kl=float(np.median(divergence)),
        max_difference=float(difference),
        same_argmax=float(total_same / len(tokens)),
        perplexity=float(np.exp(-log_likelihood / max(followed, 1))),
        reference_perplexity=float(np.exp(-reference_log_likelihood / max(followed, 1))),
    )


def check_engine(
    engine: Engine,
    ids: Sequence[int],
    expected: NDArray[np.float32],
    stored: NDArray[np.float32],
    precisions: Iterable[str],
    source: Path,
    *,
    routed: bool = False,
) -> dict[str, float]:
    """Compare logits over a text with a reference's.

    Args:
        expected: of the checkpoint; how far the engine is from it is the loss of the precision, and is only reported.
        stored: of the checkpoint as stored, for all of ``ids`` or the first of them; how far the engine is from it
            must be within limits.
        precisions: all that some matrix is stored in, the model's first.
        routed: whether routers choose experts. Near a tie rounding chooses, and such a position may be another model's:
            then the divergence within limits is the median, of half of the positions.

    Returns:
        ``tokens``, and of ``Comparison`` with the checkpoint ``perplexity``, ``perplexity_checkpoint``, ``kl``,
        ``same_argmax``, ``max_difference``; ``kl_stored`` is that from the weights as stored.

    Raises:
        OutriderError: the difference is over the limit of the precision, or not a number.
    """
    precision, *others = precisions
    # What expands its weights to float16 to multiply is as near to them as a float16 graph.
    products = ("fp16",) if engine.info.cache_dtype == "float16" else (precision, *others)
    limit = max(_KL_LIMITS[name] for name in products)
    near = compare(engine, ids[: len(stored)], stored)
    if engine.info.cache_dtype == "float16" and not np.isfinite(near.max_difference) and np.isfinite(stored).all():
        raise OutriderError(
            f"the {precision} engine of {source} gives no numbers: activations leave float16's range (65504 at most); "
            "export with --precision fp32 or int8, or with --lowering standard --precision bf16"
        )
    within = near.kl <= limit and near.max_difference <= max(_LOGIT_LIMITS.get(name, np.inf) for name in products)
    if not (near.median_kl <= limit if routed else within):
        raise OutriderError(
            f"the {precision} engine is not the model in {source}: logits differ by up to {near.max_difference:.3g}, "
            f"KL {near.kl:.3g} nats (limit {limit:g}); no bundle was written"
        )
    loss = compare(engine, ids, expected)
    return {
        "tokens": len(ids),
        "perplexity": loss.perplexity,
        "perplexity_checkpoint": loss.reference_perplexity,
        "kl": loss.kl,
        "same_argmax": loss.same_argmax,
        "max_difference": loss.max_difference,
        "kl_stored": near.kl,
    }


def _log_softmax(logits: NDArray[np.float32]) -> NDArray[np.float64]:
    shifted = logits.astype(np.float64) - logits.max(axis=-1, keepdims=True)
    return np.asarray(shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True)))
