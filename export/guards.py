"""Nothing of a checkpoint is silently left out: parts, settings and tensors that no decoder of ours has are refused."""

from __future__ import annotations

from typing import Any

import numpy as np

from outrider.engines.errors import OutriderError
from outrider.export.checkpoint import D2T, Checkpoint, read_rows
from outrider.export.spec import DecoderSpec

# Settings that make another model wherever they are set; a family that has one reads it.
_SETTINGS = (
    "alibi",
    "attention_chunk_size",
    "attention_multiplier",
    "attn_logit_softcapping",
    "clip_qkv",
    "embedding_multiplier",
    "final_logit_softcapping",
    "logit_scale",
    "logits_scaling",
    "n_routed_experts",
    "no_rope_layers",
    "num_experts",
    "num_local_experts",
    "parallel_attn",
    "qk_layernorm",
    "query_pre_attn_scalar",
    "residual_multiplier",
    "use_alibi",
    "use_parallel_residual",
    "use_qk_norm",
)
_PARTS = ("vision_config", "audio_config", "text_config", "encoder")
# Keys and kinds of layers of models whose state sums up all tokens so far.
_RECURRENT = ("state_size", "ssm_state_size", "mamba_d_state", "linear_conv_kernel_dim", "lru_width", "conv_L_cache")
_RECURRENT_LAYERS = ("mamba", "linear_attention", "recurrent", "conv")
# Tables that old files hold and newer ones compute.
_COMPUTED = (".rotary_emb.inv_freq",)


class ReadConfig(dict[str, Any]):
    """A config that knows which of its keys were asked for."""

    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__(config)
        self.read: set[str] = set()

    def __getitem__(self, key: str) -> Any:
        self.read.add(key)
        return super().__getitem__(key)

    def __or__(self, changes: dict[str, Any]) -> ReadConfig:  # type: ignore[override]
        return self._like(dict(self) | changes)

    def __ror__(self, defaults: dict[str, Any]) -> ReadConfig:  # type: ignore[override]
        return self._like(defaults | dict(self))

    def _like(self, config: dict[str, Any]) -> ReadConfig:
        """The same config with other values, whose keys are asked for on behalf of this one."""
        other = ReadConfig(config)
        other.read = self.read
        return other

    def get(self, key: str, default: Any = None) -> Any:
        self.read.add(key)
        return super().get(key, default)


def check_kind(config: dict[str, Any], family: str, families: tuple[str, ...]) -> None:
    """Raises OutriderError for what is no decoder of a family that is implemented, saying why."""
    layers = config.get("layer_types") or config.get("layers_block_type") or ()
    recurrent = [key for key in _RECURRENT if config.get(key)]
    recurrent += [str(kind) for kind in layers if str(kind).startswith(_RECURRENT_LAYERS)]
    if recurrent:
        raise OutriderError(
            f"architecture {family!r} has recurrent layers ({recurrent[0]}), whose state cannot be rolled back to the "
            "last accepted token; use a model with attention in all layers"
        )
    if family in families:
        return
    if config.get("is_encoder_decoder") or any(key in config for key in _PARTS):
        part = "encoder" if config.get("is_encoder_decoder") else next(key for key in _PARTS if key in config)
        raise OutriderError(
            f"architecture {family!r} has parts that are no text decoder ({part}); export the checkpoint of its text "
            "model alone"
        )
    own = "; its own code (auto_map) is never run" if config.get("auto_map") else ""
    raise OutriderError(f"architecture {family!r} is not supported; supported are {', '.join(families)}{own}")


def check_settings(config: ReadConfig) -> None:
    """Raises OutriderError for a setting that would make another model and was not asked for."""
    for key in _SETTINGS:
        value = dict.get(config, key)
        neutral = value is not True and (not value or value == 1 or (isinstance(value, list) and set(value) == {1}))
        if key not in config.read and not neutral:
            raise OutriderError(f"{key} {value!r} in its config is not implemented for this family")


def check_tensors(spec: DecoderSpec, checkpoint: Checkpoint) -> None:
    """Raises OutriderError for a tensor that the export would not read."""
    names = {name for name, _ in spec.expected_shapes()}
    alone = {f"{spec.embedding}.weight", f"{spec.head}.weight", *spec.expert_tensors()}  # beside which no bias is read
    names |= {name.removesuffix("weight") + "bias" for name in names - alone}
    for name in checkpoint.unread(names):
        if name.endswith(_COMPUTED) or (name == D2T and spec.draft_vocab is not None):
            continue
        if spec.tied and checkpoint.shape(name) == checkpoint.shape(f"{spec.embedding}.weight"):
            _check_copy(spec, checkpoint, name)
            continue
        raise OutriderError(
            f"{checkpoint.path} has a tensor {name}, which no {spec.architecture} model of its config has; its "
            "model_type or a setting is not what it says"
        )


def _check_copy(spec: DecoderSpec, checkpoint: Checkpoint, name: str) -> None:
    """A head in the file of a model whose config says that the embedding is its head."""
    shape = checkpoint.shape(name)
    assert shape is not None
    pair = (read_rows(checkpoint, tensor, shape[0]) for tensor in (f"{spec.embedding}.weight", name))
    if not all(np.array_equal(one, other) for one, other in zip(*pair, strict=True)):
        raise OutriderError(
            f"{checkpoint.path} has a head {name} of its own, and tie_word_embeddings in its config says that the "
            "embedding is the head; set it to false if the file is right"
        )
