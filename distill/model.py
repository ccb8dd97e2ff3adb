"""A draft in PyTorch: the decoder of a ``DecoderSpec``, whose parameters go by the checkpoint's tensor names.

It reads tokens through its target's embedding, which is not trained, and gives logits of its reduced head only.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional as F

from outrider.export.shared_embedding import PROJECTION
from outrider.export.spec import DecoderSpec


class DraftModel(nn.Module):
    """Args:
    tensors: float32, by name: all of ``spec`` but the embedding, and the projection where the draft is narrower.
    embedding: the target's, float32 [V, target's width].
    """

    embedding: Tensor

    def __init__(self, spec: DecoderSpec, tensors: Mapping[str, Tensor], embedding: Tensor, max_length: int) -> None:
        super().__init__()
        self.spec = spec
        self.names = tuple(tensors)
        self._weights = nn.ParameterList(nn.Parameter(tensor.clone()) for tensor in tensors.values())
        self._index = {name: index for index, name in enumerate(tensors)}
        self.register_buffer("embedding", embedding, persistent=False)
        for name, inv_freq in spec.rotations.items():
            angles = np.arange(max_length)[:, None] * inv_freq
            for kind, table in (("cos", np.cos(angles)), ("sin", np.sin(angles))):
                scaled = torch.from_numpy((spec.rotary_scale * table).astype(np.float32))
                self.register_buffer(f"{kind}_{name}", scaled, persistent=False)

    def tensor(self, name: str) -> Tensor | None:
        index = self._index.get(name)
        return None if index is None else self._weights[index]

    def tensors(self) -> dict[str, NDArray[np.float32]]:
        """As they are now, by name."""
        return {name: self._weights[index].detach().numpy() for name, index in self._index.items()}

    def hidden(self, ids: Tensor, positions: Tensor, seen: Tensor) -> Tensor:
        """What the head reads, [B, T, width].

        Args:
            ids, positions: int64 [B, T]; the second count only for learned positions: rotary ones are relative.
            seen: bool [B, T, T], whether the first position sees the second.
        """
        spec = self.spec
        x = F.embedding(ids, self.embedding)
        projection = self.tensor(PROJECTION)
        # The sum over layers stays in float32, also where products are in less.
        x = (x if projection is None else F.linear(x, projection)).float() * spec.embedding_scale
        if spec.position_table:
            table = self.tensor(f"{spec.position_table}.weight")
            assert table is not None
            x = x + F.embedding(positions + spec.first_position, table)
        for layer in range(spec.num_layers):
            before = x
            for kind in ("attention", "mlp"):
                role = f"{kind}_norm" if spec.has(f"{kind}_norm") or not spec.parallel else "attention_norm"
                y = self._layer_norm(role, layer, before)
                y = self._attention(layer, y, seen) if kind == "attention" else self._mlp(layer, y)
                x = x + self._layer_norm(f"{kind}_post_norm", layer, y) * spec.residual_scale
                before = before if spec.parallel else x
        return self._norm(spec.final_norm, x)

    def logits(self, hidden: Tensor) -> Tensor:
        """Of the reduced head's tokens, [..., head_size]."""
        spec = self.spec
        logits = F.linear(hidden, self._weight(spec.head)) * spec.logit_scale
        return torch.tanh(logits / spec.logit_softcap) * spec.logit_softcap if spec.logit_softcap else logits

    def _weight(self, stem: str) -> Tensor:
        weight = self.tensor(f"{stem}.weight")
        assert weight is not None, stem
        return weight

    def _layer_norm(self, role: str, layer: int, x: Tensor) -> Tensor:
        return self._norm(self.spec.stem(role, layer), x) if self.spec.has(role) else x

    def _norm(self, stem: str, x: Tensor) -> Tensor:
        spec, weight = self.spec, self._weight(stem) + self.spec.norm_offset
        if spec.norm == "layer":
            return F.layer_norm(x, weight.shape, weight, self.tensor(f"{stem}.bias"), spec.norm_epsilon)
        return F.rms_norm(x, weight.shape, weight, spec.norm_epsilon)

    def _linear(self, role: str, layer: int, x: Tensor) -> Tensor:
        stem, order = self.spec.stem(role, layer), self.spec.row_order(role)
        y = F.linear(x, self._weight(stem), self.tensor(f"{stem}.bias"))
        return y if order is None else y[..., torch.from_numpy(order)]

    def _projections(self, roles: tuple[str, ...], layer: int, x: Tensor) -> list[Tensor]:
        stacked = self.spec.stacked(*roles)
        parts = [self._linear(role, layer, x) for role in stacked]
        if len(parts) == len(roles):
            return parts
        return list(torch.split(parts[0], [self.spec.linear_shape(role)[0] for role in roles], dim=-1))

    def _attention(self, layer: int, x: Tensor, seen: Tensor) -> Tensor:
        spec, (batch, rows, _) = self.spec, x.shape
        query, key, value = self._projections(("q", "k", "v"), layer, x)
        if spec.wide_qk_norm:
            query, key = (self._layer_norm(f"{r}_norm", layer, y) for r, y in (("q", query), ("k", key)))
        query, key, value = (y.view(batch, rows, -1, spec.head_dim).transpose(1, 2) for y in (query, key, value))
        if not spec.wide_qk_norm:
            query, key = (self._layer_norm(f"{r}_norm", layer, y) for r, y in (("q", query), ("k", key)))
        rotation = spec.rotation(layer)
        if rotation is not None:
            query, key = self._rotate(query, rotation), self._rotate(key, rotation)
        if window := spec.window(layer):
            seen = seen & ~torch.ones(rows, rows, dtype=torch.bool).tril(-window)
        y = self._attend(query, key, value, seen[:, None], layer)
        return self._linear("o", layer, y.transpose(1, 2).reshape(batch, rows, -1))

    def _attend(self, query: Tensor, key: Tensor, value: Tensor, seen: Tensor, layer: int) -> Tensor:
        spec, scale = self.spec, self.spec.query_scale(layer)
        group = spec.num_heads // spec.num_kv_heads
        key, value = key.repeat_interleave(group, dim=1), value.repeat_interleave(group, dim=1)
        if not spec.attention_softcap:
            return F.scaled_dot_product_attention(query, key, value, attn_mask=seen, scale=scale)
        scores = torch.tanh(query @ key.transpose(2, 3) * scale / spec.attention_softcap) * spec.attention_softcap
        return scores.masked_fill(~seen, -torch.inf).softmax(dim=-1) @ value

    def _rotate(self, x: Tensor, rotation: str) -> Tensor:
        cos, sin = (self.get_buffer(f"{kind}_{rotation}")[: x.shape[2]] for kind in ("cos", "sin"))
        size = cos.shape[1]
        first, second, rest = x[..., :size], x[..., size : 2 * size], x[..., 2 * size :]
        return torch.cat([first * cos - second * sin, second * cos + first * sin, rest], dim=-1).to(x.dtype)

    def _mlp(self, layer: int, x: Tensor) -> Tensor:
        first, *rest = self._projections(self.spec.mlp_inputs, layer, x)
        hidden = self._activated(first)
        return self._linear("down", layer, hidden * rest[0] if rest else hidden)

    def _activated(self, x: Tensor) -> Tensor:
        name = self.spec.activation
        if name in ("gelu", "gelu_tanh"):
            return F.gelu(x, approximate="tanh" if name == "gelu_tanh" else "none")
        return F.silu(x) if name == "silu" else F.relu(x)
