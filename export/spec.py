"""What a decoder-only transformer looks like, said once: for the graph, the reference and the shape checks."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from outrider.engines.errors import OutriderError
from outrider.export.checkpoint import Checkpoint

_OF_EXPERTS = ("router", "expert_gate", "expert_up", "expert_down")
_OF_MLP = ("gate", "up", "gate_up", "down")
NO_TOKEN = -1e30  # a logit whose probability is 0 at any temperature, and yet a number
ACTIVATIONS = ("silu", "gelu", "gelu_tanh", "relu")


@dataclass(frozen=True)
class DecoderSpec:
    """A decoder with rotary or learned positions and grouped-query attention.

    ``inv_freq`` is float64 ``[n]``, the rotation of each of the first n pairs of a head per position, scaling included
    (radians), and ``rotary_scale`` what cos and sin are multiplied by; ``local_inv_freq`` is that of layers with a
    window, where it is another, and ``long_inv_freq`` that of sequences longer than ``short_positions``, where there
    are such (``for_length``). ``windows`` has for each layer how many positions it sees, its own included, 0 for all,
    and is empty where all see all; ``unrotated`` are layers without positions. With ``position_table`` no layer
    rotates: what is added to the embedding of position p is row ``first_position`` + p of that tensor, which has
    ``max_positions`` of them.

    ``layer_names`` gives for each role the tensor name without ``.weight`` / ``.bias``, with ``{}`` for the layer and a
    second one for the expert. Norms that have no name are not there; ``qkv`` and ``gate_up`` are projections in one
    tensor, stacked in that order.
    ``head`` equals ``embedding`` when they are tied. ``draft_vocab`` int64 [n], rising, are the tokens that the rows of
    a reduced head stand for, where it is one (FR-Spec, arXiv 2502.14856): all others get the logit ``NO_TOKEN``.
    Biases are used where the checkpoint has them.

    ``norm`` is ``rms`` or ``layer``; weights of norms are ``norm_offset`` + what is stored; a query or key norm is over
    each head, or with ``wide_qk_norm`` over all of them. An MLP without a ``gate`` is not gated. With ``parallel`` it
    reads what attention reads, through its own norm where there is one. Softcaps are c in c * tanh(x / c), 0 for none.

    With ``num_experts`` the MLP of a layer, but of ``dense_layers``, is the sum of the ``experts_per_token`` experts of
    ``expert_size`` hidden units that its router finds most probable, weighted by their probabilities; with
    ``normalized_routing`` these are scaled to a sum of 1.
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
    draft_vocab: NDArray[np.int64] | None = None
    layers: tuple[int, ...] = ()  # which of the checkpoint's, in this order; empty for all
    rotary_scale: float = 1.0
    local_inv_freq: NDArray[np.float64] | None = None
    long_inv_freq: NDArray[np.float64] | None = None
    short_positions: int | None = None
    windows: tuple[int, ...] = ()
    unrotated: frozenset[int] = frozenset()
    position_table: str | None = None
    first_position: int = 0
    wide_qk_norm: bool = False
    interleaved: bool = False  # a head's pairs lie side by side in the tensors, not half a head apart
    qkv_by_head: bool = False  # rows of ``qkv``: queries, key and value of key-value head 0, those of head 1, ...
    norm: str = "rms"
    norm_offset: float = 0.0
    parallel: bool = False
    num_experts: int = 0
    experts_per_token: int = 0
    expert_size: int = 0
    normalized_routing: bool = True
    dense_layers: frozenset[int] = frozenset()
    activation: str = "silu"
    attention_scale: float | None = None  # of query times key; 1 / sqrt(head_dim) by default
    scale_by_layer: bool = False  # divides it by the layer's number, counted from 1
    attention_softcap: float = 0.0
    logit_softcap: float = 0.0
    embedding_scale: float = 1.0
    residual_scale: float = 1.0
    logit_scale: float = 1.0

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
        if self.activation not in ACTIVATIONS:
            raise OutriderError(
                f"activation {self.activation!r} is not implemented; implemented are {', '.join(ACTIVATIONS)}"
            )
        if self.num_experts:
            self._check_experts()
        if self.windows and len(self.windows) != self.num_layers:
            raise OutriderError(f"there are {self.num_layers} layers, and windows for {len(self.windows)}")
        scales = "norm_epsilon norm_offset attention_softcap logit_softcap embedding_scale residual_scale logit_scale"
        for name in (*scales.split(), *(["attention_scale"] if self.attention_scale is not None else [])):
            if not isinstance(getattr(self, name), (int, float)):
                raise OutriderError(f"{name} is {getattr(self, name)!r}, not a number")

    def _check_experts(self) -> None:
        for name in ("num_experts", "experts_per_token", "expert_size"):
            size = getattr(self, name)
            if not isinstance(size, int) or size < 1:
                raise OutriderError(f"{name} is {size!r}, not a whole number from 1 up")
        if self.experts_per_token > self.num_experts:
            raise OutriderError(f"each token takes {self.experts_per_token} experts, and there are {self.num_experts}")
        if self.activation != "silu":
            raise OutriderError(f"activation {self.activation!r} is not implemented for experts; implemented is silu")

    def for_length(self, length: int) -> DecoderSpec:
        """The decoder of sequences of up to ``length`` tokens: LongRoPE has other rotations for long ones.

        Keys in the cache keep the rotation that they were written with, so that an engine has one for all lengths.
        """
        if self.short_positions is None or min(length, self.max_positions) <= self.short_positions:
            return self
        assert self.long_inv_freq is not None
        return replace(self, inv_freq=self.long_inv_freq)

    @property
    def tied(self) -> bool:
        return self.head == self.embedding

    @property
    def head_size(self) -> int:
        """Rows of the head."""
        return self.vocab_size if self.draft_vocab is None else len(self.draft_vocab)

    def query_scale(self, layer: int) -> float:
        scale = self.head_dim**-0.5 if self.attention_scale is None else self.attention_scale
        return scale / (self.number(layer) + 1) if self.scale_by_layer else scale

    def window(self, layer: int) -> int:
        """Positions that a layer sees, its own included; 0 for all."""
        return self.windows[layer] if self.windows else 0

    def rotation(self, layer: int) -> str | None:
        """Which rotary table a layer uses: ``rotary`` or ``local_rotary``; None for no positions."""
        if layer in self.unrotated or self.position_table:
            return None
        return "local_rotary" if self.local_inv_freq is not None and self.window(layer) else "rotary"

    @property
    def rotations(self) -> dict[str, NDArray[np.float64]]:
        """The rotary tables that some layer uses."""
        used = {self.rotation(layer) for layer in range(self.num_layers)}
        tables = {"rotary": self.inv_freq, "local_rotary": self.local_inv_freq}
        return {name: table for name, table in tables.items() if name in used and table is not None}

    def number(self, layer: int) -> int:
        """What the checkpoint counts a layer as."""
        return self.layers[layer] if self.layers else layer

    def of_layers(self, layers: tuple[int, ...]) -> DecoderSpec:
        """The model of some of the layers, in the order given: the rest is left out between embedding and head."""
        return replace(
            self,
            num_layers=len(layers),
            layers=tuple(self.number(layer) for layer in layers),
            windows=tuple(self.window(layer) for layer in layers) if self.windows else (),
            unrotated=frozenset(index for index, layer in enumerate(layers) if layer in self.unrotated),
            dense_layers=frozenset(index for index, layer in enumerate(layers) if layer in self.dense_layers),
        )

    def has(self, role: str) -> bool:
        return role in self.layer_names

    @property
    def mlp_inputs(self) -> tuple[str, ...]:
        """The roles of the first projections of the MLP."""
        return ("gate", "up") if self.has("gate") or self.has("gate_up") else ("up",)

    def routed(self, layer: int) -> bool:
        """Whether a layer has experts."""
        return self.num_experts > 0 and layer not in self.dense_layers

    def stem(self, role: str, layer: int, expert: int = 0) -> str:
        return self.layer_names[role].format(self.number(layer), expert)

    def stacked(self, *roles: str) -> tuple[str, ...]:
        """``roles``, or the one role of the tensor that holds all of them."""
        packed = {("q", "k", "v"): "qkv", ("gate", "up"): "gate_up"}.get(roles)
        return (packed,) if packed and self.has(packed) else roles

    def linear_shape(self, role: str) -> tuple[int, int]:
        """``(outputs, inputs)`` of a projection."""
        heads, kv_heads = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        return {
            "q": (heads, self.hidden_size),
            "k": (kv_heads, self.hidden_size),
            "v": (kv_heads, self.hidden_size),
            "qkv": (heads + 2 * kv_heads, self.hidden_size),
            "o": (self.hidden_size, heads),
            "gate": (self.intermediate_size, self.hidden_size),
            "up": (self.intermediate_size, self.hidden_size),
            "gate_up": (2 * self.intermediate_size, self.hidden_size),
            "down": (self.hidden_size, self.intermediate_size),
            "router": (self.num_experts, self.hidden_size),
            "expert_gate": (self.expert_size, self.hidden_size),
            "expert_up": (self.expert_size, self.hidden_size),
            "expert_down": (self.hidden_size, self.expert_size),
        }[role]

    def row_order(self, role: str) -> NDArray[np.int64] | None:
        """Where the rows of a projection lie in its tensor; None for in order."""
        if role in ("q", "k") and self.interleaved:
            pairs = np.arange(self.linear_shape(role)[0]).reshape(-1, self.head_dim // 2, 2)
            return np.asarray(pairs.swapaxes(1, 2).reshape(-1), np.int64)
        if role != "qkv" or not self.qkv_by_head:
            return None
        rows = np.arange(self.linear_shape(role)[0]).reshape(self.num_kv_heads, -1, self.head_dim)
        return np.concatenate([part.reshape(-1) for part in (rows[:, :-2], rows[:, -2], rows[:, -1])])

    def norm_size(self, role: str) -> int:
        if role not in ("q_norm", "k_norm"):
            return self.hidden_size
        heads = self.num_heads if role == "q_norm" else self.num_kv_heads
        return self.head_dim * (heads if self.wide_qk_norm else 1)

    def expected_shapes(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        """Every tensor that must be there, with its shape."""
        yield f"{self.embedding}.weight", (self.vocab_size, self.hidden_size)
        if self.position_table:
            yield f"{self.position_table}.weight", (self.first_position + self.max_positions, self.hidden_size)
        for layer in range(self.num_layers):
            for role in self.layer_names:
                if role in (_OF_MLP if self.routed(layer) else _OF_EXPERTS):
                    continue
                shape = (self.norm_size(role),) if role.endswith("norm") else self.linear_shape(role)
                for name in self._tensors(role, layer):
                    yield name, shape
        yield f"{self.final_norm}.weight", (self.hidden_size,)
        if not self.tied:
            yield f"{self.head}.weight", (self.head_size, self.hidden_size)

    def expert_tensors(self) -> Iterator[str]:
        """Those of routers and experts."""
        for layer in filter(self.routed, range(self.num_layers)):
            for role in _OF_EXPERTS:
                yield from self._tensors(role, layer)

    def _tensors(self, role: str, layer: int) -> Iterator[str]:
        for expert in range(self.num_experts if role.startswith("expert") else 1):
            yield f"{self.stem(role, layer, expert)}.weight"


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
