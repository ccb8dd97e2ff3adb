"""What most families share: the names and keys of Llama's config and tensors in Hugging Face's form."""

from __future__ import annotations

from typing import Any

from outrider.engines.errors import OutriderError
from outrider.export.rope import inverse_frequencies, rope_settings, rotary_scale, short_positions

LAYER = "model.layers.{}."
ATTENTION = {
    "attention_norm": LAYER + "input_layernorm",
    "q": LAYER + "self_attn.q_proj",
    "k": LAYER + "self_attn.k_proj",
    "v": LAYER + "self_attn.v_proj",
    "o": LAYER + "self_attn.o_proj",
}
QUERY_KEY_NORMS = {"q_norm": LAYER + "self_attn.q_norm", "k_norm": LAYER + "self_attn.k_norm"}
MLP = {
    "mlp_norm": LAYER + "post_attention_layernorm",
    "gate": LAYER + "mlp.gate_proj",
    "up": LAYER + "mlp.up_proj",
    "down": LAYER + "mlp.down_proj",
}
# Names of activations in configs; two of them differ by less than float16 holds.
_ACTIVATIONS = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_new": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "relu": "relu",
}


def base(
    config: dict[str, Any],
    *,
    rotary: str | None = None,
    partly_rotated: bool = False,
    norm_epsilon: str = "rms_norm_eps",
    embedding: str = "model.embed_tokens",
    head: str = "lm_head",
) -> dict[str, Any]:
    """Fields of ``DecoderSpec`` that are the same in all these families.

    Args:
        rotary: the kind of layer whose rotary positions are those of all layers but the ones with a window.
        partly_rotated: whether the family rotates a part of each head where its config says so.
        norm_epsilon: the config's key.
        embedding: its tensor; ``head`` is that of a head that is not tied to it.
    """
    share = rope_settings(config, rotary).get("partial_rotary_factor") or config.get("partial_rotary_factor")
    if not partly_rotated and share not in (None, 1.0):
        raise OutriderError(f"partial_rotary_factor {share} is not implemented for this family")
    heads = config["num_attention_heads"]
    head_dim = config.get("head_dim") or config["hidden_size"] // heads
    short = short_positions(config, rotary)
    return {
        "architecture": config["model_type"],
        "hidden_size": config["hidden_size"],
        "intermediate_size": config["intermediate_size"],
        "num_layers": config["num_hidden_layers"],
        "num_heads": heads,
        "num_kv_heads": config.get("num_key_value_heads") or heads,
        "head_dim": head_dim,
        "vocab_size": config["vocab_size"],
        "norm_epsilon": config[norm_epsilon],
        "max_positions": config["max_position_embeddings"],
        "inv_freq": inverse_frequencies(config, head_dim, rotary),
        "rotary_scale": rotary_scale(config, rotary),
        "short_positions": short,
        "long_inv_freq": None if short is None else inverse_frequencies(config, head_dim, rotary, long=True),
        "embedding": embedding,
        "final_norm": "model.norm",
        "head": embedding if config.get("tie_word_embeddings") else head,
        "layer_names": ATTENTION | MLP,
    }


def renamed(config: dict[str, Any], keys: dict[str, str]) -> dict[str, Any]:
    """``config`` with values under Llama's keys as well; where both are there, Llama's count, as in transformers.

    Args:
        keys: from Llama's key to the family's own.
    """
    return {ours: config[theirs] for ours, theirs in keys.items() if theirs in config} | config


def activation(config: dict[str, Any]) -> str:
    name = config.get("hidden_activation") or config.get("hidden_act") or "silu"
    if name not in _ACTIVATIONS:
        raise OutriderError(f"activation {name!r} is not implemented; implemented are {', '.join(_ACTIVATIONS)}")
    return _ACTIVATIONS[name]


def windows(config: dict[str, Any], layer_types: list[str] | None = None) -> tuple[int, ...]:
    """For each layer the positions that it sees, 0 for all; empty where no layer has a window.

    Args:
        layer_types: of a config that does not list them; by default every layer has a window.
    """
    size, layers = config.get("sliding_window"), config["num_hidden_layers"]
    if not size:
        return ()
    kinds = config.get("layer_types") or layer_types or ["sliding_attention"] * layers
    if unknown := set(kinds) - {"sliding_attention", "full_attention"}:
        raise OutriderError(f"layer type {unknown.pop()!r} is not implemented")
    return tuple(size if kind == "sliding_attention" else 0 for kind in kinds)


def alternating(config: dict[str, Any], every: int) -> list[str]:
    """Layer types of a config that does not list them: every so many layers one sees all."""
    every = config.get("sliding_window_pattern") or every
    layers = range(1, config["num_hidden_layers"] + 1)
    return ["full_attention" if layer % every == 0 else "sliding_attention" for layer in layers]


def qwen_windows(config: dict[str, Any]) -> tuple[int, ...]:
    """Of Qwen: off unless asked for, and then from some layer on."""
    config = {"sliding_window": 4096, "max_window_layers": 28} | config
    if not config.get("use_sliding_window"):
        return ()
    layers = range(config["num_hidden_layers"])
    first = config["max_window_layers"]
    return windows(config, ["full_attention" if layer < first else "sliding_attention" for layer in layers])
