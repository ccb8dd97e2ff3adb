"""GPT-NeoX (arXiv 2204.06745) and Pythia: layer norms, MLP beside attention, a part of the head rotated."""

from __future__ import annotations

from typing import Any

from outrider.export.architectures.common import activation, base
from outrider.export.spec import DecoderSpec

_LAYER = "gpt_neox.layers.{}."


def decoder_spec(config: dict[str, Any]) -> DecoderSpec:
    config = {"hidden_act": "gelu", "partial_rotary_factor": config.get("rotary_pct", 0.25)} | config
    config |= {"head_dim": None, "num_key_value_heads": None, "rope_theta": config.get("rotary_emb_base", 10000)}
    names = {"embedding": "gpt_neox.embed_in", "head": "embed_out"}
    fields = base(config, partly_rotated=True, norm_epsilon="layer_norm_eps", **names)
    fields |= {
        "final_norm": "gpt_neox.final_layer_norm",
        "layer_names": {
            "attention_norm": _LAYER + "input_layernorm",
            "qkv": _LAYER + "attention.query_key_value",
            "o": _LAYER + "attention.dense",
            "mlp_norm": _LAYER + "post_attention_layernorm",
            "up": _LAYER + "mlp.dense_h_to_4h",
            "down": _LAYER + "mlp.dense_4h_to_h",
        },
    }
    return DecoderSpec(
        **fields,
        activation=activation(config),
        norm="layer",
        parallel=bool(config.get("use_parallel_residual", True)),
        qkv_by_head=True,
    )
