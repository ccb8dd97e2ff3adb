"""Granite 3, dense: Llama with scales on embedding, residuals, attention and logits."""

from __future__ import annotations

from typing import Any

from outrider.export.architectures.common import activation, base
from outrider.export.spec import DecoderSpec


def decoder_spec(config: dict[str, Any]) -> DecoderSpec:
    return DecoderSpec(
        **base(config),
        activation=activation(config),
        embedding_scale=config.get("embedding_multiplier", 1.0),
        residual_scale=config.get("residual_multiplier", 1.0),
        attention_scale=config.get("attention_multiplier", 1.0),
        logit_scale=1 / config.get("logits_scaling", 1.0),
    )
