"""The decoder in plain numpy float32, read straight from the checkpoint: what an exported engine is checked against.

It shares with the exporter only the ``DecoderSpec``, and holds one layer's tensors at a time.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from outrider.export.checkpoint import Checkpoint, read_all, read_rows
from outrider.export.spec import DecoderSpec

Array = NDArray[np.float32]


def reference_logits(spec: DecoderSpec, checkpoint: Checkpoint, ids: NDArray[np.int64]) -> Array:
    """Logits ``[len(ids), vocab_size]`` of one sequence."""
    embedding = f"{spec.embedding}.weight"
    x = np.concatenate([checkpoint.read(embedding, int(token), int(token) + 1) for token in ids])
    for layer in range(spec.num_layers):
        x = x + _attention(spec, checkpoint, layer, _norm(spec, checkpoint, spec.stem("attention_norm", layer), x))
        x = x + _mlp(spec, checkpoint, layer, _norm(spec, checkpoint, spec.stem("mlp_norm", layer), x))
    x = _norm(spec, checkpoint, spec.final_norm, x)
    slabs = read_rows(checkpoint, f"{spec.head}.weight", spec.vocab_size)
    return np.concatenate([x @ slab.T for slab in slabs], axis=1)


def _norm(spec: DecoderSpec, checkpoint: Checkpoint, stem: str, x: Array) -> Array:
    scale = 1.0 / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + np.float32(spec.norm_epsilon))
    return np.asarray(x * scale * read_all(checkpoint, f"{stem}.weight"), np.float32)


def _linear(spec: DecoderSpec, checkpoint: Checkpoint, role: str, layer: int, x: Array) -> Array:
    stem = spec.stem(role, layer)
    y = x @ read_all(checkpoint, f"{stem}.weight").T
    return y if checkpoint.shape(f"{stem}.bias") is None else y + read_all(checkpoint, f"{stem}.bias")


def _attention(spec: DecoderSpec, checkpoint: Checkpoint, layer: int, x: Array) -> Array:
    rows = len(x)
    query, key, value = (
        _linear(spec, checkpoint, role, layer, x).reshape(rows, -1, spec.head_dim).swapaxes(0, 1) for role in "qkv"
    )
    query, key = _rotate(query, spec.inv_freq), _rotate(key, spec.inv_freq)
    group = spec.num_heads // spec.num_kv_heads
    key, value = key.repeat(group, axis=0), value.repeat(group, axis=0)
    scores = query @ key.swapaxes(1, 2) / np.float32(np.sqrt(spec.head_dim))
    scores = np.where(np.tri(rows, dtype=bool), scores, np.float32(-np.inf))
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    weights /= weights.sum(axis=-1, keepdims=True)
    merged = (weights @ value).swapaxes(0, 1).reshape(rows, -1)
    return _linear(spec, checkpoint, "o", layer, merged)


def _rotate(x: Array, inv_freq: NDArray[np.float64]) -> Array:
    angles = np.arange(x.shape[1])[:, None] * inv_freq
    cos, sin = np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)
    first, second = np.split(x, 2, axis=-1)
    return np.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)


def _mlp(spec: DecoderSpec, checkpoint: Checkpoint, layer: int, x: Array) -> Array:
    gate = _linear(spec, checkpoint, "gate", layer, x)
    gated = gate / (1 + np.exp(-gate)) * _linear(spec, checkpoint, "up", layer, x)
    return _linear(spec, checkpoint, "down", layer, gated)
