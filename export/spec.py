"""What a decoder-only transformer looks like, said once: for the graph, the reference and the shape checks."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from outrider.engines.errors import OutriderError
from outrider.export.checkpoint import Checkpoint


@dataclass(frozen=True)
class DecoderSpec:
    """A pre-norm decoder with rotary positions, grouped-query attention and a gated MLP.

    ``inv_freq`` is float64 ``[head_dim / 2]``, the rotation of each pair per position, scaling included (radians).
    ``layer_names`` gives for each role the tensor name without ``.weight`` / ``.bias``, with ``{}`` for the layer.
    ``head`` equals ``embedding`` when they are tied. Biases are used where the checkpoint has them.
    """

    architecture: str
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    norm_epsilon: float
    max_positions: int
    inv_freq: NDArray[np.float64]
    embedding: str
    final_norm: str
    head: str
    layer_names: dict[str, str]

    def __post_init__(self) -> None:
        sizes = "hidden_size intermediate_size num_layers num_heads num_kv_heads head_dim vocab_size max_positions"
        for name in sizes.split():
            size = getattr(self, name)
            if not isinstance(size, int) or size < 1:
                raise OutriderError(f"{name} is {size!r}, not a whole number from 1 up")
        if self.num_heads % self.num_kv_heads:
            raise OutriderError(f"{self.num_heads} heads cannot share {self.num_kv_heads} key-value heads evenly")
        if self.head_dim % 2:
            raise OutriderError(f"head_dim is {self.head_dim}, and rotary positions need pairs of dimensions")
        if not isinstance(self.norm_epsilon, (int, float)):
            raise OutriderError(f"norm_epsilon is {self.norm_epsilon!r}, not a number")

    @property
    def tied(self) -> bool:
        return self.head == self.embedding

    def stem(self, role: str, layer: int) -> str:
        return self.layer_names[role].format(layer)

    def linear_shape(self, role: str) -> tuple[int, int]:
        """``(outputs, inputs)`` of a projection."""
        heads, kv_heads = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        return {
            "q": (heads, self.hidden_size),
            "k": (kv_heads, self.hidden_size),
            "v": (kv_heads, self.hidden_size),
            "o": (self.hidden_size, heads),
            "gate": (self.intermediate_size, self.hidden_size),
            "up": (self.intermediate_size, self.hidden_size),
            "down": (self.hidden_size, self.intermediate_size),
        }[role]

    def expected_shapes(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        """Every tensor that must be there, with its shape."""
        yield f"{self.embedding}.weight", (self.vocab_size, self.hidden_size)
        for layer in range(self.num_layers):
            for role in self.layer_names:
                norm = role.endswith("norm")
                shape = (self.hidden_size,) if norm else self.linear_shape(role)
                yield f"{self.stem(role, layer)}.weight", shape
        yield f"{self.final_norm}.weight", (self.hidden_size,)
        if not self.tied:
            yield f"{self.head}.weight", (self.vocab_size, self.hidden_size)


def check_shapes(spec: DecoderSpec, checkpoint: Checkpoint) -> None:
    """Raises OutriderError naming the first tensor that is missing or has another shape than the config says."""
    for name, expected in spec.expected_shapes():
        shape = checkpoint.shape(name)
        if shape is None:
            raise OutriderError(f"{checkpoint.path} has no tensor {name}, which a {spec.architecture} model needs")
        if shape != expected:
            raise OutriderError(
                f"{checkpoint.path}: tensor {name} has shape {list(shape)}, its config asks for {list(expected)}"
            )
