"""A rewritten graph and its weights into a bundle: small constants in the graph, all else streamed to its file."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import onnx
import onnx_ir as ir
from numpy.typing import NDArray

from outrider.engines.errors import OutriderError
from outrider.export.checkpoint import bounds
from outrider.export.graph import GraphBuilder
from outrider.export.matrices import BlockMatrix
from outrider.export.optimum.matrix import Matrix, matrix_of, tensor_of
from outrider.export.optimum.trace import OPSET
from outrider.export.precision import BITS
from outrider.export.quantize import BLOCK_SIZE, rounded_layout
from outrider.export.weights import Weights

_INLINE_BYTES = 1024
_HALF = np.finfo(np.float16)


def emit(
    model: ir.Model, name: str, weights: Weights, precision: str, progress: Callable[[str], None]
) -> onnx.ModelProto:
    """Put the weights into ``weights`` and return the graph that refers to them.

    Args:
        name: of the graph.
        precision: ``int8`` and ``int4`` store matrices in blocks; else all is stored in the types of the graph.
        progress: called with the name of each part when it is written (embedding, each layer, head).

    Raises:
        OutriderError: a table whose rows cannot be cut into blocks.
    """
    graph = GraphBuilder(weights, np.dtype(np.float32))
    for values, declare in ((model.graph.inputs, graph.input), (model.graph.outputs, graph.output)):
        for value in values:
            shape = [size if isinstance(size, int) else str(size.value) for size in value.shape or ()]
            declare(str(value.name), _dtype(value), shape)
    emission = _Emission(graph, precision)
    progress("embedding")
    for node in model.graph:
        emission.node(node)
        if (part := str(node.outputs[0].name)).startswith("present_value."):
            progress(f"layer {part.rpartition('.')[2]}")
    progress("head")
    return graph.model(name, OPSET)


class _Emission:
    def __init__(self, graph: GraphBuilder, precision: str) -> None:
        self._graph = graph
        self._precision = precision
        self._stored: set[ir.Value] = set()
        self._matrices: dict[Matrix, BlockMatrix] = {}

    def node(self, node: ir.Node) -> None:
        if matrix := self._blocks_of(node):
            self._product(node, matrix)
            return
        if node.op_type == "Transpose" and all(self._blocks_of(user) for user, _ in node.outputs[0].uses()):
            return  # of a matrix that is stored in blocks
        for value in node.inputs:
            self._store(value)
        self._graph.add(ir.to_proto(node))

    def _blocks_of(self, node: ir.Node) -> Matrix | None:
        return matrix_of(node) if self._precision in BITS else None

    def _product(self, node: ir.Node, matrix: Matrix) -> None:
        if matrix not in self._matrices:
            stem, bits = str(matrix.value.name), BITS[self._precision]
            self._matrices[matrix] = BlockMatrix(
                self._graph, stem, matrix.shape, matrix.slabs(), bits, rounded_layout(bits)
            )
        stored, name = self._matrices[matrix], str(node.outputs[0].name)
        if node.op_type == "Gather":
            if matrix.shape[1] % BLOCK_SIZE:
                raise OutriderError(
                    f"node {node.name} looks up rows of {matrix.shape[1]}, and {self._precision} needs a multiple of "
                    f"{BLOCK_SIZE}; use fp32 or fp16"
                )
            stored.gather("input_ids", name)
            return
        x, bias = node.inputs[0], node.inputs[2] if len(node.inputs) > 2 else None
        assert x is not None, node.name
        self._store(bias)
        stored.matmul(str(x.name), name, None if bias is None else str(bias.name))

    def _store(self, value: ir.Value | None) -> None:
        """Where it is an initializer that is not there yet."""
        if value is None or not value.is_initializer() or value in self._stored:
            return
        self._stored.add(value)
        name, dtype, tensor = str(value.name), _dtype(value), tensor_of(value)
        array = tensor.numpy()
        if tensor.nbytes <= _INLINE_BYTES:
            self._graph.constant(name, _in_range(array) if dtype == np.float16 else array, dtype)
            return
        slabs = (array[start:stop] for start, stop in bounds(len(array), array[:1].nbytes))
        self._graph.weight(name, dtype, array.shape, slabs)


def _dtype(value: ir.Value) -> np.dtype[np.generic]:
    assert value.dtype is not None, value.name
    return value.dtype.numpy()


def _in_range(array: NDArray[np.float32]) -> NDArray[np.float32]:
    """A mask's lowest float32 would be infinite in float16; the lowest float16 hides as well."""
    return np.where(np.isinf(array), array, np.clip(array, _HALF.min, _HALF.max))
