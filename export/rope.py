"""Rotary position frequencies (RoFormer, arXiv 2104.09864) and their scalings, from config keys."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from outrider.engines.errors import OutriderError


def inverse_frequencies(config: dict[str, Any], head_dim: int, kind_of_layer: str | None = None) -> NDArray[np.float64]:
    """float64 ``[n]``: radians that each of the first n pairs of dimensions turns per position.

    Args:
        kind_of_layer: whose entry of ``rope_parameters`` to take, in a config that has one for each kind.

    Raises:
        OutriderError: a kind of scaling that is not implemented.
    """
    # transformers 5 writes rope_parameters, which holds what were rope_theta and rope_scaling before.
    scaling = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if kind_of_layer is not None and kind_of_layer in scaling:
        scaling = scaling[kind_of_layer]
    theta = scaling.get("rope_theta") or config.get("rope_theta", 10000.0)
    share = scaling.get("partial_rotary_factor") or config.get("partial_rotary_factor") or 1.0
    rotated = int(head_dim * share)
    frequencies: NDArray[np.float64] = 1.0 / theta ** (np.arange(0, rotated, 2, dtype=np.float64) / rotated)
    kind = scaling.get("rope_type") or scaling.get("type") or "default"
    if kind == "default":
        return frequencies
    if kind == "linear":
        return np.asarray(frequencies / scaling["factor"])
    if kind == "llama3":
        return _llama3(frequencies, scaling)
    if kind == "factors":  # GGUF files carry the outcome of any scaling as one divisor a pair
        return np.asarray(frequencies / np.asarray(scaling["factors"], np.float64))
    raise OutriderError(f"rope scaling {kind!r} is not implemented; implemented are default, linear and llama3")


def _llama3(frequencies: NDArray[np.float64], scaling: dict[str, Any]) -> NDArray[np.float64]:
    """Llama 3.1: slow pairs are slowed by ``factor``, fast ones kept, those between blended."""
    factor, low, high = scaling["factor"], scaling["low_freq_factor"], scaling["high_freq_factor"]
    turns = scaling["original_max_position_embeddings"] * frequencies / (2 * math.pi)
    kept = np.clip((turns - low) / (high - low), 0.0, 1.0)
    return np.asarray(kept * frequencies + (1 - kept) * frequencies / factor)
