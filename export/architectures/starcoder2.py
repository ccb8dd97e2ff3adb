"""StarCoder 2 (arXiv 2402.19173): layer norms, an MLP without a gate, biases."""

from __future__ import annotations

from typing import Any

from outrider.export.architectures.common import LAYER, activation, base, windows
from outrider.export.spec import DecoderSpec


def decoder_spec(config: dict[str, Any]) -> DecoderSpec:
    config = {"tie_word_embeddings": True, "hidden_act": "gelu_pytorch_tanh"} | config
    fields = base(config, norm_epsilon="norm_epsilon")
    names = {role: name for role, name in fields["layer_names"].items() if role not in ("gate", "up", "down")}
    names |= {"up": LAYER + "mlp.c_fc", "down": LAYER + "mlp.c_proj"}
    return DecoderSpec(
        **{**fields, "layer_names": names}, activation=activation(config), windows=windows(config), norm="layer"
    )
