"""The decoder in plain numpy float32, read straight from the checkpoint: what an exported engine is checked against.

It shares with the exporter only the ``DecoderSpec``, and holds one layer's tensors at a time.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from outrider.export.checkpoint import Checkpoint, read_all, read_rows
from outrider.export.spec import NO_TOKEN, DecoderSpec

Array = NDArray[np.float32]


def reference_logits(spec: DecoderSpec, checkpoint: Checkpoint, ids: NDArray[np.int64]) -> Array:
    """Logits ``[len(ids), vocab_size]`` of one sequence."""
    embedding = f"{spec.embedding}.weight"
    x = np.concatenate([checkpoint.read(embedding, int(token), int(token) + 1) for token in ids])
    x = x * np.float32(spec.embedding_scale)
    if spec.position_table:
        first = spec.first_position
        x = x + checkpoint.read(f"{spec.position_table}.weight", first, first + len(ids))
    for layer in range(spec.num_layers):
        before = x
        for kind, block in (("attention", _attention), ("mlp", _mlp)):
            role = f"{kind}_norm" if spec.has(f"{kind}_norm") or not spec.parallel else "attention_norm"
            y = block(spec, checkpoint, layer, _layer_norm(spec, checkpoint, role, layer, before))
            y = _layer_norm(spec, checkpoint, f"{kind}_post_norm", layer, y)
            x = x + y * np.float32(spec.residual_scale)
            before = before if spec.parallel else x
    x = _norm(spec, checkpoint, spec.final_norm, x)
    slabs = read_rows(checkpoint, f"{spec.head}.weight", spec.head_size)
    logits = np.concatenate([x @ slab.T for slab in slabs], axis=1) * np.float32(spec.logit_scale)
    logits = _softcap(logits, spec.logit_softcap)
    if spec.draft_vocab is None:
        return logits
    whole = np.full((len(ids), spec.vocab_size), NO_TOKEN, np.float32)
    whole[:, spec.draft_vocab] = logits
    return whole


def _layer_norm(spec: DecoderSpec, checkpoint: Checkpoint, role: str, layer: int, x: Array) -> Array:
    return _norm(spec, checkpoint, spec.stem(role, layer), x) if spec.has(role) else x


def _norm(spec: DecoderSpec, checkpoint: Checkpoint, stem: str, x: Array) -> Array:
    if spec.norm == "layer":
        x = x - x.mean(axis=-1, keepdims=True)
    scale = 1.0 / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + np.float32(spec.norm_epsilon))
    weight = read_all(checkpoint, f"{stem}.weight") + np.float32(spec.norm_offset)
    bias = read_all(checkpoint, f"{stem}.bias") if checkpoint.shape(f"{stem}.bias") is not None else np.float32(0)
    return np.asarray(x * scale * weight + bias, np.float32)


def _softcap(x: Array, cap: float) -> Array:
    return np.asarray(np.tanh(x / np.float32(cap)) * np.float32(cap)) if cap else x


def _linear(spec: DecoderSpec, checkpoint: Checkpoint, role: str, layer: int, x: Array, expert: int = 0) -> Array:
    stem, order = spec.stem(role, layer, expert), spec.row_order(role)
    y = x @ read_all(checkpoint, f"{stem}.weight").T
    y = y if checkpoint.shape(f"{stem}.bias") is None else y + read_all(checkpoint, f"{stem}.bias")
    return y if order is None else y[..., order]


def _projections(spec: DecoderSpec, checkpoint: Checkpoint, roles: str, layer: int, x: Array) -> list[Array]:
    """Those of ``roles``, from a tensor each or from one for all."""
    names = roles.split()
    parts = [_linear(spec, checkpoint, role, layer, x) for role in spec.stacked(*names)]
    if len(parts) == len(names):
        return parts
    sizes = [spec.linear_shape(role)[0] for role in names]
    return np.split(parts[0], np.cumsum(sizes)[:-1], axis=-1)


def _attention(spec: DecoderSpec, checkpoint: Checkpoint, layer: int, x: Array) -> Array:
    rows = len(x)
    query, key, value = _projections(spec, checkpoint, "q k v", layer, x)
    if spec.wide_qk_norm:
        query, key = (_layer_norm(spec, checkpoint, f"{r}_norm", layer, y) for r, y in (("q", query), ("k", key)))
    query, key, value = (y.reshape(rows, -1, spec.head_dim).swapaxes(0, 1) for y in (query, key, value))
    if not spec.wide_qk_norm:
        query, key = (_layer_norm(spec, checkpoint, f"{r}_norm", layer, y) for r, y in (("q", query), ("k", key)))
    rotation = spec.rotation(layer)
    if rotation is not None:
        query, key = (_rotate(y, spec.rotations[rotation], spec.rotary_scale) for y in (query, key))
    group = spec.num_heads // spec.num_kv_heads
    key, value = key.repeat(group, axis=0), value.repeat(group, axis=0)
    scores = _softcap(query @ key.swapaxes(1, 2) * np.float32(spec.query_scale(layer)), spec.attention_softcap)
    seen = np.tri(rows, dtype=bool)
    if spec.window(layer):
        seen &= ~np.tri(rows, k=-spec.window(layer), dtype=bool)
    scores = np.where(seen, scores, np.float32(-np.inf))
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    weights /= weights.sum(axis=-1, keepdims=True)
    merged = (weights @ value).swapaxes(0, 1).reshape(rows, -1)
    return _linear(spec, checkpoint, "o", layer, merged)


def _rotate(x: Array, inv_freq: NDArray[np.float64], scale: float) -> Array:
    """The first ``2 * len(inv_freq)`` dimensions of each head."""
    angles = np.arange(x.shape[1])[:, None] * inv_freq
    cos, sin = ((scale * part).astype(np.float32) for part in (np.cos(angles), np.sin(angles)))
    size = len(inv_freq)
    first, second, rest = x[..., :size], x[..., size : 2 * size], x[..., 2 * size :]
    return np.concatenate([first * cos - second * sin, second * cos + first * sin, rest], axis=-1)


def _mlp(spec: DecoderSpec, checkpoint: Checkpoint, layer: int, x: Array) -> Array:
    if spec.routed(layer):
        return _experts(spec, checkpoint, layer, x)
    first, *rest = _projections(spec, checkpoint, " ".join(spec.mlp_inputs), layer, x)
    hidden = _activated(spec, first)
    return _linear(spec, checkpoint, "down", layer, hidden * rest[0] if rest else hidden)


def _experts(spec: DecoderSpec, checkpoint: Checkpoint, layer: int, x: Array) -> Array:
    logits = _linear(spec, checkpoint, "router", layer, x)
    odds = np.exp(logits - logits.max(axis=-1, keepdims=True))
    odds /= odds.sum(axis=-1, keepdims=True)
    chosen = np.argsort(-odds, axis=-1, kind="stable")[:, : spec.experts_per_token]
    weights = np.take_along_axis(odds, chosen, axis=-1)
    if spec.normalized_routing:
        weights /= weights.sum(axis=-1, keepdims=True)
    total = np.zeros_like(x)
    for expert in np.unique(chosen):
        rows, places = np.nonzero(chosen == expert)
        gate, up = (_linear(spec, checkpoint, f"expert_{part}", layer, x[rows], expert) for part in ("gate", "up"))
        hidden = _activated(spec, gate) * up
        total[rows] += weights[rows, places, None] * _linear(spec, checkpoint, "expert_down", layer, hidden, expert)
    return total


def _activated(spec: DecoderSpec, x: Array) -> Array:
    if spec.activation == "silu":
        return np.asarray(x / (1 + np.exp(-x)))
    if spec.activation == "relu":
        return np.maximum(x, np.float32(0))
    if spec.activation == "gelu_tanh":
        inner = np.float32(math.sqrt(2 / math.pi)) * (x + np.float32(0.044715) * x**3)
        return np.asarray(0.5 * x * (1 + np.tanh(inner)), np.float32)
    erf = np.vectorize(math.erf, otypes=[np.float32])  # numpy has none
    return np.asarray(0.5 * x * (1 + erf(x / math.sqrt(2))), np.float32)
