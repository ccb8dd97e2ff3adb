"""The Llama family: Llama 2 and 3, SmolLM2, Mistral without a sliding window."""

from __future__ import annotations

from typing import Any

from outrider.engines.errors import OutriderError
from outrider.export.rope import inverse_frequencies
from outrider.export.spec import DecoderSpec

_LAYER = "model.layers.{}."


def decoder_spec(config: dict[str, Any]) -> DecoderSpec:
    if config.get("hidden_act", "silu") != "silu":
        raise OutriderError(f"hidden_act {config['hidden_act']!r} is not implemented; only silu is")
    if config.get("sliding_window"):
        raise OutriderError(f"sliding_window {config['sliding_window']} is not implemented for this family")
    heads = config["num_attention_heads"]
    head_dim = config.get("head_dim") or config["hidden_size"] // heads
    return DecoderSpec(
        architecture=config["model_type"],
        hidden_size=config["hidden_size"],
        intermediate_size=config["intermediate_size"],
        num_layers=config["num_hidden_layers"],
        num_heads=heads,
        num_kv_heads=config.get("num_key_value_heads") or heads,
        head_dim=head_dim,
        vocab_size=config["vocab_size"],
        norm_epsilon=config["rms_norm_eps"],
        max_positions=config["max_position_embeddings"],
        inv_freq=inverse_frequencies(config, head_dim),
        embedding="model.embed_tokens",
        final_norm="model.norm",
        head="model.embed_tokens" if config.get("tie_word_embeddings") else "lm_head",
        layer_names={
            "attention_norm": _LAYER + "input_layernorm",
            "q": _LAYER + "self_attn.q_proj",
            "k": _LAYER + "self_attn.k_proj",
            "v": _LAYER + "self_attn.v_proj",
            "o": _LAYER + "self_attn.o_proj",
            "mlp_norm": _LAYER + "post_attention_layernorm",
            "gate": _LAYER + "mlp.gate_proj",
            "up": _LAYER + "mlp.up_proj",
            "down": _LAYER + "mlp.down_proj",
        },
    )
