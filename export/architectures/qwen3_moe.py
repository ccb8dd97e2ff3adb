"""Qwen 3, mixture of experts: Qwen 3 with experts in every so many layers, from the config's list or step."""

from __future__ import annotations

from typing import Any

from outrider.export.architectures.common import LAYER, QUERY_KEY_NORMS, activation, base, windows
from outrider.export.spec import DecoderSpec

_EXPERT = LAYER + "mlp.experts.{}."
_DEFAULTS = {
    "num_key_value_heads": 4,
    "num_experts": 128,
    "decoder_sparse_step": 1,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 768,
    "sliding_window": 4096,
}


def decoder_spec(config: dict[str, Any]) -> DecoderSpec:
    config = _DEFAULTS | config | {"layer_types": None}  # all of one kind
    fields = base(config)
    fields["layer_names"] |= QUERY_KEY_NORMS | {"router": LAYER + "mlp.gate"}
    fields["layer_names"] |= {f"expert_{part}": f"{_EXPERT}{part}_proj" for part in ("gate", "up", "down")}
    dense, step = config.get("mlp_only_layers") or [], config["decoder_sparse_step"]
    older_key: int = config["num_experts"]
    layers = range(config["num_hidden_layers"])
    return DecoderSpec(
        **fields,
        activation=activation(config),
        windows=windows(config) if config.get("use_sliding_window") else (),
        num_experts=config.get("num_local_experts", older_key),
        experts_per_token=config["num_experts_per_tok"],
        expert_size=config["moe_intermediate_size"],
        normalized_routing=bool(config.get("norm_topk_prob", False)),
        dense_layers=frozenset(layer for layer in layers if layer in dense or (layer + 1) % step),
    )
