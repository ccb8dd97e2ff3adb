"""From a traced graph to the graph contract (``decoder.py``), in operators of opset 24.

The caches have ``capacity`` slots and are updated in place (TensorScatter at ``cache_lengths``) where the trace
concatenated. The trace's own length of the cache becomes ``capacity - R``, so that all that it computes of the sum is
as long as the caches. Masks and positions come from ``cache_lengths``; only the wanted rows reach the head. All else
stays as it was traced.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray
from onnx_ir.passes import common as passes

from outrider.engines.errors import OutriderError
from outrider.export.optimum.geometry import Geometry, Kinds, Mask, find_geometry, find_kinds, rows_axis
from outrider.export.optimum.matrix import matrix_of
from outrider.export.optimum.trace import Trace, caches

# On the model's own values. Of these only products, norms, softmax and means look past an element, at known axes.
_KNOWN = {
    *("Abs", "Add", "Cast", "Clip", "Concat", "Div", "Erf", "Exp", "Expand", "Gather", "Gelu", "Gemm", "IsNaN", "Log"),
    *("LayerNormalization", "MatMul", "Max", "Min", "Mul", "Neg", "Pow", "Reciprocal", "ReduceMax", "ReduceMean"),
    *("ReduceSum", "Relu", "Reshape", "Shape", "Sigmoid", "Slice", "Softmax", "Softplus", "Split", "Sqrt", "Squeeze"),
    *("Sub", "Tanh", "Transpose", "Unsqueeze", "Where"),
}
_OVER_LAST_AXIS = ("LayerNormalization", "ReduceMax", "ReduceMean", "ReduceSum", "Softmax")
_ELEMENTWISE = ("Add", "Cast", "Div", "Mul", "Sub", "Tanh")  # between the head and the logits


def rewrite(trace: Trace, *, capacity: int, positions: int, vocab_size: int) -> tuple[ir.Model, Geometry]:
    """The trace's graph, rewritten.

    Args:
        positions: those that the model has; a row behind them, which only pads, takes the last.
        vocab_size: of the tokenizer; logits behind it are cut off.

    Returns:
        The graph, and what in it is computed of shapes and positions alone.

    Raises:
        OutriderError: naming the node or value that does not fit the contract.
    """
    model = trace.model()
    graph = model.graph
    geometry = find_geometry(graph)
    _check_operators(graph, geometry)
    rewriter = _Rewriter(trace, graph, capacity, min(capacity, positions))
    rewriter.run(find_kinds(trace, geometry, rewriter.length), vocab_size)
    ir.passes.Sequential(passes.RemoveUnusedNodesPass(), passes.TopologicalSortPass(), passes.NameFixPass())(model)
    return model, find_geometry(graph)


def _check_operators(graph: ir.Graph, geometry: Geometry) -> None:
    """Raises OutriderError for an operator that may make rows depend on each other, or on the state of a recurrence."""
    for node in graph:
        if geometry.computes(node):
            continue
        if node.domain or node.op_type not in _KNOWN:
            raise OutriderError(
                f"node {node.name} is {node.op_type}, through which a row may depend on the other rows of its pass"
            )
        shape = node.inputs[0].shape if node.inputs[0] is not None else None
        last = [[-1]] if shape is None else [[-1], [len(shape) - 1]]
        if node.op_type in _OVER_LAST_AXIS and _axes(node) not in last:
            raise OutriderError(f"node {node.name} is {node.op_type} over axes {_axes(node)}, which may be the rows")


def _axes(node: ir.Node) -> list[int]:
    if node.op_type in ("LayerNormalization", "Softmax"):
        return [node.attributes.get_int("axis", -1)]
    axes = node.inputs[1] if len(node.inputs) > 1 else None
    tensor = ir.convenience.get_const_tensor(axes) if axes is not None else None
    return [] if tensor is None else tensor.numpy().tolist()


@dataclass
class _Rewriter:
    trace: Trace
    graph: ir.Graph
    capacity: int
    length: int  # of the longest sequence

    def __post_init__(self) -> None:
        """Raises OutriderError where a cache or the head is not of the form that is rewritten."""
        self._concatenations = [_concatenation(past, present) for past, present, _ in caches(self.graph)]
        self._head = _head(self.graph.outputs[0])
        self._constants: dict[str, ir.Value] = {}

    def run(self, kinds: Kinds, vocab_size: int) -> None:
        inputs = {str(value.name): value for value in self.graph.inputs}
        self._declare(inputs["input_ids"])
        self._positions(inputs, kinds.positions)
        self._masks(kinds.masks)
        self._caches()
        self._last_rows()
        self._logits(vocab_size)

    def _node(self, op: str, inputs: Sequence[ir.Value | None], name: str, **attributes: Any) -> ir.Value:
        node = ir.node(op, inputs, attributes, outputs=[ir.Value(name=name)], name=f"{name}/{op}")
        self.graph.append(node)  # sorted when all is done
        return node.outputs[0]

    def _constant(self, name: str, value: Any, dtype: Any = np.int64) -> ir.Value:
        if name not in self._constants:
            tensor = ir.tensor(np.asarray(value, dtype), name=name)
            made = ir.Value(name=name, type=ir.TensorType(tensor.dtype), const_value=tensor)
            self.graph.register_initializer(made)
            self._constants[name] = made
        return self._constants[name]

    def _declare(self, ids: ir.Value) -> None:
        """The inputs that all of the rest is computed of, and the shapes that follow from them."""
        self._lengths = _input("cache_lengths", ir.DataType.INT32, ["batch"])
        self._wanted = _input("logit_rows", ir.DataType.INT64, ["batch", "logit_rows"])
        ids.shape = ir.Shape(["batch", "rows"])
        pasts = [past for past, _, _ in caches(self.graph)]
        self.graph.inputs[:] = [ids, self._lengths, self._wanted, *pasts]
        self._batch = self._node("Shape", [ids], "batch.shape", start=0, end=1)
        self._rows = self._node("Shape", [ids], "rows.shape", start=1, end=2)
        self._slots = self._constant("capacity", [self.capacity])

    def _positions(self, inputs: dict[str, ir.Value], tables: dict[ir.Value, NDArray[Any]]) -> None:
        """``write_index`` [B] and ``positions`` [B, R]; rows behind the last position, which only pad, take it."""
        self._write_index = self._node("Cast", [self._lengths], "write_index", to=ir.DataType.INT64)
        scalars = [self._constant("zero", 0), self._node("Squeeze", [self._rows], "rows"), self._constant("one", 1)]
        start = self._node("Unsqueeze", [self._write_index, self._constant("rows_axis", [1])], "positions.start")
        self._position = self._node("Add", [start, self._node("Range", scalars, "row")], "positions")
        inside = self._node(
            "Min", [self._position, self._constant("last_position", self.length - 1)], "positions.inside"
        )
        if "position_ids" in inputs:
            inputs["position_ids"].replace_all_uses_with(inside)
        for number, (value, table) in enumerate(tables.items()):
            value.replace_all_uses_with(self._looked_up(f"positions.{number}", table, inside))
        shape = self._node("Concat", [self._batch, self._slots], "attention_mask.shape", axis=0)
        ones = self._node("Expand", [self._constant("one", 1), shape], "attention_mask.all")
        inputs["attention_mask"].replace_all_uses_with(ones)

    def _looked_up(self, name: str, table: NDArray[Any], positions: ir.Value) -> ir.Value:
        """Rows of a table ``[1, ..., 1, length, ...]``, with as many axes as it has; the first is the batch."""
        axis = rows_axis(table) or 1
        rows = self._constant(f"{name}.table", table.reshape(table.shape[axis:]), table.dtype)
        found = self._node("Gather", [rows, positions], f"{name}.rows", axis=0)
        if axis == 1:
            return found
        return self._node("Unsqueeze", [found, self._constant(f"{name}.axes", range(1, axis))], name)

    def _masks(self, masks: dict[ir.Value, Mask]) -> None:
        last = self._node("Unsqueeze", [self._position, self._constant("mask.axes", [1, 3])], "mask.last")
        slot = self._constant("cache_slot", np.arange(self.capacity))
        causal = self._node("LessOrEqual", [slot, last], "mask")
        made: dict[tuple[Any, ...], ir.Value] = {}
        for value, mask in masks.items():
            key = (mask.window, mask.seen.dtype, float(mask.seen), float(mask.hidden))
            if key not in made:
                made[key] = self._mask(f"mask.{len(made)}", mask, causal, slot, last)
            value.replace_all_uses_with(made[key])

    def _mask(self, name: str, mask: Mask, causal: ir.Value, slot: ir.Value, last: ir.Value) -> ir.Value:
        """[B, 1, R, capacity] of the mask's own two values."""
        visible = causal
        if mask.window:
            first = self._node("Sub", [last, self._constant(f"{name}.window", mask.window)], f"{name}.before")
            inside = self._node("Greater", [slot, first], f"{name}.inside")
            visible = self._node("And", [causal, inside], f"{name}.visible")
        if mask.seen.dtype == np.bool_:
            return visible if mask.seen else self._node("Not", [visible], f"{name}.hidden")
        seen = self._constant(f"{name}.seen", mask.seen, mask.seen.dtype)
        hidden = self._constant(f"{name}.hidden", mask.hidden, mask.seen.dtype)
        return self._node("Where", [visible, seen, hidden], name)

    def _caches(self) -> None:
        """The caches in place, and their shape as it was traced: with room for the rows of the pass left."""
        free = self._node("Sub", [self._slots, self._rows], "capacity.free")
        heads = self._constant("cache.heads", [self.trace.num_kv_heads])
        parts = [self._batch, heads, free, self._constant("cache.head_dim", [self.trace.head_dim])]
        shape = self._node("Concat", parts, "cache.shape", axis=0)
        for (past, present, name), grown in zip(caches(self.graph), self._concatenations, strict=True):
            for node, _ in list(past.uses()):
                if node.op_type == "Shape":
                    node.outputs[0].replace_all_uses_with(shape)
            inputs = [past, grown.inputs[1], self._write_index]
            scattered = self._node("TensorScatter", inputs, f"present_{name}", axis=2, mode="linear")
            self.graph.outputs[self.graph.outputs.index(present)] = scattered
            grown.outputs[0].replace_all_uses_with(scattered)
            past.name = f"past_{name}"
            for value in (past, scattered):
                value.type = ir.TensorType(ir.DataType.FLOAT)
                value.shape = ir.Shape(["batch", self.trace.num_kv_heads, self.capacity, self.trace.head_dim])

    def _last_rows(self) -> None:
        """The head is the largest matrix, and a prefill needs one row of it: what it takes is gathered first."""
        index = self._node("Unsqueeze", [self._wanted, self._constant("last_axis", [-1])], "logit_rows.index")
        wanted = self._node("GatherND", [self._head.inputs[0], index], "hidden.wanted", batch_dims=1)
        self._head.replace_input_with(0, wanted)

    def _logits(self, vocab_size: int) -> None:
        logits = self.graph.outputs[0]
        if vocab_size < self.trace.vocab_size:
            span = [("start", 0), ("end", vocab_size), ("axis", -1)]
            bounds = [self._constant(f"vocab.{name}", [value]) for name, value in span]
            logits.name = "logits.all"
            logits = self._node("Slice", [logits, *bounds], "logits")
            self.graph.outputs[0] = logits
        logits.type, logits.shape = ir.TensorType(ir.DataType.FLOAT), ir.Shape(["batch", "logit_rows", vocab_size])


def _input(name: str, dtype: ir.DataType, shape: Sequence[str]) -> ir.Value:
    return ir.Value(name=name, type=ir.TensorType(dtype), shape=ir.Shape(shape))


def _concatenation(past: ir.Value, present: ir.Value) -> ir.Node:
    """The node that makes ``present`` of ``past`` and the rows of the pass; the only one that takes ``past`` itself."""
    node = present.producer()
    if node is not None and node.op_type == "Cast":  # to float32, which it is
        node = node.inputs[0].producer() if node.inputs[0] is not None else None
    axis = node.attributes.get_int("axis", 0) if node is not None and node.op_type == "Concat" else 0
    if node is None or axis not in (2, -2) or len(node.inputs) != 2 or node.inputs[0] is not past:
        name = node.name if node is not None else present.name
        raise OutriderError(
            f"node {name} gives {present.name}, and is no concatenation of {past.name} and the new rows"
        )
    for user, _ in past.uses():
        if user is not node and (user.op_type != "Shape" or user.attributes):
            raise OutriderError(
                f"node {user.name} takes the cache {past.name} beside its concatenation with the new rows"
            )
    return node


def _head(logits: ir.Value) -> ir.Node:
    """The product with a matrix of weights behind which no node looks past an element."""
    node = logits.producer()
    while node is not None and node.op_type in _ELEMENTWISE:
        own = [taken for taken in node.inputs if taken is not None and taken.producer() is not None]
        node = own[0].producer() if len(own) == 1 else None
    x = node.inputs[0] if node is not None and node.op_type == "MatMul" and matrix_of(node) else None
    if node is None or x is None or (x.shape is not None and len(x.shape) != 3):
        last = node or logits.producer()
        name = last.name if last is not None else logits.name
        raise OutriderError(f"node {name} gives the logits, and is no product of rows with a matrix of weights")
    return node
