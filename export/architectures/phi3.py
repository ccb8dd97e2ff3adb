"""Phi 3 and Phi 4: projections in one tensor each; LongRoPE and a part of the head rotated in some."""

from __future__ import annotations

from typing import Any

from outrider.export.architectures.common import LAYER, activation, base, windows
from outrider.export.rope import rope_kind, rope_settings
from outrider.export.spec import DecoderSpec


def decoder_spec(config: dict[str, Any]) -> DecoderSpec:
    settings = rope_settings(config)
    if rope_kind(settings) in ("su", "yarn"):  # what longrope was called before
        config = config | {"rope_parameters": {**settings, "rope_type": "longrope"}, "rope_scaling": None}
    config = {"original_max_position_embeddings": 4096} | config
    fields = base(config, partly_rotated=True)
    names = {role: name for role, name in fields["layer_names"].items() if role not in ("q", "k", "v", "gate", "up")}
    names |= {"qkv": LAYER + "self_attn.qkv_proj", "gate_up": LAYER + "mlp.gate_up_proj"}
    return DecoderSpec(**{**fields, "layer_names": names}, activation=activation(config), windows=windows(config))
