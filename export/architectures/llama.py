"""The Llama family: Llama 2 and 3, SmolLM2, Mistral, Qwen 2 (whose projections have biases)."""

from __future__ import annotations

from typing import Any

from outrider.engines.errors import OutriderError
from outrider.export.architectures.common import activation, base, windows
from outrider.export.spec import DecoderSpec


def decoder_spec(config: dict[str, Any]) -> DecoderSpec:
    if config["model_type"] == "llama" and config.get("sliding_window"):
        raise OutriderError(f"sliding_window {config['sliding_window']} is not known of Llama; is it Mistral?")
    return DecoderSpec(**base(config), activation=activation(config), windows=windows(config))
