"""StableLM 2 (arXiv 2402.17834): layer norms, a quarter of the head rotated; MLP beside attention in some."""

from __future__ import annotations

from typing import Any

from outrider.engines.errors import OutriderError
from outrider.export.architectures.common import activation, base
from outrider.export.spec import DecoderSpec


def decoder_spec(config: dict[str, Any]) -> DecoderSpec:
    if config.get("qk_layernorm"):
        raise OutriderError("qk_layernorm is not implemented for this family: each head has a norm of its own")
    config = {"partial_rotary_factor": 0.25} | config | {"head_dim": None}  # which this family does not have
    fields = base(config, partly_rotated=True, norm_epsilon="layer_norm_eps")
    parallel = bool(config.get("use_parallel_residual"))
    names = {role: name for role, name in fields["layer_names"].items() if not (parallel and role == "mlp_norm")}
    return DecoderSpec(
        **{**fields, "layer_names": names}, activation=activation(config), norm="layer", parallel=parallel
    )
