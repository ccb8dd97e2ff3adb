"""Rounding weights: rows of a matrix in blocks of integers or in fp8, and back."""

from __future__ import annotations

from typing import Any, NamedTuple

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

BLOCK_SIZE = 32
ACCURACY_INT8 = 4  # MatMulNBits: activations are quantized to int8 per block of a row, so rows stay independent
_LARGEST_FP8 = 448


class Blocks(NamedTuple):
    """Rows of a matrix in blocks along their inputs, as ``MatMulNBits`` takes them: (value - 2 ** (bits - 1)) * scale.

    ``packed`` is uint8 ``[n, blocks, BLOCK_SIZE * bits / 8]``, two int4 a byte, the first in the low half; ``scales``
    is ``[n, blocks]``. The last block is padded.
    """

    packed: NDArray[np.uint8]
    scales: NDArray[Any]


def quantize_blocks(rows: NDArray[np.float32], bits: int) -> Blocks:
    """ONNX Runtime's symmetric round-to-nearest of ``[n, k]``."""
    from onnxruntime.quantization.matmul_nbits_quantizer import DefaultWeightOnlyQuantConfig as Config
    from onnxruntime.quantization.matmul_nbits_quantizer import DefaultWeightOnlyQuantizer as Quantizer

    config = Config(block_size=BLOCK_SIZE, is_symmetric=True, accuracy_level=ACCURACY_INT8, bits=bits)
    packed, scales, _ = Quantizer(config).qbits_block_quant(np.ascontiguousarray(rows.T))
    return Blocks(packed, scales)


def dequantize_blocks(blocks: Blocks, bits: int, inputs: int) -> NDArray[np.float32]:
    """The inverse of ``quantize_blocks``: ``[n, inputs]``."""
    packed = blocks.packed
    values = np.stack([packed & 15, packed >> 4], axis=-1).reshape(*packed.shape[:2], -1) if bits == 4 else packed
    centred = values.astype(np.float32) - (1 << (bits - 1))
    return np.asarray((centred * blocks.scales[..., None]).reshape(len(packed), -1)[:, :inputs])


def quantize_fp8(rows: NDArray[np.float32]) -> tuple[NDArray[Any], NDArray[np.float16]]:
    """Symmetric round-to-nearest: ``[n, k]`` -> float8_e4m3fn ``[n, k]``, positive scales ``[n]``."""
    largest = np.abs(rows).max(axis=1) / _LARGEST_FP8
    scales = np.maximum(largest.astype(np.float16), np.finfo(np.float16).smallest_subnormal)
    # A scale that was rounded down puts the largest value of its row a little beyond the range, which would be NaN.
    values = np.clip(rows / scales[:, None].astype(np.float32), -_LARGEST_FP8, _LARGEST_FP8)
    return values.astype(ml_dtypes.float8_e4m3fn), scales
