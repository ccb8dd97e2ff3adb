"""Rotary position frequencies (RoFormer, arXiv 2104.09864) and their scalings, from config keys."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from outrider.engines.errors import OutriderError


def inverse_frequencies(config: dict[str, Any], head_dim: int) -> NDArray[np.float64]:
    """float64 ``[head_dim / 2]``: radians that each pair of dimensions turns per position.

    Raises:
        OutriderError: a kind of scaling that is not implemented, or a rotation of only a part of the head.
    """
    # transformers 5 writes rope_parameters, which holds what were rope_theta and rope_scaling before.
    scaling = config.get("rope_parameters") or config.get("rope_scaling") or {}
    theta = scaling.get("rope_theta") or config.get("rope_theta", 10000.0)
    if (scaling.get("partial_rotary_factor") or config.get("partial_rotary_factor", 1.0)) != 1.0:
        raise OutriderError("partial_rotary_factor is not implemented for this family")
    frequencies: NDArray[np.float64] = 1.0 / theta ** (np.arange(0, head_dim, 2, dtype=np.float64) / head_dim)
    kind = scaling.get("rope_type") or scaling.get("type") or "default"
    if kind == "default":
        return frequencies
    if kind == "llama3":
        return _llama3(frequencies, scaling)
    if kind == "factors":  # GGUF files carry the outcome of any scaling as one divisor a pair
        return np.asarray(frequencies / np.asarray(scaling["factors"], np.float64))
    raise OutriderError(f"rope scaling {kind!r} is not implemented; implemented are default and llama3")


def _llama3(frequencies: NDArray[np.float64], scaling: dict[str, Any]) -> NDArray[np.float64]:
    """Llama 3.1: slow pairs are slowed by ``factor``, fast ones kept, those between blended."""
    factor, low, high = scaling["factor"], scaling["low_freq_factor"], scaling["high_freq_factor"]
    turns = scaling["original_max_position_embeddings"] * frequencies / (2 * math.pi)
    kept = np.clip((turns - low) / (high - low), 0.0, 1.0)
    return np.asarray(kept * frequencies + (1 - kept) * frequencies / factor)
