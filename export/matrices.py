"""A matrix in the graph: how it is stored, and the operators that multiply by it or look rows up in it.

All matrices keep the checkpoint's layout ``[outputs, inputs]``, so that each is written in one pass over its rows and a
tied embedding and head are the same bytes (but see ``embeds_apart``).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, Protocol

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from outrider.export.graph import CONTRIB, GraphBuilder
from outrider.export.precision import BITS, embeds_apart
from outrider.export.quantize import ACCURACY_INT8, BLOCK_SIZE, quantize_blocks, quantize_fp8


class Matrix(Protocol):
    """A stored matrix ``[outputs, inputs]``."""

    def matmul(self, x: str, name: str, bias: str | None = None) -> str:
        """``x @ matrix.T (+ bias)`` -> ``[..., outputs]``."""
        ...


class Table(Matrix, Protocol):
    """A stored matrix whose rows can be looked up as well."""

    def gather(self, ids: str, name: str) -> str:
        """Rows of the matrix -> ``[..., inputs]``."""
        ...


class FloatMatrix:
    """In the dtype of the activations."""

    def __init__(self, graph: GraphBuilder, name: str, shape: tuple[int, int], slabs: Iterable[NDArray[np.float32]]):
        self._graph = graph
        self._weight = graph.weight(name, graph.float_dtype, shape, slabs)

    def matmul(self, x: str, name: str, bias: str | None = None) -> str:
        return _product(self._graph, x, self._weight, name, bias)

    def gather(self, ids: str, name: str) -> str:
        return self._graph.node("Gather", [self._weight, ids], name, axis=0)


class BlockMatrix:
    """int4 or int8, symmetric, one scale for each ``BLOCK_SIZE`` inputs of an output (``MatMulNBits``)."""

    def __init__(
        self, graph: GraphBuilder, name: str, shape: tuple[int, int], slabs: Iterable[NDArray[np.float32]], bits: int
    ):
        self._graph = graph
        self._shape = shape
        self._bits = bits
        blocks = -(-shape[1] // BLOCK_SIZE)
        blob = BLOCK_SIZE * bits // 8
        scales: list[NDArray[Any]] = []
        self._packed = graph.weight(name, np.uint8, (shape[0], blocks, blob), _packed(slabs, bits, scales))
        self._scales = graph.weight(f"{name}.scales", graph.float_dtype, (shape[0], blocks), scales)
        self._row_bytes = blocks * blob

    def matmul(self, x: str, name: str, bias: str | None = None) -> str:
        inputs = [x, self._packed, self._scales] + ([] if bias is None else ["", "", bias])
        return self._graph.node(
            "MatMulNBits",
            inputs,
            name,
            domain=CONTRIB,
            N=self._shape[0],
            K=self._shape[1],
            bits=self._bits,
            block_size=BLOCK_SIZE,
            accuracy_level=ACCURACY_INT8,
        )

    def gather(self, ids: str, name: str) -> str:
        rows = self._graph.alias(f"{self._packed}.rows", self._packed, (self._shape[0], self._row_bytes))
        return self._graph.node(
            "GatherBlockQuantized",
            [rows, ids, self._scales],
            name,
            domain=CONTRIB,
            bits=self._bits,
            block_size=BLOCK_SIZE,
            gather_axis=0,
            quantize_axis=1,
        )


class DequantizedMatrix:
    """int4 in blocks, or fp8 with one scale an output: symmetric, and expanded where it is multiplied."""

    def __init__(
        self,
        graph: GraphBuilder,
        name: str,
        shape: tuple[int, int],
        slabs: Iterable[NDArray[np.float32]],
        precision: str,
    ):
        self._graph = graph
        scales: list[NDArray[Any]] = []
        if precision == "int4":
            self._attributes: dict[str, Any] = {"axis": 1, "block_size": BLOCK_SIZE}
            # Blocks hold 0 to 15 around 8: with the high bit of each half flipped, they are signed.
            values = (packed ^ np.uint8(0x88) for packed in _packed(slabs, BITS[precision], scales))
            self._weight = graph.weight(f"{name}.int4", ml_dtypes.int4, shape, values)
            scales_shape: tuple[int, ...] = (shape[0], shape[1] // BLOCK_SIZE)
        else:
            self._attributes = {"axis": 0}
            self._weight = graph.weight(f"{name}.fp8", ml_dtypes.float8_e4m3fn, shape, _fp8(slabs, scales))
            scales_shape = shape[:1]
        self._scales = graph.weight(f"{name}.scales", graph.float_dtype, scales_shape, scales)

    def matmul(self, x: str, name: str, bias: str | None = None) -> str:
        inputs = [self._weight, self._scales]
        expanded = self._graph.node("DequantizeLinear", inputs, f"{name}.expanded", **self._attributes)
        return _product(self._graph, x, expanded, name, bias)


def _product(graph: GraphBuilder, x: str, weight: str, name: str, bias: str | None) -> str:
    # Engines fold the transposition of a constant into their own packing.
    transposed = graph.node("Transpose", [weight], f"{name}.transposed", perm=[1, 0])
    product = graph.node("MatMul", [x, transposed], name if bias is None else f"{name}.product")
    return product if bias is None else graph.node("Add", [product, bias], name)


def store_matrix(
    graph: GraphBuilder,
    name: str,
    shape: tuple[int, int],
    slabs: Iterable[NDArray[np.float32]],
    lowering: str,
    precision: str,
) -> Matrix:
    """Write a matrix to the weights file in ``precision``, one of ``PRECISIONS_OF[lowering]``."""
    if embeds_apart(lowering, precision):
        return DequantizedMatrix(graph, name, shape, slabs, precision)
    return store_table(graph, name, shape, slabs, lowering, precision)


def store_table(
    graph: GraphBuilder,
    name: str,
    shape: tuple[int, int],
    slabs: Iterable[NDArray[np.float32]],
    lowering: str,
    precision: str,
) -> Table:
    """As ``store_matrix``, for an embedding."""
    if precision in BITS and not embeds_apart(lowering, precision):
        return BlockMatrix(graph, name, shape, slabs, BITS[precision])
    return FloatMatrix(graph, name, shape, slabs)


def _packed(slabs: Iterable[NDArray[np.float32]], bits: int, scales: list[NDArray[Any]]) -> Iterator[NDArray[np.uint8]]:
    """The packed bytes slab by slab; the scales, a small part of the whole, are kept for the caller."""
    for slab in slabs:
        blocks = quantize_blocks(slab, bits)
        scales.append(blocks.scales)
        yield blocks.packed


def _fp8(slabs: Iterable[NDArray[np.float32]], scales: list[NDArray[Any]]) -> Iterator[NDArray[Any]]:
    for slab in slabs:
        values, slab_scales = quantize_fp8(slab)
        scales.append(slab_scales)
        yield values
