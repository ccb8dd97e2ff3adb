"""Falcon (arXiv 2311.16867): MLP beside attention, shared key and value heads, all three in one tensor."""

from __future__ import annotations

from typing import Any

from outrider.engines.errors import OutriderError
from outrider.export.architectures.common import activation, base
from outrider.export.spec import DecoderSpec

_LAYER = "transformer.h.{}."
_DEFAULTS: dict[str, Any] = {
    "layer_norm_epsilon": 1e-5,
    "max_position_embeddings": 2048,
    "multi_query": True,
    "parallel_attn": True,
    "activation": "gelu",
    "tie_word_embeddings": True,
}


def decoder_spec(config: dict[str, Any]) -> DecoderSpec:
    config = _DEFAULTS | config | {"head_dim": None}  # which this family does not have
    if config.get("alibi"):
        raise OutriderError("alibi is not implemented: positions of this family are rotary")
    grouped = bool(config.get("new_decoder_architecture"))  # 40B and later
    parallel = bool(config["parallel_attn"]) or grouped
    config["intermediate_size"] = config.get("ffn_hidden_size") or 4 * config["hidden_size"]
    config["num_key_value_heads"] = config.get("num_kv_heads") if grouped else 1 if config["multi_query"] else None
    norms = {"attention_norm": "input_layernorm"}
    if grouped and config.get("num_ln_in_parallel_attn") in (None, 2):
        norms = {"attention_norm": "ln_attn", "mlp_norm": "ln_mlp"}
    elif not parallel:
        norms["mlp_norm"] = "post_attention_layernorm"
    fields = base(config, norm_epsilon="layer_norm_epsilon", embedding="transformer.word_embeddings")
    fields |= {
        "final_norm": "transformer.ln_f",
        "layer_names": {
            **{role: _LAYER + name for role, name in norms.items()},
            "qkv": _LAYER + "self_attention.query_key_value",
            "o": _LAYER + "self_attention.dense",
            "up": _LAYER + "mlp.dense_h_to_4h",
            "down": _LAYER + "mlp.dense_4h_to_h",
        },
    }
    return DecoderSpec(
        **fields,
        activation=activation({"hidden_act": config["activation"]}),
        norm="layer",
        parallel=parallel,
        qkv_by_head=grouped or not config["multi_query"],
    )
