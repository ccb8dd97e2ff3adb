"""Weight formats: how a matrix is stored, and the operator that multiplies by it or looks rows up in it.

All matrices keep the checkpoint's layout ``[outputs, inputs]``, so that each is written in one pass over its rows and a
tied embedding and head are the same bytes.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from outrider.export.checkpoint import Checkpoint, TokenizerFiles
from outrider.export.graph import CONTRIB, GraphBuilder

PRECISIONS = ("fp32", "fp16", "int8", "int4")
BITS = {"int8": 8, "int4": 4}  # of the precisions that are stored in blocks
BLOCK_SIZE = 32
_ACCURACY_INT8 = 4  # MatMulNBits: activations are quantized to int8 per block of a row, so rows stay independent


class Matrix(Protocol):
    """A stored matrix ``[outputs, inputs]``."""

    def matmul(self, x: str, name: str, bias: str | None = None) -> str:
        """``x @ matrix.T (+ bias)`` -> ``[..., outputs]``."""
        ...

    def gather(self, ids: str, name: str) -> str:
        """Rows of the matrix -> ``[..., inputs]``."""
        ...


class FloatMatrix:
    """fp32 or fp16, as stored in the checkpoint."""

    def __init__(self, graph: GraphBuilder, name: str, shape: tuple[int, int], slabs: Iterable[NDArray[np.float32]]):
        self._graph = graph
        self._weight = graph.weight(name, graph.float_dtype, shape, slabs)

    def matmul(self, x: str, name: str, bias: str | None = None) -> str:
        # Engines fold the transposition of a constant into their own packing.
        transposed = self._graph.node("Transpose", [self._weight], f"{name}.transposed", perm=[1, 0])
        product = self._graph.node("MatMul", [x, transposed], name if bias is None else f"{name}.product")
        return product if bias is None else self._graph.node("Add", [product, bias], name)

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
            accuracy_level=_ACCURACY_INT8,
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


def dequantize_blocks(
    packed: NDArray[np.uint8], scales: NDArray[np.float32], bits: int, inputs: int
) -> NDArray[np.float32]:
    """The inverse of ``quantize_blocks``: ``[n, inputs]``, two int4 a byte, the first in the low half."""
    values = np.stack([packed & 15, packed >> 4], axis=-1).reshape(*packed.shape[:2], -1) if bits == 4 else packed
    centred = values.astype(np.float32) - (1 << (bits - 1))
    return np.asarray((centred * scales[..., None]).reshape(len(packed), -1)[:, :inputs])


class StoredCheckpoint:
    """A checkpoint as it comes back from a precision's storage: matrices rounded to blocks, all else as it was."""

    def __init__(self, checkpoint: Checkpoint, precision: str) -> None:
        self.path = checkpoint.path
        self.config = checkpoint.config
        self._checkpoint = checkpoint
        self._bits = BITS[precision]

    def shape(self, name: str) -> tuple[int, ...] | None:
        return self._checkpoint.shape(name)

    def tokenizer(self) -> TokenizerFiles:
        return self._checkpoint.tokenizer()

    def read(self, name: str, start: int, stop: int) -> NDArray[np.float32]:
        rows = self._checkpoint.read(name, start, stop)
        if rows.ndim == 1:
            return rows
        return dequantize_blocks(*quantize_blocks(rows, self._bits), self._bits, rows.shape[1])


def store_matrix(
    graph: GraphBuilder, name: str, shape: tuple[int, int], slabs: Iterable[NDArray[np.float32]], precision: str
) -> Matrix:
    """Write a matrix to the weights file in ``precision`` (one of ``PRECISIONS``)."""
    if precision not in BITS:
        return FloatMatrix(graph, name, shape, slabs)
    return BlockMatrix(graph, name, shape, slabs, BITS[precision])


def quantize_blocks(rows: NDArray[np.float32], bits: int) -> tuple[NDArray[np.uint8], NDArray[np.float32]]:
    """ONNX Runtime's symmetric round-to-nearest: ``[n, k]`` -> bytes ``[n, blocks, blob]``, scales ``[n, blocks]``."""
    from onnxruntime.quantization.matmul_nbits_quantizer import DefaultWeightOnlyQuantConfig as Config
    from onnxruntime.quantization.matmul_nbits_quantizer import DefaultWeightOnlyQuantizer as Quantizer

    config = Config(block_size=BLOCK_SIZE, is_symmetric=True, accuracy_level=_ACCURACY_INT8, bits=bits)
    packed, scales, _ = Quantizer(config).qbits_block_quant(np.ascontiguousarray(rows.T))
    return packed, scales


def _packed(slabs: Iterable[NDArray[np.float32]], bits: int, scales: list[NDArray[Any]]) -> Iterator[NDArray[np.uint8]]:
    """The packed bytes slab by slab; the scales, a small part of the whole, are kept for the caller."""
    for slab in slabs:
        packed, slab_scales = quantize_blocks(slab, bits)
        scales.append(slab_scales)
        yield packed
