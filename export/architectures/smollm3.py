"""SmolLM 3: Llama in which some layers have no positions (NoPE)."""

from __future__ import annotations

from typing import Any

from outrider.export.architectures.common import activation, base, windows
from outrider.export.spec import DecoderSpec


def decoder_spec(config: dict[str, Any]) -> DecoderSpec:
    config = {"tie_word_embeddings": True, "rope_theta": 2e6} | config
    rotated = config.get("no_rope_layers")  # 1 for layers that have positions, whatever the name says
    if not rotated:
        every = config.get("no_rope_layer_interval", 4)
        rotated = [int((layer + 1) % every != 0) for layer in range(config["num_hidden_layers"])]
    unrotated = frozenset(layer for layer, has in enumerate(rotated) if not has)
    kinds = ["sliding_attention" if layer in unrotated else "full_attention" for layer in range(len(rotated))]
    seen = windows(config, kinds) if config.get("use_sliding_window") else ()
    return DecoderSpec(**base(config), activation=activation(config), windows=seen, unrotated=unrotated)
