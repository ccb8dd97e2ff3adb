"""Blocks of GGUF tensors as integers, scales and offsets (layouts: ggml's ``ggml-common.h``), without rounding."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from outrider.export.checkpoint import QuantizedType
from outrider.export.quantize import BLOCK_SIZE, SYMMETRIC, BlockLayout, Integers

Bytes = NDArray[np.uint8]


@dataclass(frozen=True)
class GGUFMatrix:
    """See ``checkpoint.Quantized``."""

    type: QuantizedType
    integers: Callable[[int, int], Integers]
    input_order = None


def read_integers(rows: Bytes, kind: str) -> Integers:
    """Rows ``[n, bytes]`` of one of ``TYPES``."""
    size, read = _READERS[kind]
    parts: list[Any] = [None if part is None else part.reshape(len(rows), -1) for part in read(rows.reshape(-1, size))]
    return Integers(*parts)


def _q4_0(blocks: Bytes) -> Integers:
    return Integers(_nibbles(blocks[:, 2:]) - np.int8(8), _half(blocks[:, :2]))


def _q4_1(blocks: Bytes) -> Integers:
    scales = _half(blocks[:, :2])
    return _with_minimum(_nibbles(blocks[:, 4:]), scales, _half(blocks[:, 2:4]))


def _q5_0(blocks: Bytes) -> Integers:
    high = np.unpackbits(blocks[:, 2:6], axis=1, bitorder="little").view(np.int8) << 4
    return Integers((_nibbles(blocks[:, 6:]) | high) - np.int8(16), _half(blocks[:, :2]))


def _q8_0(blocks: Bytes) -> Integers:
    return Integers(blocks[:, 2:].view(np.int8), _half(blocks[:, :2]))


def _q3_k(blocks: Bytes) -> Integers:
    mask, low, packed = blocks[:, :32], blocks[:, 32:96], blocks[:, 96:108]
    pairs = low.reshape(-1, 2, 1, 32) >> np.array([0, 2, 4, 6], np.uint8)[:, None] & 3
    high = mask[:, None] >> np.arange(8, dtype=np.uint8)[:, None] & 1
    values = (pairs.reshape(-1, 8, 32) | high << 2).view(np.int8) - np.int8(4)
    low_scales = np.concatenate([packed[:, :8] & 15, packed[:, :8] >> 4], axis=1)
    high_scales = packed[:, None, 8:] >> np.array([0, 2, 4, 6], np.uint8)[:, None] & 3
    scales = (low_scales | high_scales.reshape(-1, 16) << 4).view(np.int8) - np.int8(32)
    return Integers(values, _half(blocks[:, 108:]) * scales)


def _q4_k(blocks: Bytes) -> Integers:
    from gguf.quants import Q4_K

    scales, minima = Q4_K.get_scale_min(blocks[:, 4:16])
    values = blocks[:, 16:].reshape(-1, 4, 1, 32) >> np.array([0, 4], np.uint8)[:, None] & 15
    scale, minimum = _half(blocks[:, :2]) * scales, _half(blocks[:, 2:4]) * minima
    return _with_minimum(values.reshape(-1, 8, 32).view(np.int8), scale, -minimum)


def _q6_k(blocks: Bytes) -> Integers:
    low, high = blocks[:, :128].reshape(-1, 2, 1, 64), blocks[:, 128:192].reshape(-1, 2, 1, 32)
    values = (low >> np.array([0, 4], np.uint8)[:, None] & 15).reshape(-1, 2, 4, 32)
    values = values | (high >> np.array([0, 2, 4, 6], np.uint8)[:, None] & 3) << 4
    return Integers(values.view(np.int8) - np.int8(32), _half(blocks[:, 208:]) * blocks[:, 192:208].view(np.int8))


def _half(content: Bytes) -> NDArray[np.float32]:
    return np.ascontiguousarray(content).view(np.float16).astype(np.float32)


def _nibbles(content: Bytes) -> NDArray[np.int8]:
    """All low halves, then all high ones."""
    return np.concatenate([content & 15, content >> 4], axis=1).view(np.int8)


def _with_minimum(values: NDArray[np.int8], scales: NDArray[np.float32], minima: NDArray[np.float32]) -> Integers:
    """Values from 0 to 15 with the smallest weight of each block, around the middle: what is multiplied is small."""
    return Integers(values - np.int8(8), scales, None, minima + 8 * scales)


# Bytes a block, and what reads it.
_READERS: dict[str, tuple[int, Callable[[Bytes], Integers]]] = {
    "Q4_0": (18, _q4_0),
    "Q4_1": (20, _q4_1),
    "Q5_0": (22, _q5_0),
    "Q8_0": (34, _q8_0),
    "Q3_K": (110, _q3_k),
    "Q4_K": (144, _q4_k),
    "Q6_K": (210, _q6_k),
}
_SHIFTED, _SMALL = BlockLayout(offsets=True), BlockLayout(BLOCK_SIZE // 2)
# The other types have offsets, and bits that no precision has, so that they would never be taken over.
TYPES = {
    name: QuantizedType(name, int(name[1]), layout)
    for name, layout in {
        "Q4_0": SYMMETRIC,
        "Q4_1": _SHIFTED,
        "Q5_0": SYMMETRIC,
        "Q8_0": SYMMETRIC,
        "Q3_K": _SMALL,
        "Q4_K": _SHIFTED,
        "Q6_K": _SMALL,
    }.items()
}
