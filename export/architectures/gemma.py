"""Gemma 2 (arXiv 2408.00118) and the text part of Gemma 3 (arXiv 2503.19786): norms on both sides, windows."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from outrider.engines.errors import OutriderError
from outrider.export.architectures.common import LAYER, QUERY_KEY_NORMS, activation, alternating, base, windows
from outrider.export.rope import inverse_frequencies, rope_kind, rope_settings
from outrider.export.spec import DecoderSpec

_NORMS = {
    "attention_post_norm": LAYER + "post_attention_layernorm",
    "mlp_norm": LAYER + "pre_feedforward_layernorm",
    "mlp_post_norm": LAYER + "post_feedforward_layernorm",
}


def decoder_spec(config: dict[str, Any]) -> DecoderSpec:
    if config.get("use_bidirectional_attention"):
        raise OutriderError("use_bidirectional_attention is not implemented: a decoder sees no later tokens")
    third = config["model_type"] != "gemma2"
    defaults: dict[str, Any] = {
        "tie_word_embeddings": True,
        "hidden_activation": "gelu_pytorch_tanh",
        "sliding_window": 4096,
        "rope_theta": 1e6 if third else 1e4,
        "query_pre_attn_scalar": 256,
    }
    config = defaults | config
    fields = base(config, rotary="full_attention")
    fields["layer_names"] |= _NORMS
    if fields["rotary_scale"] != 1:
        raise _not_implemented(rope_settings(config, "full_attention"))
    if third:
        fields["layer_names"] |= QUERY_KEY_NORMS
        fields["local_inv_freq"] = _local_frequencies(config, fields["head_dim"])
    return DecoderSpec(
        **fields,
        activation=activation(config),
        windows=windows(config, alternating(config, 6 if third else 2)),
        norm_offset=config.get("norm_offset", 1.0),
        embedding_scale=config["hidden_size"] ** 0.5,
        attention_scale=config["query_pre_attn_scalar"] ** -0.5,
        attention_softcap=config.get("attn_logit_softcapping", 0.0 if third else 50.0) or 0.0,
        logit_softcap=config.get("final_logit_softcapping", 0.0 if third else 30.0) or 0.0,
    )


def _local_frequencies(config: dict[str, Any], head_dim: int) -> NDArray[np.float64]:
    """Of layers with a window: not scaled where the others are, and with a base of their own."""
    base_frequency = config.get("rope_local_base_freq", 10000.0)
    parted = (config.get("rope_parameters") or {}).get("sliding_attention") or {}
    if rope_kind(parted) in ("yarn", "longrope"):
        raise _not_implemented(parted)
    return inverse_frequencies({"rope_theta": base_frequency, "rope_parameters": parted}, head_dim)


def _not_implemented(settings: dict[str, Any]) -> OutriderError:
    return OutriderError(f"rope scaling {rope_kind(settings)!r} is not implemented for this family")
