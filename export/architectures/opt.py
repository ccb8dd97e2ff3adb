"""OPT (arXiv 2205.01068): learned positions whose table begins with two rows for others, layer norms, biases, relu."""

from __future__ import annotations

from typing import Any

from outrider.engines.errors import OutriderError
from outrider.export.architectures.common import activation, base
from outrider.export.spec import DecoderSpec

_DECODER = "model.decoder."
_LAYER = _DECODER + "layers.{}."
_DEFAULTS = {
    "do_layer_norm_before": True,
    "layer_norm_elementwise_affine": True,
    "_remove_final_layer_norm": False,
    "word_embed_proj_dim": None,
    "activation_function": "relu",
    "max_position_embeddings": 2048,
    "tie_word_embeddings": True,
}


def decoder_spec(config: dict[str, Any]) -> DecoderSpec:
    config = _DEFAULTS | config
    for key in ("do_layer_norm_before", "layer_norm_elementwise_affine", "_remove_final_layer_norm"):
        if config[key] is not _DEFAULTS[key]:
            raise OutriderError(f"{key} {config[key]} is not implemented for this family")
    if config["word_embed_proj_dim"] not in (None, config["hidden_size"]):
        raise OutriderError(f"word_embed_proj_dim {config['word_embed_proj_dim']} is not implemented: not hidden_size")
    config |= {"intermediate_size": config["ffn_dim"], "layer_norm_eps": 1e-5}
    config |= {"head_dim": None, "num_key_value_heads": None}  # which this family does not have
    fields = base(config, norm_epsilon="layer_norm_eps", embedding=_DECODER + "embed_tokens")
    fields |= {
        "final_norm": _DECODER + "final_layer_norm",
        "layer_names": {
            "attention_norm": _LAYER + "self_attn_layer_norm",
            **{role: f"{_LAYER}self_attn.{role}_proj" for role in ("q", "k", "v")},
            "o": _LAYER + "self_attn.out_proj",
            "mlp_norm": _LAYER + "final_layer_norm",
            "up": _LAYER + "fc1",
            "down": _LAYER + "fc2",
        },
    }
    return DecoderSpec(
        **fields,
        activation=activation({"hidden_act": config["activation_function"]}),
        norm="layer",
        position_table=_DECODER + "embed_positions",
        first_position=2,
    )
