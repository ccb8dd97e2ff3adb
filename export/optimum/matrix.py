"""Matrices of weights in a graph: what products multiply by, and what rows are looked up in."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from outrider.export.checkpoint import bounds


@dataclass(frozen=True)
class Matrix:
    """An initializer, read as ``[outputs, inputs]``; as stored it is ``[inputs, outputs]`` where it is ``turned``."""

    value: ir.Value
    turned: bool

    @property
    def shape(self) -> tuple[int, int]:
        rows, columns = tensor_of(self.value).shape.numpy()
        return (columns, rows) if self.turned else (rows, columns)

    def slabs(self) -> Iterator[NDArray[np.float32]]:
        """Some rows after the other, so that memory does not grow with the matrix."""
        outputs, inputs = self.shape
        array = tensor_of(self.value).numpy()
        for start, stop in bounds(outputs, 4 * inputs):
            yield array[:, start:stop].T if self.turned else array[start:stop]


def tensor_of(initializer: ir.Value) -> ir.TensorProtocol:
    assert initializer.const_value is not None, initializer.name
    return initializer.const_value


def matrices_of(model: ir.Model) -> set[Matrix]:
    return {matrix for node in model.graph if (matrix := matrix_of(node))}


def matrix_of(node: ir.Node) -> Matrix | None:
    """The matrix of a node that multiplies rows by one, or that looks up the rows of ``input_ids``."""
    if node.op_type == "Gather":
        table, ids = node.inputs
        by_rows = node.attributes.get_int("axis", 0) == 0 and ids is not None and ids.name == "input_ids"
        return _matrix(table, turned=False) if by_rows else None
    if node.op_type == "Gemm":
        scales = [node.attributes.get_float(name, 1.0) for name in ("alpha", "beta")]
        plain = scales == [1, 1] and not node.attributes.get_int("transA", 0)
        return _matrix(node.inputs[1], turned=not node.attributes.get_int("transB", 0)) if plain else None
    if node.op_type != "MatMul" or node.inputs[1] is None:
        return None
    before = node.inputs[1].producer()
    if before is not None and before.op_type == "Transpose":
        return _matrix(before.inputs[0], turned=False)
    return _matrix(node.inputs[1], turned=True)


def _matrix(value: ir.Value | None, *, turned: bool) -> Matrix | None:
    if value is None or not value.is_initializer() or len(tensor_of(value).shape) != 2:
        return None
    return Matrix(value, turned)
