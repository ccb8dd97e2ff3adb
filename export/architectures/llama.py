"""The Llama family: Llama 2 and 3, SmolLM2, Mistral, Qwen 2 (whose projections have biases)."""

from __future__ import annotations

from typing import Any

from outrider.engines.errors import OutriderError
from outrider.export.architectures.common import activation, base, windows
from outrider.export.spec import DecoderSpec

# What transformers takes where a config does not say.
_DEFAULTS: dict[str, dict[str, Any]] = {
    "mistral": {"sliding_window": 4096},
    "qwen2": {"use_sliding_window": False, "sliding_window": 4096, "max_window_layers": 28},
}


def decoder_spec(config: dict[str, Any]) -> DecoderSpec:
    config = {**_DEFAULTS.get(config["model_type"], {}), **config}
    if config["model_type"] == "llama" and config.get("sliding_window"):
        raise OutriderError(f"sliding_window {config['sliding_window']} is not known of Llama; is it Mistral?")
    return DecoderSpec(**base(config), activation=activation(config), windows=windows(config))
