"""GPT-2: learned positions, layer norms, biases, query, key and value in one tensor, an MLP without a gate."""

from __future__ import annotations

from typing import Any

from outrider.engines.errors import OutriderError
from outrider.export.architectures.common import activation, base, renamed
from outrider.export.spec import DecoderSpec

_KEYS = {
    "hidden_size": "n_embd",
    "num_hidden_layers": "n_layer",
    "num_attention_heads": "n_head",
    "max_position_embeddings": "n_positions",
}
_LAYER = "transformer.h.{}."


def decoder_spec(config: dict[str, Any]) -> DecoderSpec:
    if config.get("add_cross_attention"):
        raise OutriderError("add_cross_attention is not implemented: a decoder reads no other sequence")
    defaults = {
        "n_positions": 1024,
        "layer_norm_epsilon": 1e-5,
        "activation_function": "gelu_new",
        "tie_word_embeddings": True,
    }
    config = renamed(defaults | config, _KEYS)
    config["intermediate_size"] = config.get("n_inner") or 4 * config["hidden_size"]
    config |= {"head_dim": None, "num_key_value_heads": None}  # which this family does not have
    fields = base(config, norm_epsilon="layer_norm_epsilon", embedding="transformer.wte")
    fields |= {
        "final_norm": "transformer.ln_f",
        "layer_names": {
            "attention_norm": _LAYER + "ln_1",
            "qkv": _LAYER + "attn.c_attn",
            "o": _LAYER + "attn.c_proj",
            "mlp_norm": _LAYER + "ln_2",
            "up": _LAYER + "mlp.c_fc",
            "down": _LAYER + "mlp.c_proj",
        },
    }
    return DecoderSpec(
        **fields,
        activation=activation({"hidden_act": config["activation_function"]}),
        norm="layer",
        position_table="transformer.wpe",
        # reorder_and_upcast_attn is about the order of float16 operations, not about what they compute.
        attention_scale=None if config.get("scale_attn_weights", True) else 1.0,
        scale_by_layer=bool(config.get("scale_attn_by_inverse_layer_idx")),
    )
