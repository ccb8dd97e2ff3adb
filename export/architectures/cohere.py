"""Command R (Cohere) and Command R7B (Cohere 2): one layer norm for attention and MLP, pairs of a head side by side."""

from __future__ import annotations

from typing import Any

from outrider.engines.errors import OutriderError
from outrider.export.architectures.common import activation, base, windows
from outrider.export.spec import DecoderSpec


def decoder_spec(config: dict[str, Any]) -> DecoderSpec:
    if config.get("use_qk_norm"):
        raise OutriderError("use_qk_norm is not implemented for this family: each head has a norm of its own")
    second = config["model_type"] == "cohere2"
    theta = 1e4 if second else 5e5
    config = {"tie_word_embeddings": True, "sliding_window": 4096, "rope_theta": theta, **config}
    fields = base(config, norm_epsilon="layer_norm_eps")
    names = {role: name for role, name in fields["layer_names"].items() if role != "mlp_norm"}
    seen = windows(config, _layer_types(config)) if second else ()
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


def _layer_types(config: dict[str, Any]) -> list[str]:
    """Of configs that do not list them: every fourth layer or so sees all."""
    every = config.get("sliding_window_pattern") or 4
    layers = range(1, config["num_hidden_layers"] + 1)
    return ["full_attention" if layer % every == 0 else "sliding_attention" for layer in layers]
