"""Qwen 3, dense: query and key norms."""

from __future__ import annotations

from typing import Any

from outrider.export.architectures.common import QUERY_KEY_NORMS, activation, base, windows
from outrider.export.spec import DecoderSpec


def decoder_spec(config: dict[str, Any]) -> DecoderSpec:
    config = {"use_sliding_window": False, "sliding_window": 4096, "max_window_layers": 28, **config}
    fields = base(config)
    fields["layer_names"] |= QUERY_KEY_NORMS
    return DecoderSpec(**fields, activation=activation(config), windows=windows(config))
