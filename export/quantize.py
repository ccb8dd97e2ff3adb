"""Rounding weights: rows of a matrix in blocks of integers or in fp8, and back; integers that a file already holds."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

BLOCK_SIZE = 32
ACCURACY_INT8 = 4  # MatMulNBits: activations are quantized to int8 per block of a row, so rows stay independent
_LARGEST_FP8 = 448


class Integers(NamedTuple):
    """Rows of a matrix as a quantized checkpoint holds them: (values - zero_points) * scales + offsets.

    ``values`` is int8 ``[n, k]``, symmetric around 0 but for the lowest value; all else is ``[n, blocks]``, of 16 or
    ``BLOCK_SIZE`` inputs each: scales and offsets float32, zero points int8.
    """

    values: NDArray[np.int8]
    scales: NDArray[np.float32]
    zero_points: NDArray[np.int8] | None = None
    offsets: NDArray[np.float32] | None = None

    def rows(self, order: Any) -> Integers:
        """Those that ``order`` takes from the rows."""
        parts: list[Any] = [None if part is None else np.ascontiguousarray(part[order]) for part in self]
        return Integers(*parts)


class Blocks(NamedTuple):
    """Rows of a matrix in blocks along their inputs, as ``MatMulNBits`` takes them: (value - zero_point) * scale.

    ``packed`` is uint8 ``[n, blocks, block_size * bits / 8]``, two int4 a byte, the first in the low half; ``scales``
    is ``[n, blocks]``. The last block is padded. ``zero_points``, uint8 ``[n, blocks]``, are 2 ** (bits - 1) where
    there are none. ``offsets``, float32 ``[n, blocks]``, are to be added to every value of a block.
    """

    packed: NDArray[np.uint8]
    scales: NDArray[Any]
    zero_points: NDArray[np.uint8] | None = None
    offsets: NDArray[np.float32] | None = None


@dataclass(frozen=True)
class BlockLayout:
    """What all blocks of a matrix have: inputs a block, and whether zero points and offsets are stored."""

    block_size: int = BLOCK_SIZE
    zero_points: bool = False
    offsets: bool = False


SYMMETRIC = BlockLayout()


def rounded_layout(bits: int) -> BlockLayout:
    """Of blocks that are rounded for ``MatMulNBits``: int4 has zero points, which are no slower and come nearer to the
    weights than symmetric blocks; int8 is near enough without.
    """
    return BlockLayout(zero_points=bits == 4)


def pack_blocks(rows: Integers, bits: int) -> Blocks:
    """Integers of at most ``bits`` bits, without rounding."""
    middle = 1 << (bits - 1)
    values = (rows.values.astype(np.int16) + middle).astype(np.uint8)
    packed: NDArray[Any] = values[:, 0::2] | values[:, 1::2] << 4 if bits == 4 else values
    zero_points = None if rows.zero_points is None else (rows.zero_points.astype(np.int16) + middle).astype(np.uint8)
    return Blocks(packed.reshape(*rows.scales.shape, -1), rows.scales, zero_points, rows.offsets)


def conform(blocks: Blocks, bits: int, layout: BlockLayout) -> Blocks:
    """The same values in a layout that can hold them: scales repeated, default zero points and offsets filled in."""
    n, count = blocks.scales.shape
    times = blocks.packed.shape[2] * 8 // bits // layout.block_size
    parts: list[Any] = [None if part is None else part.reshape(n, count).repeat(times, axis=1) for part in blocks[1:]]
    if layout.zero_points and parts[1] is None:
        parts[1] = np.full(parts[0].shape, 1 << (bits - 1), np.uint8)
    if layout.offsets and parts[2] is None:
        parts[2] = np.zeros(parts[0].shape, np.float32)
    return Blocks(blocks.packed.reshape(n, count * times, -1), *parts)


def quantize_blocks(rows: NDArray[np.float32], bits: int, *, zero_points: bool = False) -> Blocks:
    """ONNX Runtime's round-to-nearest of ``[n, k]``: symmetric, or with zero points from end to end of each block."""
    from onnxruntime.quantization.matmul_nbits_quantizer import DefaultWeightOnlyQuantConfig as Config
    from onnxruntime.quantization.matmul_nbits_quantizer import DefaultWeightOnlyQuantizer as Quantizer

    config = Config(block_size=BLOCK_SIZE, is_symmetric=not zero_points, accuracy_level=ACCURACY_INT8, bits=bits)
    packed, scales, points = Quantizer(config).qbits_block_quant(np.ascontiguousarray(rows.T))
    return Blocks(packed, scales, _unpacked(points, bits)[:, : scales.shape[1]] if zero_points else None)


def dequantize_blocks(blocks: Blocks, bits: int, inputs: int) -> NDArray[np.float32]:
    """The inverse of ``quantize_blocks`` and ``pack_blocks``: ``[n, inputs]``."""
    zero_points = np.float32(1 << (bits - 1)) if blocks.zero_points is None else blocks.zero_points[..., None]
    rows = (_unpacked(blocks.packed, bits).astype(np.float32) - zero_points) * blocks.scales[..., None]
    if blocks.offsets is not None:
        rows = rows + blocks.offsets[..., None]
    return np.asarray(rows.reshape(len(rows), -1)[:, :inputs])


def _unpacked(packed: NDArray[np.uint8], bits: int) -> NDArray[np.uint8]:
    """Integers of ``bits`` bits out of the bytes of the last axis."""
    if bits == 8:
        return packed
    return np.stack([packed & 15, packed >> 4], axis=-1).reshape(*packed.shape[:-1], -1)


def quantize_fp8(rows: NDArray[np.float32]) -> tuple[NDArray[Any], NDArray[np.float16]]:
    """Symmetric round-to-nearest: ``[n, k]`` -> float8_e4m3fn ``[n, k]``, positive scales ``[n]``."""
    largest = np.abs(rows).max(axis=1) / _LARGEST_FP8
    scales = np.maximum(largest.astype(np.float16), np.finfo(np.float16).smallest_subnormal)
    # A scale that was rounded down puts the largest value of its row a little beyond the range, which would be NaN.
    values = np.clip(rows / scales[:, None].astype(np.float32), -_LARGEST_FP8, _LARGEST_FP8)
    return values.astype(ml_dtypes.float8_e4m3fn), scales
