"""Mixtral (arXiv 2401.04088): Mistral with experts in every layer."""

from __future__ import annotations

from typing import Any

from outrider.export.architectures.common import ATTENTION, LAYER, activation, base, windows
from outrider.export.spec import DecoderSpec

_EXPERT = LAYER + "block_sparse_moe.experts.{}."
_NAMES = {
    "mlp_norm": LAYER + "post_attention_layernorm",
    "router": LAYER + "block_sparse_moe.gate",
    "expert_gate": _EXPERT + "w1",
    "expert_down": _EXPERT + "w2",
    "expert_up": _EXPERT + "w3",
}


def decoder_spec(config: dict[str, Any]) -> DecoderSpec:
    defaults = {"num_local_experts": 8, "num_experts_per_tok": 2, "num_key_value_heads": 8, "rope_theta": 1e6}
    config = defaults | config | {"layer_types": None}  # all of one kind
    return DecoderSpec(
        **base(config) | {"layer_names": ATTENTION | _NAMES},
        activation=activation(config),
        windows=windows(config),
        num_experts=config["num_local_experts"],
        experts_per_token=config["num_experts_per_tok"],
        expert_size=config["intermediate_size"],
    )
