"""Rotary position frequencies (RoFormer, arXiv 2104.09864) and their scalings, from config keys."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from outrider.engines.errors import OutriderError

_IMPLEMENTED = ("default", "linear", "llama3", "yarn", "longrope", "dynamic")


def inverse_frequencies(
    config: dict[str, Any], head_dim: int, kind_of_layer: str | None = None, *, long: bool = False
) -> NDArray[np.float64]:
    """float64 ``[n]``: radians that each of the first n pairs of dimensions turns per position.

    Args:
        kind_of_layer: whose entry of ``rope_parameters`` to take, in a config that has one for each kind.
        long: of sequences beyond ``short_positions``.

    Raises:
        OutriderError: a kind of scaling that is not implemented, or one whose factors do not fit the head.
    """
    scaling = rope_settings(config, kind_of_layer)
    theta = scaling.get("rope_theta") or config.get("rope_theta", 10000.0)
    share = scaling.get("partial_rotary_factor") or config.get("partial_rotary_factor") or 1.0
    rotated = int(head_dim * share)
    frequencies: NDArray[np.float64] = 1.0 / theta ** (np.arange(0, rotated, 2, dtype=np.float64) / rotated)
    kind = rope_kind(scaling)
    # Dynamic NTK changes the base beyond max_position_embeddings only, and no export is longer.
    if kind in ("default", "dynamic"):
        return frequencies
    if kind == "linear":
        return np.asarray(frequencies / scaling["factor"])
    if kind == "llama3":
        return _llama3(frequencies, scaling)
    if kind == "yarn":
        return _yarn(frequencies, scaling, config, theta, rotated)
    if kind == "longrope":
        return _longrope(frequencies, scaling, "long_factor" if long else "short_factor")
    if kind == "factors":  # GGUF files carry the outcome of any scaling as one divisor a pair
        return np.asarray(frequencies / np.asarray(scaling["factors"], np.float64))
    raise OutriderError(f"rope scaling {kind!r} is not implemented; implemented are {', '.join(_IMPLEMENTED)}")


def rope_settings(config: dict[str, Any], kind_of_layer: str | None = None) -> dict[str, Any]:
    """Scaling, base and share of rotary positions, of one kind of layer where the config parts them.

    transformers 5 writes ``rope_parameters``, which holds what were ``rope_theta`` and ``rope_scaling`` before; what is
    written into ``rope_scaling`` by hand beside it wins.
    """
    settings = config.get("rope_parameters") or {}
    by_hand = config.get("rope_scaling") or {}
    if any(isinstance(value, dict) for value in settings.values()):
        if by_hand:
            raise OutriderError("rope_parameters and rope_scaling are both there; put the scaling into the first")
        settings = settings.get(kind_of_layer) or {}
    settings = {**settings, **by_hand}
    original = config.get("original_max_position_embeddings")
    return settings | ({"original_max_position_embeddings": original} if original else {})


def rope_kind(settings: dict[str, Any]) -> str:
    return str(settings.get("rope_type") or settings.get("type") or "default")


def short_positions(config: dict[str, Any], kind_of_layer: str | None = None) -> int | None:
    """The longest sequence that LongRoPE rotates by its short factors; None for other kinds."""
    scaling = rope_settings(config, kind_of_layer)
    return _original_positions(scaling, config) if rope_kind(scaling) == "longrope" else None


def _original_positions(scaling: dict[str, Any], config: dict[str, Any]) -> int:
    """The context before it was extended."""
    return int(scaling.get("original_max_position_embeddings") or config["max_position_embeddings"])


def _longrope(frequencies: NDArray[np.float64], scaling: dict[str, Any], which: str) -> NDArray[np.float64]:
    """LongRoPE (arXiv 2402.13753): each pair has a divisor of its own."""
    factors = np.asarray(scaling[which], np.float64)
    if factors.shape != frequencies.shape:
        raise OutriderError(f"{which} has {factors.size} values, and {frequencies.size} pairs of a head rotate")
    return np.asarray(frequencies / factors)


def _llama3(frequencies: NDArray[np.float64], scaling: dict[str, Any]) -> NDArray[np.float64]:
    """Llama 3.1: slow pairs are slowed by ``factor``, fast ones kept, those between blended."""
    factor, low, high = scaling["factor"], scaling["low_freq_factor"], scaling["high_freq_factor"]
    turns = scaling["original_max_position_embeddings"] * frequencies / (2 * math.pi)
    kept = np.clip((turns - low) / (high - low), 0.0, 1.0)
    return np.asarray(kept * frequencies + (1 - kept) * frequencies / factor)


def _yarn(
    frequencies: NDArray[np.float64], scaling: dict[str, Any], config: dict[str, Any], theta: float, rotated: int
) -> NDArray[np.float64]:
    """YaRN (arXiv 2309.00071, section 3.2): pairs that turn often are kept, slow ones slowed, those between blended."""
    length = _original_positions(scaling, config)

    def pair(turns: float) -> float:
        """The pair that turns so many times over the original context."""
        return rotated * math.log(length / (turns * 2 * math.pi)) / (2 * math.log(theta))

    first, last = pair(scaling.get("beta_fast") or 32), pair(scaling.get("beta_slow") or 1)
    if scaling.get("truncate", True):
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, rotated - 1)
    slowed = np.clip((np.arange(rotated // 2) - first) / (max(last - first, 0.001)), 0.0, 1.0)
    return np.asarray(slowed * frequencies / scaling["factor"] + (1 - slowed) * frequencies)


def rotary_scale(config: dict[str, Any], kind_of_layer: str | None = None) -> float:
    """What cos and sin are multiplied by: the temperature of attention of YaRN (its equation 22) and LongRoPE, or 1."""
    scaling = rope_settings(config, kind_of_layer)
    kind = rope_kind(scaling)
    if kind not in ("yarn", "longrope"):
        return 1.0
    if scaling.get("attention_factor") is not None:
        return float(scaling["attention_factor"])
    if kind == "longrope":
        original = _original_positions(scaling, config)
        factor = scaling.get("factor") or config["max_position_embeddings"] / original
        return math.sqrt(1 + math.log(factor) / math.log(original)) if factor > 1 else 1.0

    def scale(weight: float) -> float:
        return 0.1 * weight * math.log(scaling["factor"]) + 1 if scaling["factor"] > 1 else 1.0

    if scaling.get("mscale") and scaling.get("mscale_all_dim"):
        return scale(scaling["mscale"]) / scale(scaling["mscale_all_dim"])
    return scale(1)
