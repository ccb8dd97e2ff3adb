"""A rewritten graph in float16: weights, activations and caches; not its geometry, statistics of norms and logits.

What the model itself computes in float32 stays so: the trace, which is float32 throughout, has casts to float32 there.
"""

from __future__ import annotations

import onnx_ir as ir
from onnx_ir.passes import common as passes

from outrider.export.optimum.geometry import Geometry

FLOAT, HALF = ir.DataType.FLOAT, ir.DataType.FLOAT16
# Squares and their sums leave float16's range, and so does what is added to them for the root's sake.
_WIDE = ("Exp", "Log", "Pow", "Reciprocal", "ReduceMean", "ReduceSum", "Sqrt")


def narrow(model: ir.Model, geometry: Geometry) -> None:
    """Change the graph in place. An initializer whose type is float16 still holds the float32 tensor."""
    passes.ShapeInferencePass()(model)
    graph = model.graph
    narrowing = _Narrowing(graph)
    for value in graph.inputs:
        if value.dtype == FLOAT:
            value.type = ir.TensorType(HALF)
    for node in list(graph):
        if geometry.computes(node):
            if node.op_type == "Transpose" and node.inputs[0] is not None and node.inputs[0].is_initializer():
                narrowing.convert(node, HALF)  # of a matrix
            continue
        narrowing.convert(node, FLOAT if _is_wide(node, geometry) else HALF)
    logits = graph.outputs[0]
    if logits.dtype == HALF:
        logits.name = "logits.half"
        graph.outputs[0] = narrowing.cast(logits, FLOAT, "logits")
    passes.RemoveUnusedNodesPass()(model)
    passes.TopologicalSortPass()(model)


def _is_wide(node: ir.Node, geometry: Geometry) -> bool:
    if node.op_type == "Cast" or node.op_type in _WIDE:
        return True
    floats = [value for value in node.inputs if value is not None and value.dtype in (FLOAT, HALF)]
    computed = [value for value in floats if value not in geometry.constant]
    product = node.op_type in ("MatMul", "Gemm") and len(computed) < len(floats)
    return bool(computed) and not product and all(value.dtype == FLOAT for value in computed)


class _Narrowing:
    def __init__(self, graph: ir.Graph) -> None:
        self._graph = graph
        self._casts: dict[tuple[ir.Value, ir.DataType], ir.Value] = {}

    def convert(self, node: ir.Node, dtype: ir.DataType) -> None:
        """Have a node take and give floats of ``dtype``."""
        for index, value in enumerate(node.inputs):
            if value is None or value.dtype not in (FLOAT, HALF) or value.dtype == dtype:
                continue
            node.replace_input_with(index, self.cast(value, dtype))
        for output in node.outputs:
            if output.dtype == FLOAT:
                output.type = ir.TensorType(dtype)

    def cast(self, value: ir.Value, dtype: ir.DataType, name: str | None = None) -> ir.Value:
        if (value, dtype) not in self._casts:
            name = name or f"{value.name}.{dtype.name.lower()}"
            output = ir.Value(name=name, type=ir.TensorType(dtype), shape=value.shape)
            if value.is_initializer():  # what all take in float16 is stored so, and the other becomes unused
                output.const_value = value.const_value
                self._graph.register_initializer(output)
            else:
                self._graph.append(ir.node("Cast", [value], {"to": dtype}, outputs=[output], name=f"{name}/Cast"))
            self._casts[value, dtype] = output
        return self._casts[value, dtype]
