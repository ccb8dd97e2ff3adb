"""The config of a model, under Hugging Face's keys, from the metadata of its GGUF file.

What llama.cpp's converter leaves out, because llama.cpp knows it of the family, is filled in.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from outrider.engines.errors import OutriderError

Metadata = Callable[[str], Any]

_MODEL_TYPES = {"gemma3": "gemma3_text", "command-r": "cohere"}  # where Hugging Face's name is another
# Hugging Face config key -> GGUF key behind the architecture's prefix.
_KEYS = {
    "num_hidden_layers": "block_count",
    "hidden_size": "embedding_length",
    "intermediate_size": "feed_forward_length",
    "num_attention_heads": "attention.head_count",
    "num_key_value_heads": "attention.head_count_kv",
    "rms_norm_eps": "attention.layer_norm_rms_epsilon",
    **dict.fromkeys(("layer_norm_eps", "norm_epsilon", "layer_norm_epsilon"), "attention.layer_norm_epsilon"),
    "rope_theta": "rope.freq_base",
    "max_position_embeddings": "context_length",
    "original_max_position_embeddings": "rope.scaling.original_context_length",
    "sliding_window": "attention.sliding_window",
    "attn_logit_softcapping": "attn_logit_softcapping",
    "final_logit_softcapping": "final_logit_softcapping",
    "attention_multiplier": "attention.scale",
    "embedding_multiplier": "embedding_scale",
    "residual_multiplier": "residual_scale",
    "logit_scale": "logit_scale",
    "clip_qkv": "attention.clamp_kqv",
    "alibi": "attention.max_alibi_bias",
    "num_experts": "expert_count",
}
_FACTORS, _LONG, _SHORT = "rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight"
ROPE_TENSORS = {_FACTORS, _LONG, _SHORT}
_LAYERS_OF_27B = {"gemma2": 46, "gemma3_text": 62}


def config_from_metadata(
    metadata: Metadata, shapes: Mapping[str, tuple[int, ...]], vector: Callable[[str], NDArray[np.float32]], path: Path
) -> dict[str, Any]:
    """The keys of ``config.json`` that the families read.

    Args:
        metadata: a value of the file by its key, or None.
        shapes: of the file's tensors, by their names there.
        vector: reads a tensor of one axis.
        path: of the file, for messages.

    Raises:
        OutriderError: no language model's file, or one that is not complete.
    """
    prefix = metadata("general.architecture")
    if not prefix:
        raise OutriderError(f"{path} has no general.architecture; it is not a language model's file")
    found = {key: metadata(f"{prefix}.{name}") for key, name in _KEYS.items()}
    config: dict[str, Any] = {"model_type": _MODEL_TYPES.get(prefix, prefix)}
    config |= {key: value for key, value in found.items() if value is not None}
    for key in ("num_hidden_layers", "hidden_size", "num_attention_heads"):
        if key not in config:
            raise OutriderError(f"{path} has no {prefix}.{_KEYS[key]}; the file is not complete")
    config.setdefault("num_key_value_heads", config["num_attention_heads"])
    config |= _head_sizes(metadata, config, prefix)
    if "token_embd.weight" in shapes:
        config["vocab_size"] = shapes["token_embd.weight"][0]
    config["tie_word_embeddings"] = "output.weight" not in shapes
    config["rope_scaling"] = _rope_scaling(metadata, shapes, vector, prefix)
    if config["model_type"] in _LAYERS_OF_27B:
        config |= _gemma(config)
    if config["model_type"] == "granite" and "logit_scale" in config:
        config["logits_scaling"] = config.pop("logit_scale")  # a divisor there
    return config


def _head_sizes(metadata: Metadata, config: dict[str, Any], prefix: str) -> dict[str, Any]:
    """Dimensions of a head, and the share of them that rotates."""
    rotated = metadata(f"{prefix}.rope.dimension_count")
    head_dim = metadata(f"{prefix}.attention.key_length") or (rotated if prefix == "llama" else None)
    head_dim = head_dim or config["hidden_size"] // config["num_attention_heads"]
    return {"head_dim": head_dim, "partial_rotary_factor": (rotated or head_dim) / head_dim}


def _gemma(config: dict[str, Any]) -> dict[str, Any]:
    """These files hold 1 + the weight of a norm, and do not say what queries are scaled by."""
    scalar = config["head_dim"]
    if config["num_hidden_layers"] == _LAYERS_OF_27B[config["model_type"]]:
        scalar = config["hidden_size"] // config["num_attention_heads"]
    return {"norm_offset": 0.0, "query_pre_attn_scalar": scalar}


def _rope_scaling(
    metadata: Metadata, shapes: Mapping[str, tuple[int, ...]], vector: Callable[[str], NDArray[np.float32]], prefix: str
) -> dict[str, Any] | None:
    if _FACTORS in shapes:
        return {"rope_type": "factors", "factors": vector(_FACTORS).tolist()}
    key = f"{prefix}.rope.scaling"
    if _LONG in shapes:
        factors = {"long_factor": vector(_LONG).tolist(), "short_factor": vector(_SHORT).tolist()}
        return {"rope_type": "longrope", **factors, "attention_factor": metadata(f"{key}.attn_factor")}
    kind = metadata(f"{key}.type")
    if metadata(f"{prefix}.rope.scale_linear") not in (None, 1.0):  # the key of old files
        kind = "linear"
    if kind in (None, "none"):
        return None
    settings = {
        "factor": metadata(f"{key}.factor") or metadata(f"{prefix}.rope.scale_linear"),
        "beta_fast": metadata(f"{key}.yarn_beta_fast"),
        "beta_slow": metadata(f"{key}.yarn_beta_slow"),
    }
    # llama.cpp and Hugging Face mean different things by the other keys of YaRN.
    others = [metadata(f"{key}.{name}") for name in ("attn_factor", "yarn_attn_factor", "yarn_ext_factor")]
    if kind not in ("linear", "yarn") or any(value is not None for value in others):
        kind = f"{kind} (GGUF)"
    return {"rope_type": kind, **{name: value for name, value in settings.items() if value is not None}}
