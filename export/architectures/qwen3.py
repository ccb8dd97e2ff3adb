"""Qwen 3, dense: query and key norms."""

from __future__ import annotations

from typing import Any

from outrider.export.architectures.common import QUERY_KEY_NORMS, activation, base, qwen_windows
from outrider.export.spec import DecoderSpec


def decoder_spec(config: dict[str, Any]) -> DecoderSpec:
    fields = base(config)
    fields["layer_names"] |= QUERY_KEY_NORMS
    return DecoderSpec(**fields, activation=activation(config), windows=qwen_windows(config))
