"""A matrix in the graph: how it is stored, and the operators that multiply by it or look rows up in it.

All matrices keep the checkpoint's layout ``[outputs, inputs]``, so that each is written in one pass over its rows and a
tied embedding and head are the same bytes (but see ``embeds_apart``).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple, Protocol

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from outrider.export.graph import CONTRIB, GraphBuilder
from outrider.export.precision import BITS, embeds_apart
from outrider.export.quantize import (
    ACCURACY_INT8,
    BLOCK_SIZE,
    SYMMETRIC,
    BlockLayout,
    Blocks,
    Integers,
    conform,
    pack_blocks,
    quantize_blocks,
    quantize_fp8,
    rounded_layout,
)
from outrider.export.takeover import Slab, floats


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
    """int4 or int8, a scale for each block of inputs of an output (``MatMulNBits``), and more by ``layout``.

    Offsets are a product of their own: every input of a block is multiplied by the same one, so its inputs are summed
    first. ``MatMulNBits`` takes zero points that are no integers too, in a kernel that is 60 times as slow and
    whose rows depend on their number.
    """

    def __init__(
        self,
        graph: GraphBuilder,
        name: str,
        shape: tuple[int, int],
        slabs: Iterable[Slab],
        bits: int,
        layout: BlockLayout,
    ):
        self._graph = graph
        self._shape = shape
        self._bits = bits
        self._layout = layout
        self._blocks = -(-shape[1] // layout.block_size)
        blob = layout.block_size * bits // 8
        rest: list[Blocks] = []
        packed = _packed(slabs, bits, rest, layout)
        self._packed = graph.weight(name, np.uint8, (shape[0], self._blocks, blob), packed)
        scales_shape = (shape[0], self._blocks)
        scales = (part.scales for part in rest)
        self._scales = graph.weight(f"{name}.scales", graph.float_dtype, scales_shape, scales)
        self._row_bytes = self._blocks * blob
        self._zero_points = self._offsets = ""
        if layout.zero_points:
            zero_points = (_zero_points(part, bits) for part in rest)
            size = -(-self._blocks * bits // 8)
            self._zero_points = graph.weight(f"{name}.zero_points", np.uint8, (shape[0], size), zero_points)
        if layout.offsets:
            offsets = (part.offsets for part in rest if part.offsets is not None)
            self._offsets = graph.weight(f"{name}.offsets", graph.float_dtype, scales_shape, offsets)

    def matmul(self, x: str, name: str, bias: str | None = None) -> str:
        inputs = [x, self._packed, self._scales, self._zero_points, "", bias or ""]
        while not inputs[-1]:
            inputs.pop()
        product = self._graph.node(
            "MatMulNBits",
            inputs,
            f"{name}.integers" if self._offsets else name,
            domain=CONTRIB,
            N=self._shape[0],
            K=self._shape[1],
            bits=self._bits,
            block_size=self._layout.block_size,
            accuracy_level=ACCURACY_INT8,
        )
        if not self._offsets:
            return product
        blocks = self._in_blocks(x, f"{name}.blocks")
        sums = self._graph.node("ReduceSum", [blocks, self._last_axis()], f"{name}.sums", keepdims=0)
        shift = _product(self._graph, sums, self._offsets, f"{name}.shift", None)
        return self._graph.node("Add", [product, shift], name)

    def gather(self, ids: str, name: str) -> str:
        graph = self._graph
        rows = graph.alias(f"{self._packed}.rows", self._packed, (self._shape[0], self._row_bytes))
        gathered = graph.node(
            "GatherBlockQuantized",
            [rows, ids, self._scales] + ([self._zero_points] if self._zero_points else []),
            f"{name}.integers" if self._offsets else name,
            domain=CONTRIB,
            bits=self._bits,
            block_size=self._layout.block_size,
            gather_axis=0,
            quantize_axis=1,
        )
        if not self._offsets:
            return gathered
        offsets = graph.node("Gather", [self._offsets, ids], f"{name}.offsets", axis=0)
        offsets = graph.node("Unsqueeze", [offsets, self._last_axis()], f"{name}.offsets.column")
        shifted = graph.node("Add", [self._in_blocks(gathered, f"{name}.blocks"), offsets], f"{name}.shifted")
        return graph.node("Reshape", [shifted, graph.constant("merged", [0, 0, -1])], name)

    def _in_blocks(self, x: str, name: str) -> str:
        """``[batch, rows, inputs]`` -> ``[batch, rows, blocks, block_size]``."""
        size = self._layout.block_size
        shape = self._graph.constant(f"blocks.{self._blocks}x{size}", [0, 0, self._blocks, size])
        return self._graph.node("Reshape", [x, shape], name)

    def _last_axis(self) -> str:
        return self._graph.constant("minus_one", [-1])


class OrderedMatrix:
    """A matrix whose inputs are stored in another order (int64 ``[inputs]``: which one is where)."""

    def __init__(self, graph: GraphBuilder, name: str, matrix: Matrix, order: NDArray[np.int64]):
        self._graph = graph
        self._matrix = matrix
        self._order = graph.weight(f"{name}.order", np.int64, order.shape, [order])

    def matmul(self, x: str, name: str, bias: str | None = None) -> str:
        ordered = self._graph.node("Gather", [x, self._order], f"{name}.ordered", axis=2)
        return self._matrix.matmul(ordered, name, bias)


class DequantizedMatrix:
    """int4 in blocks, or fp8 with one scale an output: symmetric, and expanded where it is multiplied."""

    def __init__(
        self,
        graph: GraphBuilder,
        name: str,
        shape: tuple[int, int],
        slabs: Iterable[Slab],
        precision: str,
    ):
        self._graph = graph
        scales: Iterable[NDArray[Any]]
        if precision == "int4":
            rest: list[Blocks] = []
            self._attributes: dict[str, Any] = {"axis": 1, "block_size": BLOCK_SIZE}
            # Blocks hold 0 to 15 around 8: with the high bit of each half flipped, they are signed.
            values = (packed ^ np.uint8(0x88) for packed in _packed(slabs, BITS[precision], rest))
            self._weight = graph.weight(f"{name}.int4", ml_dtypes.int4, shape, values)
            scales_shape: tuple[int, ...] = (shape[0], shape[1] // BLOCK_SIZE)
            scales = (part.scales for part in rest)
        else:
            self._attributes = {"axis": 0}
            scales = fp8_scales = list[NDArray[Any]]()
            fp8 = _fp8(floats(slabs), fp8_scales)
            self._weight = graph.weight(f"{name}.fp8", ml_dtypes.float8_e4m3fn, shape, fp8)
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


class Storage(NamedTuple):
    """``precision`` is one of ``PRECISIONS_OF[lowering]``; ``layout`` is that of blocks, where it has them."""

    lowering: str
    precision: str
    layout: BlockLayout


def store_matrix(
    graph: GraphBuilder,
    name: str,
    shape: tuple[int, int],
    slabs: Iterable[Slab],
    storage: Storage,
    order: NDArray[np.int64] | None = None,
) -> Matrix:
    """Write a matrix to the weights file.

    Args:
        slabs: rows to be rounded, and integers of the storage's layout that are stored as they are (``takeover``).
        order: of the inputs of these integers, where it is another.
    """
    matrix: Matrix
    if embeds_apart(storage.lowering, storage.precision):
        matrix = DequantizedMatrix(graph, name, shape, slabs, storage.precision)
    else:
        matrix = store_table(graph, name, shape, slabs, storage)
    return matrix if order is None else OrderedMatrix(graph, name, matrix, order)


def store_table(
    graph: GraphBuilder, name: str, shape: tuple[int, int], slabs: Iterable[Slab], storage: Storage
) -> Table:
    """As ``store_matrix``, for an embedding."""
    lowering, precision, layout = storage
    if precision in BITS and not embeds_apart(lowering, precision):
        return BlockMatrix(graph, name, shape, slabs, BITS[precision], layout)
    return FloatMatrix(graph, name, shape, floats(slabs))


def _packed(
    slabs: Iterable[Slab], bits: int, rest: list[Blocks], layout: BlockLayout = SYMMETRIC
) -> Iterator[NDArray[np.uint8]]:
    """The packed bytes slab by slab; all else, a small part of the whole, is kept for the caller."""
    for slab in slabs:
        if isinstance(slab, Integers):
            blocks = pack_blocks(slab, bits)
        else:
            blocks = quantize_blocks(slab, bits, zero_points=layout.zero_points and rounded_layout(bits).zero_points)
        blocks = conform(blocks, bits, layout)
        rest.append(blocks._replace(packed=blocks.packed[:0].copy()))
        yield blocks.packed


def _zero_points(blocks: Blocks, bits: int) -> NDArray[np.uint8]:
    """Packed as the values are, each row from a byte of its own on."""
    assert blocks.zero_points is not None
    points = blocks.zero_points
    if bits == 8:
        return points
    points = np.pad(points, [(0, 0), (0, points.shape[1] % 2)])
    return np.asarray(points[:, 0::2] | points[:, 1::2] << 4)


def _fp8(slabs: Iterable[NDArray[np.float32]], scales: list[NDArray[Any]]) -> Iterator[NDArray[Any]]:
    for slab in slabs:
        values, slab_scales = quantize_fp8(slab)
        scales.append(slab_scales)
        yield values
