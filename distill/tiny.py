"""A small Llama from scratch, whose embedding and head begin as the principal components of the target's."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from outrider.export.shared_embedding import PROJECTION, SHARED
from outrider.export.spec import DecoderSpec

_HEAD_DIM = 64
_SLAB_ROWS = 8192


def tiny_config(width: int, layers: int, vocab_size: int, max_positions: int) -> dict[str, Any]:
    """A Hugging Face config."""
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": width,
        "intermediate_size": 3 * width,
        "num_hidden_layers": layers,
        "num_attention_heads": width // _HEAD_DIM,
        "num_key_value_heads": width // _HEAD_DIM,
        "head_dim": _HEAD_DIM,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "max_position_embeddings": max_positions,
        "vocab_size": vocab_size,
        "tie_word_embeddings": False,
        SHARED: True,
    }


def tiny_tensors(spec: DecoderSpec, embedding: Tensor, seed: int) -> dict[str, Tensor]:
    """What training begins with, by name.

    Args:
        embedding: the target's, float32 [V, target's width].
    """
    generator = torch.Generator().manual_seed(seed)
    components = _principal(embedding, spec.hidden_size, generator)
    rows = embedding @ components.T
    size = rows.square().mean().sqrt()
    tensors = {PROJECTION: components / size}
    assert spec.draft_vocab is not None
    for name, shape in spec.expected_shapes():
        if name == f"{spec.embedding}.weight":
            continue
        if name == f"{spec.head}.weight":
            tensors[name] = rows[torch.from_numpy(spec.draft_vocab)] / size * 0.05
        elif len(shape) == 1:
            tensors[name] = torch.ones(shape)
        else:
            last = name.endswith(("o_proj.weight", "down_proj.weight"))  # what is added to the residual begins small
            scale = shape[1] ** -0.5 * ((2 * spec.num_layers) ** -0.5 if last else 1)
            tensors[name] = torch.randn(shape, generator=generator) * scale
    return tensors


def _principal(embedding: Tensor, count: int, generator: torch.Generator) -> Tensor:
    """The first principal directions of the rows, float32 [count, width]; random ones where there are not so many."""
    width, mean = embedding.shape[1], embedding.mean(dim=0)
    squares = torch.zeros((width, width), dtype=torch.float64)
    for part in torch.split(embedding, _SLAB_ROWS):
        centered = (part - mean).double()
        squares += centered.T @ centered
    _, vectors = torch.linalg.eigh(squares)
    directions: Tensor = vectors.flip(1)[:, :count].T.float()
    rest = torch.randn((max(0, count - width), width), generator=generator) * width**-0.5
    return torch.cat([directions, rest])
