"""OLMo 2 (arXiv 2501.00656): norms behind attention and MLP instead of before, query and key norms over all heads."""

from __future__ import annotations

from typing import Any

from outrider.engines.errors import OutriderError
from outrider.export.architectures.common import LAYER, QUERY_KEY_NORMS, activation, base
from outrider.export.spec import DecoderSpec


def decoder_spec(config: dict[str, Any]) -> DecoderSpec:
    if config.get("sliding_window"):
        raise OutriderError(f"sliding_window {config['sliding_window']} is not known of OLMo 2; is it OLMo 3?")
    fields = base(config)
    names = {role: name for role, name in fields["layer_names"].items() if not role.endswith("norm")}
    names |= {
        "attention_post_norm": LAYER + "post_attention_layernorm",
        "mlp_post_norm": LAYER + "post_feedforward_layernorm",
    }
    return DecoderSpec(
        **{**fields, "layer_names": names | QUERY_KEY_NORMS}, activation=activation(config), wide_qk_norm=True
    )
