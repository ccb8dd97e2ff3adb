"""The decoder's mathematics, once, for every family and both lowerings: ``DecoderSpec`` -> ONNX graph.

The graph contract, the same for prefill, verify and plain decoding (they differ only in the number of rows R):

  inputs   input_ids      int64 [B, R]
           cache_lengths  int32 [B]      tokens already in the cache; a smaller value than before is a rollback
           logit_rows     int64 [B, N]   rows whose logits are wanted: a prefill wants only its last
           spare_rows     int64 [1]      fused fp32 and quantized graphs only: 1 where a one-row pass must have the bits
                                         of a wider one, else 0
           rows           int32 [1]      fused fp16 graphs only: R
           past_key.i, past_value.i      [B, H_kv, capacity, D]
  outputs  logits         float32 [B, N, V]
           present_key.i, present_value.i   to be bound to the memory of the pasts
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import chain
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray

from outrider.engines.errors import OutriderError
from outrider.export.attention import FusedLowering, Lowering, NormWeights, PackedLowering, StandardLowering
from outrider.export.checkpoint import Checkpoint, Quantized, finite, read_all
from outrider.export.experts import Experts
from outrider.export.graph import GraphBuilder
from outrider.export.matrices import Matrix, Storage, Table, store_matrix, store_table
from outrider.export.precision import BITS, PRECISIONS_OF, Formats, check_beside, embeds_apart, float_type
from outrider.export.quantize import BLOCK_SIZE
from outrider.export.spec import NO_TOKEN, DecoderSpec
from outrider.export.takeover import Slab, common_layout, common_order, floats, matrix_slabs, taken_over
from outrider.export.weights import Weights

Progress = Callable[[str], None]


def build_decoder(
    spec: DecoderSpec,
    checkpoint: Checkpoint,
    weights: Weights,
    formats: Formats,
    *,
    capacity: int,
    packed: bool = False,
    progress: Progress = lambda stage: None,
) -> onnx.ModelProto:
    """Put the weights into ``weights`` and return the graph that refers to them.

    Args:
        spec: its ``vocab_size`` may be smaller than the checkpoint's, whose further rows are cut off.
        capacity: cache positions a sequence.
        packed: for many sequences at once; see ``PackedLowering``.
        progress: called with the name of each part when it is written (embedding, each layer, head).

    Raises:
        OutriderError: a lowering that cannot express the precision, or a size that its operators do not take.
    """
    lowering, precision = formats.lowering, formats.precision
    if precision not in PRECISIONS_OF[lowering]:
        others, last = PRECISIONS_OF[lowering][:-1], PRECISIONS_OF[lowering][-1]
        raise OutriderError(f"--lowering {lowering} has no {precision}; use {', '.join(others)} or {last}")
    check_beside("--head-precision", lowering, precision, formats.head)
    for other in formats.tensors.values():
        check_beside("--tensor-precision", lowering, precision, other)
    for name in formats.precisions:
        if name in BITS:
            _check_blocks(spec, checkpoint, lowering, name)
    if lowering == "fused" and spec.head_dim % FusedLowering.head_dim_multiple:
        raise OutriderError(
            f"{checkpoint.path}: head_dim is {spec.head_dim}, and --lowering fused needs a multiple of "
            f"{FusedLowering.head_dim_multiple}; use --lowering standard"
        )
    pairs = {len(table) for table in spec.rotations.values()}
    if lowering == "fused" and any(count % FusedLowering.rotary_multiple for count in pairs):
        raise OutriderError(
            f"{checkpoint.path}: {min(pairs)} pairs of a head rotate, and --lowering fused needs a multiple of "
            f"{FusedLowering.rotary_multiple} pairs; use --lowering standard"
        )
    graph = GraphBuilder(weights, np.dtype(float_type(lowering, precision)))
    lowered: Lowering
    if packed:
        assert can_pack(formats), formats
        lowered = PackedLowering(graph, spec, capacity)
    elif lowering == "fused":
        # fp16 is for GPUs: their attention kernel has no ragged form yet, and fixed plans settle the rows there.
        lowered = FusedLowering(graph, spec, capacity, exact_rows=precision != "fp16")
    else:
        lowered = StandardLowering(graph, spec, capacity)
    return _Decoder(graph, spec, checkpoint, lowered, formats, capacity, progress).build()


def can_pack(formats: Formats) -> bool:
    """Whether there is a graph for many sequences at once: where attention takes as many rows of each as it has."""
    return formats.lowering == "fused" and formats.precision != "fp16"


def _check_blocks(spec: DecoderSpec, checkpoint: Checkpoint, lowering: str, precision: str) -> None:
    """Raises OutriderError when the inputs of a matrix cannot be cut into blocks."""
    widths = {"hidden_size": spec.hidden_size}
    if lowering == "standard":  # the fused operators pad the last block; those of experts do not
        widths |= {"heads * head_dim": spec.num_heads * spec.head_dim, "intermediate_size": spec.intermediate_size}
    if spec.num_experts:
        widths["the size of an expert"] = spec.expert_size
    for name, width in widths.items():
        if width % BLOCK_SIZE:
            raise OutriderError(
                f"{checkpoint.path}: {name} is {width}, and {precision} needs a multiple of {BLOCK_SIZE}; "
                "use fp32 or fp16"
            )


@dataclass(frozen=True)
class _Decoder:
    graph: GraphBuilder
    spec: DecoderSpec
    checkpoint: Checkpoint
    lowering: Lowering
    formats: Formats
    capacity: int
    progress: Progress

    def build(self) -> onnx.ModelProto:
        graph, spec, lower = self.graph, self.spec, self.lowering
        self._declare()
        lower.begin()
        embedding = self._embedding()
        residual = self._scaled(embedding.gather("input_ids", "embedded"), spec.embedding_scale)
        if spec.position_table:
            residual = graph.node("Add", [residual, self._learned_positions(spec.position_table)], "positioned")
        self.progress("embedding")
        x = self._norm(residual, "attention_norm", 0)
        for layer in range(spec.num_layers):
            attended = self._norm(self._attention_block(x, layer), "attention_post_norm", layer)
            attended = self._scaled(attended, spec.residual_scale)
            if spec.parallel:
                x = self._norm(residual, "mlp_norm", layer) if spec.has("mlp_norm") else x
            else:
                x, residual = self._add_norm(attended, residual, "mlp_norm", layer)
            x = self._norm(self._mlp_block(x, layer), "mlp_post_norm", layer)
            x = self._scaled(x, spec.residual_scale)
            if spec.parallel:
                x = graph.node("Add", [attended, x], self._name(layer, "both"))
            if layer + 1 < spec.num_layers:
                x, residual = self._add_norm(x, residual, "attention_norm", layer + 1)
            self.progress(f"layer {layer}")
        # Only the wanted rows go on: the head is the largest matrix, and a prefill needs one row of it.
        hidden = graph.node("Add", [x, residual], "hidden")
        rows = graph.node("Unsqueeze", ["logit_rows", graph.constant("minus_one", [-1])], "logit_rows.index")
        wanted = graph.node("GatherND", [hidden, rows], "hidden.wanted", batch_dims=1)
        normed = lower.norm(wanted, self._norm_weights(spec.final_norm), "final_norm")
        apart = embeds_apart(lower.name, self.formats.head)
        head = embedding if spec.tied and not apart else self._head()
        self._logits(head, normed)
        self.progress("head")
        return graph.model(spec.architecture, lower.opset)

    def _logits(self, head: Matrix, normed: str) -> None:
        """float32, scaled and capped."""
        graph, spec = self.graph, self.spec
        steps: list[Callable[[str, str], str]] = []
        if graph.float_dtype != np.float32:
            steps.append(lambda x, name: graph.node("Cast", [x], name, to=int(onnx.TensorProto.FLOAT)))
        if spec.logit_scale != 1:
            scale = graph.constant("logit_scale", spec.logit_scale, np.float32)
            steps.append(lambda x, name: graph.node("Mul", [x, scale], name))
        if spec.logit_softcap:
            cap = graph.constant("logit_softcap", spec.logit_softcap, np.float32)
            steps.append(lambda x, name: graph.node("Div", [x, cap], name))
            steps.append(lambda x, name: graph.node("Tanh", [x], name))
            steps.append(lambda x, name: graph.node("Mul", [x, cap], name))
        if spec.draft_vocab is not None:
            steps.append(self._whole_vocabulary)
        names = [*(f"head.{index}" for index in range(len(steps))), "logits"]
        x = head.matmul(normed, names[0])
        for step, name in zip(steps, names[1:], strict=True):
            x = step(x, name)

    def _whole_vocabulary(self, x: str, name: str) -> str:
        """Logits of all tokens, from those of the reduced head's."""
        graph, spec = self.graph, self.spec
        assert spec.draft_vocab is not None
        if self.lowering.name == "standard" or graph.float_dtype != np.float32:
            # For a GPU: no shapes are read. On the CPU a Gather of single numbers takes seven times as long.
            row_of = np.full(spec.vocab_size, spec.head_size)
            row_of[spec.draft_vocab] = np.arange(spec.head_size)
            behind = graph.constant("head.behind", [0, 0, 0, 0, 0, 1])
            nothing = graph.constant("no_token", NO_TOKEN, np.float32)
            padded = graph.node("Pad", [x, behind, nothing], "head.padded")
            return graph.node(
                "Gather", [padded, graph.weight("head.row_of", np.int64, row_of.shape, [row_of])], name, axis=2
            )
        size = graph.constant("vocab_size", [spec.vocab_size])
        shape = graph.node("Concat", [graph.node("Shape", [x], "head.rows", end=2), size], "head.shape", axis=0)
        nothing = graph.node("Expand", [graph.constant("no_token", [NO_TOKEN], np.float32), shape], "head.nothing")
        ids = graph.weight("draft_vocab", np.int64, (1, 1, spec.head_size), [spec.draft_vocab[None, None]])
        ids = graph.node("Expand", [ids, graph.node("Shape", [x], "head.reduced")], "head.ids")
        return graph.node("ScatterElements", [nothing, ids, x], name, axis=2)

    def _declare(self) -> None:
        graph, spec = self.graph, self.spec
        graph.input("input_ids", np.int64, ["batch", "rows"])
        graph.input("logit_rows", np.int64, ["batch", "logit_rows"])
        graph.output("logits", np.float32, ["batch", "logit_rows", spec.vocab_size])
        shape: list[int | str] = [self.lowering.sequences, spec.num_kv_heads, self.capacity, spec.head_dim]
        for layer in range(spec.num_layers):
            for kind in ("key", "value"):
                graph.input(f"past_{kind}.{layer}", graph.float_dtype, shape)
                graph.output(f"present_{kind}.{layer}", graph.float_dtype, shape)

    def _attention_block(self, x: str, layer: int) -> str:
        name = self._name(layer, "attention")
        qkv = self._linear(x, self.spec.stacked("q", "k", "v"), layer, f"{name}.qkv")
        if self.spec.has("q_norm"):
            qkv = self._query_key_norms(qkv, layer, name)
        return self._linear(self.lowering.attention(qkv, layer, name), ("o",), layer, f"{name}.output")

    def _query_key_norms(self, qkv: str, layer: int, name: str) -> str:
        """Norms of query and key, over each head or all of them (arXiv 2302.05442)."""
        graph, spec = self.graph, self.spec
        parts = [f"{name}.query_part", f"{name}.key_part", f"{name}.value_part"]
        sizes = [spec.linear_shape(role)[0] for role in ("q", "k", "v")]
        graph.nodes("Split", [qkv, graph.constant("qkv_parts", sizes)], parts, axis=2)
        for index, role in enumerate(("q_norm", "k_norm")):
            x, weights = parts[index], self._norm_weights(spec.stem(role, layer))
            if not spec.wide_qk_norm:
                heads = graph.constant(f"{role}.heads", [0, 0, -1, spec.head_dim])
                x = graph.node("Reshape", [x, heads], f"{x}.heads")
            x = self.lowering.norm(x, weights, f"{name}.{role}")
            if not spec.wide_qk_norm:
                x = graph.node("Reshape", [x, graph.constant("merged", [0, 0, -1])], f"{x}.merged")
            parts[index] = x
        return graph.node("Concat", parts, f"{name}.normed", axis=2)

    def _mlp_block(self, x: str, layer: int) -> str:
        """Gated, as SwiGLU (arXiv 2002.05202), gate and up in one product; or with one projection in."""
        graph, name, roles = self.graph, self._name(layer, "mlp"), self.spec.mlp_inputs
        if self.spec.routed(layer):
            experts = Experts(graph, self.spec, self.checkpoint, self.lowering, self.formats.precision, layer, name)
            return experts.mlp(x)
        if len(roles) == 1:
            hidden = self._linear(x, roles, layer, f"{name}.up")
            activated = self.lowering.activation(hidden, self.spec.activation, f"{name}.activated")
            return self._linear(activated, ("down",), layer, f"{name}.output")
        both = self._linear(x, self.spec.stacked(*roles), layer, f"{name}.gate_up")
        halves = [f"{name}.gate", f"{name}.up"]
        graph.nodes("Split", [both], halves, axis=-1, num_outputs=2)
        activated = self.lowering.activation(halves[0], self.spec.activation, f"{name}.activated")
        gated = graph.node("Mul", [activated, halves[1]], f"{name}.gated")
        return self._linear(gated, ("down",), layer, f"{name}.output")

    def _add_norm(self, x: str, residual: str, role: str, layer: int) -> tuple[str, str]:
        """``(norm(x + residual), x + residual)``; without the norm where the role has none."""
        name = self._name(layer, role)
        if not self.spec.has(role):
            total = self.graph.node("Add", [x, residual], f"{name}.sum")
            return total, total
        return self.lowering.add_norm(x, residual, self._norm_weights(self.spec.stem(role, layer)), name)

    def _norm(self, x: str, role: str, layer: int) -> str:
        """``x`` itself where the role has no norm."""
        if not self.spec.has(role):
            return x
        return self.lowering.norm(x, self._norm_weights(self.spec.stem(role, layer)), self._name(layer, role))

    def _name(self, layer: int, part: str) -> str:
        return f"layer.{self.spec.number(layer)}.{part}"

    def _norm_weights(self, stem: str) -> NormWeights:
        values = read_all(self.checkpoint, f"{stem}.weight") + np.float32(self.spec.norm_offset)
        weight = self._store_vector(f"{stem}.weight", values)
        if self.checkpoint.shape(f"{stem}.bias") is None:
            return NormWeights(weight)
        return NormWeights(weight, self._store_vector(f"{stem}.bias", read_all(self.checkpoint, f"{stem}.bias")))

    def _scaled(self, x: str, scale: float) -> str:
        if scale == 1:
            return x
        factor = self.graph.constant(f"scale.{scale!r}", scale, self.graph.float_dtype)
        return self.graph.node("Mul", [x, factor], f"{x}.scaled")

    def _linear(self, x: str, roles: tuple[str, ...], layer: int, name: str) -> str:
        """The projections of ``roles`` as one product, their rows stacked."""
        stems = [self.spec.stem(role, layer) for role in roles]
        shapes = [self.spec.linear_shape(role) for role in roles]
        outputs, inputs = sum(shape[0] for shape in shapes), shapes[0][1]
        how = (self.lowering.name, self.formats.of(stems[0]))
        own = [taken_over(self.checkpoint, f"{stem}.weight", *how) for stem in stems]
        same, order = common_order(own)
        if not same:
            parts = [self._linear(x, (role,), layer, f"{name}.{role}") for role in roles]
            return self.graph.node("Concat", parts, name, axis=2)
        slabs = chain.from_iterable(
            self._rows(role, f"{stem}.weight", shape[0], part)
            for role, stem, shape, part in zip(roles, stems, shapes, own, strict=True)
        )
        storage = Storage(*how, common_layout(own, how[1]))
        matrix = store_matrix(self.graph, f"{name}.weight", (outputs, inputs), slabs, storage, order)
        return matrix.matmul(x, name, self._bias(roles, stems, shapes, name))

    def _rows(self, role: str, name: str, rows: int, own: Quantized | None = None) -> Iterator[Slab]:
        return matrix_slabs(self.checkpoint, name, rows, self.spec.row_order(role), own)

    def _bias(self, roles: tuple[str, ...], stems: list[str], shapes: list[tuple[int, int]], name: str) -> str | None:
        has = [self.checkpoint.shape(f"{stem}.bias") is not None for stem in stems]
        if not any(has):
            return None
        parts = [
            np.concatenate(list(floats(self._rows(role, f"{stem}.bias", shape[0]))))
            if there
            else np.zeros(shape[0], np.float32)
            for role, stem, shape, there in zip(roles, stems, shapes, has, strict=True)
        ]
        return self._store_vector(f"{name}.bias", np.concatenate(parts))

    def _embedding(self) -> Table:
        rounded = not embeds_apart(self.lowering.name, self.formats.head)
        *what, order = self._vocab_matrix(self.spec.embedding, rounded)
        if order is not None:
            raise OutriderError(
                f"{self.checkpoint.path}: {self.spec.embedding} is an embedding with act-order, whose rows cannot be "
                "looked up; use --head-precision fp32"
            )
        return store_table(self.graph, *what)

    def _learned_positions(self, stem: str) -> str:
        """Rows of the table for the rows of the pass.

        The table has a row for each position that the cache has: zeros stand where the padding of a pass may reach
        behind the last position, as its rows are read by nobody.
        """
        graph, spec = self.graph, self.spec
        known = min(self.capacity, spec.max_positions)

        def slabs() -> Iterator[NDArray[np.float32]]:
            rows = self.checkpoint.read(f"{stem}.weight", spec.first_position, spec.first_position + known)
            yield finite(self.checkpoint, f"{stem}.weight", rows)
            yield np.zeros((self.capacity - known, spec.hidden_size), np.float32)

        weight = graph.weight(f"{stem}.weight", graph.float_dtype, (self.capacity, spec.hidden_size), slabs())
        return graph.node("Gather", [weight, self.lowering.positions()], "position_rows", axis=0)

    def _head(self) -> Matrix:
        return store_matrix(self.graph, *self._vocab_matrix(self.spec.head, rounded=True))

    def _vocab_matrix(self, stem: str, rounded: bool) -> tuple[Any, ...]:
        rows = self.spec.head_size if stem == self.spec.head else self.spec.vocab_size
        name, shape = f"{stem}.weight", (rows, self.spec.hidden_size)
        how = (self.lowering.name, self.formats.head)
        own = taken_over(self.checkpoint, name, *how) if rounded else None
        slabs = matrix_slabs(self.checkpoint, name, shape[0], None, own)
        return name, shape, slabs, Storage(*how, common_layout([own], how[1])), own.input_order if own else None

    def _store_vector(self, name: str, values: NDArray[np.float32]) -> str:
        return self.graph.weight(name, self.graph.float_dtype, values.shape, [values])
