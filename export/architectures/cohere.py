"""Command R (Cohere) and Command R7B (Cohere 2): one layer norm for attention and MLP, pairs of a head side by side."""

from __future__ import annotations

from typing import Any

from outrider.engines.errors import OutriderError
from outrider.export.architectures.common import activation, alternating, base, windows
from outrider.export.spec import DecoderSpec


def decoder_spec(config: dict[str, Any]) -> DecoderSpec:
    if config.get("use_qk_norm"):
        raise OutriderError("use_qk_norm is not implemented for this family: each head has a norm of its own")
    second = config["model_type"] == "cohere2"
    theta = 1e4 if second else 5e5
    config = {"tie_word_embeddings": True, "sliding_window": 4096, "rope_theta": theta} | config
    fields = base(config, norm_epsilon="layer_norm_eps")
    names = {role: name for role, name in fields["layer_names"].items() if role != "mlp_norm"}
    seen = windows(config, alternating(config, 4)) if second else ()
    return DecoderSpec(
        **{**fields, "layer_names": names},
        activation=activation(config),
        norm="layer",
        parallel=True,
        interleaved=True,
        windows=seen,
        # Layers of the second that see all have no positions.
        unrotated=frozenset(layer for layer, window in enumerate(seen) if not window),
        logit_scale=config.get("logit_scale", 0.0625),
    )
