"""The Llama family: Llama 2 and 3, SmolLM2, Mistral, Qwen 2 (whose projections have biases)."""

from __future__ import annotations

from typing import Any

from outrider.engines.errors import OutriderError
from outrider.export.architectures.common import activation, base, qwen_windows, windows
from outrider.export.spec import DecoderSpec


def decoder_spec(config: dict[str, Any]) -> DecoderSpec:
    family = config["model_type"]
    if family == "llama" and config.get("sliding_window"):
        raise OutriderError(f"sliding_window {config['sliding_window']} is not known of Llama; is it Mistral?")
    if family == "qwen2":
        seen = qwen_windows(config)
    else:
        seen = windows({"sliding_window": 4096 if family == "mistral" else None} | config)
    return DecoderSpec(**base(config), activation=activation(config), windows=seen)
