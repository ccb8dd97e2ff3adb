"""A draft that begins as some of its target's layers."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from outrider.engines.errors import OutriderError
from outrider.export.architectures import family_spec
from outrider.export.checkpoint import Checkpoint, read_all
from outrider.export.shared_embedding import SHARED
from outrider.export.spec import DecoderSpec

# Of configs that say something of each layer.
_BY_LAYER = ("layer_types", "no_rope_layers")


def layers_config(config: dict[str, Any], layers: tuple[int, ...]) -> dict[str, Any]:
    """The target's config for a model of these layers, with a reduced head and the target's embedding."""
    changed = {key: [config[key][layer] for layer in layers] for key in _BY_LAYER if config.get(key)}
    return config | changed | {"num_hidden_layers": len(layers), "tie_word_embeddings": False, SHARED: True}


def layers_spec(config: dict[str, Any], target: DecoderSpec, layers: tuple[int, ...]) -> DecoderSpec:
    """What the config of ``layers_config`` is read as: layers counted anew, and a head of its own, still whole.

    Raises:
        OutriderError: a family whose layers differ in ways that a config of fewer of them does not say.
    """
    spec = family_spec(config)
    part = target.of_layers(layers)
    kinds = [[(one.window(layer), one.rotation(layer)) for layer in range(len(layers))] for one in (spec, part)]
    turned = target.architecture == "gpt2"  # its files hold matrices the other way round
    if kinds[0] != kinds[1] or target.num_experts or target.scale_by_layer or turned:
        raise OutriderError(f"layers of {target.architecture} cannot be a draft of their own; use --kind tiny")
    return spec


def layers_tensors(
    draft: DecoderSpec, target: DecoderSpec, layers: tuple[int, ...], checkpoint: Checkpoint
) -> dict[str, Tensor]:
    """What training begins with, by name."""
    assert draft.draft_vocab is not None
    part = target.of_layers(layers)
    stems = {draft.final_norm: target.final_norm}
    for layer in range(draft.num_layers):
        stems |= {draft.stem(role, layer): part.stem(role, layer) for role in draft.layer_names}
    if draft.position_table:
        stems[draft.position_table] = draft.position_table
    tensors = {}
    for ours, theirs in stems.items():
        for kind in ("weight", "bias"):
            if checkpoint.shape(f"{theirs}.{kind}") is not None:
                tensors[f"{ours}.{kind}"] = torch.from_numpy(read_all(checkpoint, f"{theirs}.{kind}"))
    head = read_all(checkpoint, f"{target.head}.weight")[draft.draft_vocab]
    tensors[f"{draft.head}.weight"] = torch.from_numpy(head)
    return tensors
