"""One file a family: config -> ``DecoderSpec``. A new family is a file here and a line in ``_FAMILIES``."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from outrider.engines.errors import OutriderError
from outrider.export.architectures import (
    cohere,
    falcon,
    gemma,
    gpt2,
    gpt_neox,
    granite,
    llama,
    mixtral,
    olmo2,
    opt,
    phi3,
    qwen3,
    qwen3_moe,
    smollm3,
    stablelm,
    starcoder2,
)
from outrider.export.checkpoint import D2T, Checkpoint
from outrider.export.gguf_checkpoint import GGUFCheckpoint
from outrider.export.guards import ReadConfig, check_kind, check_settings, check_tensors
from outrider.export.spec import DecoderSpec, check_shapes

_FAMILIES = {
    "llama": llama.decoder_spec,
    "mistral": llama.decoder_spec,
    "mixtral": mixtral.decoder_spec,
    "qwen2": llama.decoder_spec,
    "qwen3": qwen3.decoder_spec,
    "qwen3_moe": qwen3_moe.decoder_spec,
    "cohere": cohere.decoder_spec,
    "cohere2": cohere.decoder_spec,
    "falcon": falcon.decoder_spec,
    "gemma2": gemma.decoder_spec,
    "gemma3_text": gemma.decoder_spec,
    "phi3": phi3.decoder_spec,
    "gpt2": gpt2.decoder_spec,
    "gpt_neox": gpt_neox.decoder_spec,
    "granite": granite.decoder_spec,
    "olmo2": olmo2.decoder_spec,
    "opt": opt.decoder_spec,
    "smollm3": smollm3.decoder_spec,
    "stablelm": stablelm.decoder_spec,
    "starcoder2": starcoder2.decoder_spec,
}
# Whose files by llama.cpp's converter were compared: others store norms or rows in ways of their own.
_GGUF_FAMILIES = (
    *("llama", "qwen2", "qwen3", "gemma2", "gemma3_text", "phi3", "granite", "smollm3"),
    *("olmo2", "starcoder2", "cohere", "cohere2", "gpt2"),
)


def family_spec(config: dict[str, Any]) -> DecoderSpec:
    """By the config alone, of a family that is implemented."""
    return _FAMILIES[config["model_type"]](config)


def decoder_spec(checkpoint: Checkpoint) -> DecoderSpec:
    """The checkpoint's architecture, its tensors checked to be there with the right shapes.

    Raises:
        OutriderError: an architecture or a setting that is not implemented, or a tensor missing or misshapen.
    """
    family = str(checkpoint.config.get("model_type"))
    config = ReadConfig(checkpoint.config)
    try:
        check_kind(config, family, tuple(_FAMILIES))
        if family not in _GGUF_FAMILIES and isinstance(checkpoint, GGUFCheckpoint):
            raise OutriderError(f"GGUF files of {family!r} are not read yet; use the safetensors checkpoint")
        spec = _with_draft_vocab(family_spec(config), config, checkpoint)
        check_settings(config)
    except KeyError as error:
        raise OutriderError(f"{checkpoint.path}: its config has no {error.args[0]}") from None
    except (TypeError, ValueError, AttributeError, ArithmeticError) as error:
        raise OutriderError(f"{checkpoint.path}: its config has a value of the wrong kind ({error})") from error
    except OutriderError as error:
        raise OutriderError(f"{checkpoint.path}: {error}") from None
    check_shapes(spec, checkpoint)
    check_tensors(spec, checkpoint)
    return spec


def _with_draft_vocab(spec: DecoderSpec, config: dict[str, Any], checkpoint: Checkpoint) -> DecoderSpec:
    """A reduced head says whose logits its rows give: row i those of token i + ``d2t[i]``, as in drafts of EAGLE-3."""
    size = config.get("draft_vocab_size")
    if size is None and checkpoint.shape(D2T) is None:
        return spec
    if not isinstance(size, int) or size < 1 or checkpoint.shape(D2T) != (size,) or spec.tied:
        raise OutriderError(
            f"draft_vocab_size is {size}: that needs a head of its own (tie_word_embeddings false) and a tensor {D2T} "
            f"of that size, which here has shape {checkpoint.shape(D2T)}"
        )
    ids = np.arange(size) + checkpoint.read(D2T, 0, size).astype(np.int64)
    if ids[0] < 0 or ids[-1] >= spec.vocab_size or (np.diff(ids) < 1).any():
        raise OutriderError(f"{D2T} must name rising tokens between 0 and {spec.vocab_size - 1}")
    return replace(spec, draft_vocab=ids)
