"""The two lowerings of a decoder: the same mathematics in ONNX Runtime's fused operators or in standard ones.

``fused``: com.microsoft operators, for ONNX Runtime on CPU and CUDA; attention costs by the length in use.
``standard``: ONNX opset 24 (RMSNormalization, RotaryEmbedding, TensorScatter, Attention), for TensorRT and as the
portable form; attention costs by the capacity.
``PackedLowering`` is ``fused`` for many sequences at once, on the CPU: the rows of a pass stand one behind the other,
as many of each sequence as it has, and only attention sorts them by sequence.

Both take the inputs of the graph contract (``decoder.py``) and update the caches in place when past and present are
bound to the same memory.
"""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol

import numpy as np

from outrider.engines.engine import SHORT_CONTEXT, SUMMED_AT_ONCE
from outrider.export.graph import CONTRIB, GraphBuilder
from outrider.export.spec import DecoderSpec

LOWERINGS = ("fused", "standard")


class NormWeights(NamedTuple):
    """Names of a norm's tensors; ``bias`` is None where it has none."""

    weight: str
    bias: str | None = None

    @property
    def inputs(self) -> list[str]:
        return [self.weight] if self.bias is None else [self.weight, self.bias]


class Lowering(Protocol):
    name: str
    opset: int
    sequences: str  # the caches' first axis: that of the rows, or one of its own

    def begin(self) -> None:
        """Declare inputs of its own, and compute what all layers share: rotary tables, positions, masks."""
        ...

    def positions(self) -> str:
        """int64 ``[B, R]``: the position of each row of the pass in its sequence."""
        ...

    def norm(self, x: str, weights: NormWeights, name: str) -> str:
        """Root mean square (arXiv 1910.07467) or layer normalization (arXiv 1607.06450) over the last axis."""
        ...

    def add_norm(self, x: str, residual: str, weights: NormWeights, name: str) -> tuple[str, str]:
        """``(norm(x + residual), x + residual)``."""
        ...

    def activation(self, x: str, kind: str, name: str) -> str:
        """One of ``spec.ACTIVATIONS``."""
        ...

    def attention(self, qkv: str, layer: int, name: str) -> str:
        """Causal attention of packed ``[B, R, (H + 2 H_kv) D]`` over the cache and itself -> ``[B, R, H D]``."""
        ...


class FusedLowering:
    """Args: ``exact_rows`` gives attention as many zero rows more as ``spare_rows`` says, or wide heads need.

    On the CPU a single row takes a kernel of its own, whose bits differ from a row's among many; with a spare row
    beside it, it takes the many-row kernel. There, too, each sequence of a batch has its own number of rows.
    """

    name = "fused"
    sequences = "batch"
    head_dim_multiple = 16  # of the CPU kernel with rotary positions
    rotary_multiple = 8  # of the pairs that it rotates

    def __init__(self, graph: GraphBuilder, spec: DecoderSpec, capacity: int, *, exact_rows: bool) -> None:
        self._graph = graph
        self._spec = spec
        self._capacity = capacity
        self._exact_rows = exact_rows
        # CUDA's kernels of Equal, ReduceMax and ReduceMin are registered for no later opset in every release, and one
        # node without a kernel makes a graph that cannot be captured.
        self.opset = 21 if exact_rows else 18

    def begin(self) -> None:
        graph = self._graph
        graph.input("cache_lengths", np.int32, ["batch"])
        _rotary_tables(graph, self._spec, self._capacity)
        # The length that bounds the kernel's loops is cache_last; the total is only an upper bound, so it is fixed.
        graph.constant("cache_capacity", self._capacity, np.int32)
        rows = self._attention_rows()
        end = graph.node("Add", ["cache_lengths", rows], "cache_end")
        graph.node("Sub", [end, graph.constant("one.int32", [1], np.int32)], "cache_last")

    def _attention_rows(self) -> str:
        """The number of rows in attention, int32 [1]; with ``exact_rows`` also ``spare`` and ``query_rows``.

        What spare rows hold does not matter: no row depends on another, and the next pass overwrites their cache.
        """
        graph = self._graph
        if not self._exact_rows:  # an input, since shapes live on the host and a captured graph must not copy
            return graph.input("rows", np.int32, [1])
        rows = graph.node("Shape", ["input_ids"], "rows.shape", start=1, end=2)
        rows = graph.node("Cast", [rows], "rows", to=_onnx_type(np.int32))
        spare = graph.input("spare_rows", np.int64, [1])
        if self._spec.head_dim > SUMMED_AT_ONCE:
            spare = self._spare_up_to(rows, SHORT_CONTEXT)
        width = (self._spec.num_heads + 2 * self._spec.num_kv_heads) * self._spec.head_dim
        zero = graph.constant("spare.zero", np.zeros((1, 1, width)), graph.float_dtype)
        batch = graph.node("Shape", ["input_ids"], "batch.shape", start=0, end=1)
        shape = graph.node("Concat", [batch, spare, graph.constant("one", [1])], "spare.shape", axis=0)
        graph.node("Expand", [zero, shape], "spare")
        count = graph.node("Cast", [spare], "spare.count", to=_onnx_type(np.int32))
        rows = graph.node("Add", [rows, count], "rows.attention")
        graph.node("Expand", [rows, batch], "query_rows")
        return rows

    def _spare_up_to(self, rows: str, positions: int) -> str:
        """Spare rows, as many as are asked for, but so many that each sequence has so many positions."""
        graph = self._graph
        shortest = graph.node("ReduceMin", ["cache_lengths", graph.constant("zero", [0])], "cache_lengths.shortest")
        end = graph.node("Add", [shortest, rows], "rows.end")
        wanted = graph.constant("positions.wanted", [positions], np.int32)
        lacking = graph.node("Sub", [wanted, end], "spare.lacking.int32")
        lacking = graph.node("Cast", [lacking], "spare.lacking", to=_onnx_type(np.int64))
        return graph.node("Max", ["spare_rows", lacking], "spare.rows")

    def positions(self) -> str:
        """Rows are counted by a sum over ones: shapes live on the host, and a captured graph must not copy."""
        graph = self._graph
        zeros = graph.node("Sub", ["input_ids", "input_ids"], "row.zeros")
        ones = graph.node("Add", [zeros, graph.constant("row.one", 1)], "row.ones")
        row = graph.node("CumSum", [ones, graph.constant("row.axis", 1)], "row", exclusive=1)
        start = graph.node("Cast", ["cache_lengths"], "positions.length", to=_onnx_type(np.int64))
        start = graph.node("Unsqueeze", [start, graph.constant("positions.axis", [1])], "positions.start")
        return graph.node("Add", [start, row], "positions")

    def norm(self, x: str, weights: NormWeights, name: str) -> str:
        op = "SimplifiedLayerNormalization" if self._spec.norm == "rms" else "LayerNormalization"
        return self._graph.node(op, [x, *weights.inputs], name, axis=-1, epsilon=self._spec.norm_epsilon)

    def add_norm(self, x: str, residual: str, weights: NormWeights, name: str) -> tuple[str, str]:
        self._graph.nodes(
            "SkipSimplifiedLayerNormalization" if self._spec.norm == "rms" else "SkipLayerNormalization",
            [x, residual, *weights.inputs],
            [name, "", "", f"{name}.sum"],
            domain=CONTRIB,
            epsilon=self._spec.norm_epsilon,
        )
        return name, f"{name}.sum"

    def activation(self, x: str, kind: str, name: str) -> str:
        if kind == "silu":
            return self._graph.node("QuickGelu", [x], name, domain=CONTRIB, alpha=1.0)
        if kind == "relu":
            return self._graph.node("Relu", [x], name)
        return self._graph.node("FastGelu" if kind == "gelu_tanh" else "Gelu", [x], name, domain=CONTRIB)

    def attention(self, qkv: str, layer: int, name: str) -> str:
        graph = self._graph
        if not self._exact_rows:
            return self._attend(qkv, layer, name)
        rows = graph.node("Concat", [qkv, "spare"], f"{name}.rows", axis=1)
        output = self._attend(rows, layer, f"{name}.all_rows")
        cut = [graph.constant("zero", [0]), "rows.shape", graph.constant("one", [1])]
        return graph.node("Slice", [output, *cut], name)

    def _attend(self, rows: str, layer: int, name: str) -> str:
        caches = [f"past_key.{layer}", f"past_value.{layer}"]
        rotation, window = self._spec.rotation(layer), self._spec.window(layer)
        tables = ["", ""] if rotation is None else [f"{rotation}_cos", f"{rotation}_sin"]
        inputs = [rows, "", "", *caches, "cache_last", "cache_capacity", *tables]
        if self._exact_rows:
            inputs += [""] * 7 + ["query_rows"]
        options: dict[str, Any] = {"softcap": self._spec.attention_softcap} if self._spec.attention_softcap else {}
        if window:
            options["local_window_size"] = window
        if self._spec.attention_scale is not None or self._spec.scale_by_layer:
            options["scale"] = self._spec.query_scale(layer)
        self._graph.nodes(
            "GroupQueryAttention",
            inputs,
            [name, f"present_key.{layer}", f"present_value.{layer}"],
            domain=CONTRIB,
            num_heads=self._spec.num_heads,
            kv_num_heads=self._spec.num_kv_heads,
            do_rotary=int(rotation is not None),
            **options,
        )
        return name


class PackedLowering(FusedLowering):
    """The graph contract with B = 1 for all that is packed and S sequences in the caches; for lengths and spare rows:

    inputs  sequence_rows  int64 [S, M, 2]   (0, row of the pass) of each sequence's rows, up to M of them; a row that
                                             is there twice is a spare row
            packed_rows    int64 [1, R, 2]   the inverse: (sequence, its row) of each row of the pass
            query_rows     int32 [S]         how many of its M rows each sequence has, 0 for none
            cache_last     int32 [S]         the last position of each sequence behind the pass, spare rows included
            positions      int64 [1, R]      of each row in its sequence
    """

    sequences = "sequences"

    def __init__(self, graph: GraphBuilder, spec: DecoderSpec, capacity: int) -> None:
        super().__init__(graph, spec, capacity, exact_rows=True)

    def begin(self) -> None:
        graph = self._graph
        _rotary_tables(graph, self._spec, self._capacity)
        graph.constant("cache_capacity", self._capacity, np.int32)
        graph.input("sequence_rows", np.int64, [self.sequences, "attention_rows", 2])
        graph.input("packed_rows", np.int64, [1, "rows", 2])
        graph.input("query_rows", np.int32, [self.sequences])
        graph.input("cache_last", np.int32, [self.sequences])

    def positions(self) -> str:
        return self._graph.input("positions", np.int64, [1, "rows"])

    def attention(self, qkv: str, layer: int, name: str) -> str:
        rows = self._graph.node("GatherND", [qkv, "sequence_rows"], f"{name}.rows")
        output = self._attend(rows, layer, f"{name}.all_rows")
        return self._graph.node("GatherND", [output, "packed_rows"], name)


class StandardLowering:
    name = "standard"
    sequences = "batch"
    opset = 24

    def __init__(self, graph: GraphBuilder, spec: DecoderSpec, capacity: int) -> None:
        self._graph = graph
        self._spec = spec
        self._capacity = capacity

    def begin(self) -> None:
        graph = self._graph
        graph.input("cache_lengths", np.int32, ["batch"])
        _rotary_tables(graph, self._spec, self._capacity)
        start = graph.node("Cast", ["cache_lengths"], "write_index", to=_onnx_type(np.int64))
        rows = graph.node("Shape", ["input_ids"], "rows.shape", start=1, end=2)
        rows = graph.node("Squeeze", [rows], "rows")
        row = graph.node("Range", [graph.constant("zero.scalar", 0), rows, graph.constant("one.scalar", 1)], "row")
        start = graph.node("Unsqueeze", [start, graph.constant("one", [1])], "positions.start")
        graph.node("Add", [start, row], "positions")
        # Row i sees the cache positions up to its own; what lies behind is junk or a rejected draft.
        last = graph.node("Unsqueeze", ["positions", graph.constant("mask.axes", [1, 3])], "mask.last")
        slot = graph.constant("cache_slot", np.arange(self._capacity))
        graph.node("LessOrEqual", [slot, last], "mask")
        for window in sorted({self._spec.window(layer) for layer in range(self._spec.num_layers)} - {0}):
            first = graph.node("Sub", [last, graph.constant(f"window.{window}", [window])], f"mask.{window}.before")
            inside = graph.node("Greater", [slot, first], f"mask.{window}.inside")
            graph.node("And", ["mask", inside], f"mask.{window}")
        for kind, heads in (("query", self._spec.num_heads), ("key_value", self._spec.num_kv_heads)):
            graph.constant(f"{kind}.heads", [0, 0, heads, self._spec.head_dim])
        graph.constant("merged_heads", [0, 0, self._spec.num_heads * self._spec.head_dim])
        sizes = np.array([self._spec.num_heads, self._spec.num_kv_heads, self._spec.num_kv_heads])
        graph.constant("qkv_sizes", sizes * self._spec.head_dim)

    def positions(self) -> str:
        return "positions"

    def norm(self, x: str, weights: NormWeights, name: str) -> str:
        op = "RMSNormalization" if self._spec.norm == "rms" else "LayerNormalization"
        return self._graph.node(op, [x, *weights.inputs], name, axis=-1, epsilon=self._spec.norm_epsilon)

    def add_norm(self, x: str, residual: str, weights: NormWeights, name: str) -> tuple[str, str]:
        total = self._graph.node("Add", [x, residual], f"{name}.sum")
        return self.norm(total, weights, name), total

    def activation(self, x: str, kind: str, name: str) -> str:
        if kind == "silu":
            return self._graph.node("Mul", [x, self._graph.node("Sigmoid", [x], f"{name}.sigmoid")], name)
        if kind == "relu":
            return self._graph.node("Relu", [x], name)
        return self._graph.node("Gelu", [x], name, approximate="tanh" if kind == "gelu_tanh" else "none")

    def attention(self, qkv: str, layer: int, name: str) -> str:
        graph = self._graph
        parts = [f"{name}.query", f"{name}.key", f"{name}.value"]
        graph.nodes("Split", [qkv, "qkv_sizes"], parts, axis=2)
        query = self._rotate(self._split_heads(parts[0], "query"), layer)
        key = self._rotate(self._split_heads(parts[1], "key_value"), layer)
        value = self._split_heads(parts[2], "key_value")
        caches = []
        for kind, update in (("key", key), ("value", value)):
            inputs = [f"past_{kind}.{layer}", update, "write_index"]
            caches.append(graph.node("TensorScatter", inputs, f"present_{kind}.{layer}", axis=2, mode="linear"))
        window = self._spec.window(layer)
        mask = f"mask.{window}" if window else "mask"
        options: dict[str, Any] = {"softcap": self._spec.attention_softcap} if self._spec.attention_softcap else {}
        scale = float(self._spec.query_scale(layer))
        heads = graph.node("Attention", [query, *caches, mask], f"{name}.heads", scale=scale, **options)
        merged = graph.node("Transpose", [heads], f"{name}.transposed", perm=[0, 2, 1, 3])
        return graph.node("Reshape", [merged, "merged_heads"], name)

    def _split_heads(self, x: str, kind: str) -> str:
        heads = self._graph.node("Reshape", [x, f"{kind}.heads"], f"{x}.split")
        return self._graph.node("Transpose", [heads], f"{x}.heads", perm=[0, 2, 1, 3])

    def _rotate(self, x: str, layer: int) -> str:
        rotation = self._spec.rotation(layer)
        if rotation is None:
            return x
        size = 2 * len(self._spec.rotations[rotation])
        partial: dict[str, Any] = {"rotary_embedding_dim": size} if size < self._spec.head_dim else {}
        inputs = [x, f"{rotation}_cos", f"{rotation}_sin", "positions"]
        return self._graph.node("RotaryEmbedding", inputs, f"{x}.rotated", **partial)


def _rotary_tables(graph: GraphBuilder, spec: DecoderSpec, capacity: int) -> None:
    """cos and sin of every position that the cache can hold, ``[capacity, pairs that turn]``."""
    for name, inv_freq in spec.rotations.items():
        angles = np.arange(capacity)[:, None] * inv_freq[None, :]
        scale = spec.rotary_scale
        for part, table in (("cos", scale * np.cos(angles)), ("sin", scale * np.sin(angles))):
            graph.weight(f"{name}_{part}", graph.float_dtype, table.shape, [table])


def _onnx_type(dtype: type) -> int:
    from onnx import helper

    return int(helper.np_dtype_to_tensor_dtype(np.dtype(dtype)))
