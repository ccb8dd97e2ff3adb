"""Weight formats: how a matrix is stored, and the operator that multiplies by it or looks rows up in it.

All matrices keep the checkpoint's layout ``[outputs, inputs]``, so that each is written in one pass over its rows and a
tied embedding and head are the same bytes (but see ``embeds_apart``).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any, Protocol

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from outrider.engines.errors import OutriderError
from outrider.export.checkpoint import Checkpoint, TokenizerFiles
from outrider.export.graph import CONTRIB, GraphBuilder
from outrider.export.spec import DecoderSpec

PRECISIONS_OF = {"fused": ("fp32", "fp16", "int8", "int4"), "standard": ("fp32", "fp16", "bf16", "fp8", "int4")}
PRECISIONS = tuple(dict.fromkeys(PRECISIONS_OF["fused"] + PRECISIONS_OF["standard"]))
BITS = {"int8": 8, "int4": 4}  # of the precisions that are stored in blocks
BLOCK_SIZE = 32
_LARGEST_FP8 = 448
_APART = "apart:"  # before the name of the embedding, where the reference shall read it as ``embeds_apart`` says
_ACCURACY_INT8 = 4  # MatMulNBits: activations are quantized to int8 per block of a row, so rows stay independent


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


def dequantize_blocks(
    packed: NDArray[np.uint8], scales: NDArray[np.float32], bits: int, inputs: int
) -> NDArray[np.float32]:
    """The inverse of ``quantize_blocks``: ``[n, inputs]``, two int4 a byte, the first in the low half."""
    values = np.stack([packed & 15, packed >> 4], axis=-1).reshape(*packed.shape[:2], -1) if bits == 4 else packed
    centred = values.astype(np.float32) - (1 << (bits - 1))
    return np.asarray((centred * scales[..., None]).reshape(len(packed), -1)[:, :inputs])


class StoredCheckpoint:
    """A checkpoint as it comes back from its storage: what is rounded is rounded, all else as it was.

    Args:
        others: the precision of tensors that have one of their own, by stem.
    """

    def __init__(self, checkpoint: Checkpoint, precision: str, others: dict[str, str] | None = None) -> None:
        self.path = checkpoint.path
        self.config = checkpoint.config
        self._checkpoint = checkpoint
        self._precision = precision
        self._others = others or {}

    def shape(self, name: str) -> tuple[int, ...] | None:
        return self._checkpoint.shape(name)

    def tokenizer(self) -> TokenizerFiles:
        return self._checkpoint.tokenizer()

    def read(self, name: str, start: int, stop: int) -> NDArray[np.float32]:
        rows = self._checkpoint.read(name.removeprefix(_APART), start, stop)
        precision = self._others.get(name.removesuffix(".weight"), self._precision)
        if precision == "bf16":
            return rows.astype(ml_dtypes.bfloat16).astype(np.float32)
        if rows.ndim == 1 or name.startswith(_APART) or precision in ("fp32", "fp16"):
            return rows
        if precision == "fp8":
            values, scales = quantize_fp8(rows)
            return values.astype(np.float32) * scales[:, None].astype(np.float32)
        bits = BITS[precision]
        return dequantize_blocks(*quantize_blocks(rows, bits), bits, rows.shape[1])


def as_stored(
    spec: DecoderSpec, checkpoint: Checkpoint, lowering: str, precision: str, head_precision: str
) -> tuple[DecoderSpec, Checkpoint]:
    """The model that an exact engine would be, for ``reference_logits``: the very arguments where little is rounded."""
    if {precision, head_precision} <= {"fp32", "fp16"}:
        return spec, checkpoint
    others = dict.fromkeys((spec.embedding, spec.head), head_precision)
    if embeds_apart(lowering, head_precision):
        spec = replace(spec, embedding=_APART + spec.embedding)
    return spec, StoredCheckpoint(checkpoint, precision, others)


def check_head_precision(lowering: str, precision: str, head_precision: str) -> None:
    """Raises OutriderError for a head that does not take the activations of the other matrices."""
    wanted = float_type(lowering, precision)
    fitting = [name for name in PRECISIONS_OF[lowering] if float_type(lowering, name) == wanted]
    if head_precision not in fitting:
        raise OutriderError(
            f"--head-precision {head_precision} does not go with --precision {precision} --lowering {lowering}; use "
            f"{' or '.join(fitting)}"
        )


def float_type(lowering: str, precision: str) -> str:
    """The dtype of activations and caches."""
    if precision == "bf16":
        return "bfloat16"
    return "float16" if precision == "fp16" or embeds_apart(lowering, precision) else "float32"


def embeds_apart(lowering: str, precision: str) -> bool:
    """Whether the embedding is stored in float beside the quantized matrices: TensorRT looks up no quantized rows."""
    return lowering == "standard" and precision in ("fp8", "int4")


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


def quantize_fp8(rows: NDArray[np.float32]) -> tuple[NDArray[Any], NDArray[np.float16]]:
    """Symmetric round-to-nearest: ``[n, k]`` -> float8_e4m3fn ``[n, k]``, positive scales ``[n]``."""
    largest = np.abs(rows).max(axis=1) / _LARGEST_FP8
    scales = np.maximum(largest.astype(np.float16), np.finfo(np.float16).smallest_subnormal)
    # A scale that was rounded down puts the largest value of its row a little beyond the range, which would be NaN.
    values = np.clip(rows / scales[:, None].astype(np.float32), -_LARGEST_FP8, _LARGEST_FP8)
    return values.astype(ml_dtypes.float8_e4m3fn), scales


def _fp8(slabs: Iterable[NDArray[np.float32]], scales: list[NDArray[Any]]) -> Iterator[NDArray[Any]]:
    for slab in slabs:
        values, slab_scales = quantize_fp8(slab)
        scales.append(slab_scales)
        yield values
