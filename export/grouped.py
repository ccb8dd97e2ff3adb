"""Integer matrices of safetensors files: (value - zero point) * scale, both of a group of inputs, in words of 32 bits.

Layouts: AutoGPTQ / GPTQModel (arXiv 2210.17323), AutoAWQ's GEMM kernels (arXiv 2306.00978), ``pack-quantized`` of
compressed-tensors. With how many bits and in which groups a matrix is quantized is seen from the tensors.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from outrider.engines.errors import OutriderError
from outrider.export.checkpoint import QuantizedType
from outrider.export.quantize import BLOCK_SIZE, BlockLayout, Integers

FLOATS = ("F32", "F16", "BF16")
Tensor = Callable[..., NDArray[Any]]  # (name, *slices) -> those of the tensor
Shapes = dict[str, tuple[int, ...]]
_AWQ_NIBBLES = np.array([0, 4, 1, 5, 2, 6, 3, 7])  # in which of a word's nibbles each of 8 outputs is


def unknown(path: Path, what: str) -> OutriderError:
    return OutriderError(
        f"{path}: quantization_config in config.json says {what}, which cannot be read; awq (gemm), gptq, fp8 and "
        "compressed-tensors (fp8, packed integers) can; export from the original weights"
    )


@dataclass(frozen=True)
class Grouped(ABC):
    """See ``packed.PackedMatrix``. Its tensors are named ``stem``.something."""

    method: str
    stem: str
    path: Path
    shapes: Shapes
    tensor: Tensor

    @property
    @abstractmethod
    def parts(self) -> dict[str, tuple[str, ...]]: ...

    @property
    @abstractmethod
    def shape(self) -> tuple[int, int]: ...

    @property
    @abstractmethod
    def bits(self) -> int: ...

    @property
    @abstractmethod
    def group_count(self) -> int: ...

    @abstractmethod
    def values(self, start: int, stop: int) -> NDArray[np.uint8]:
        """``[inputs, outputs]``"""

    @abstractmethod
    def zero_points(self, start: int, stop: int) -> NDArray[np.int16]:
        """``[groups, outputs]``"""

    @abstractmethod
    def scales(self, start: int, stop: int) -> NDArray[np.float32]:
        """``[groups, outputs]``"""

    @cached_property
    def type(self) -> QuantizedType:
        name = f"{self.method} {self.bits}-bit"
        groups = self._groups if self.input_order is None else self._groups[self.input_order]
        if not _in_blocks(groups):
            return QuantizedType(f"{name} with uneven groups")
        symmetric = bool((self.zero_points(0, self.shape[0]) == 1 << (self.bits - 1)).all())
        return QuantizedType(name, self.bits, BlockLayout(zero_points=not symmetric))

    @cached_property
    def input_order(self) -> NDArray[np.int64] | None:
        """With GPTQ's act-order, the inputs of a group are anywhere."""
        return None if _in_blocks(self._groups) else np.argsort(self._groups, kind="stable")

    def read(self, start: int, stop: int) -> NDArray[np.float32]:
        values = self.values(start, stop).astype(np.float32)
        points, scales = self.zero_points(start, stop), self.scales(start, stop)
        return np.ascontiguousarray(((values - points[self._groups]) * scales[self._groups]).T)

    def integers(self, start: int, stop: int) -> Integers:
        middle = 1 << (self.bits - 1)
        order: Any = slice(None) if self.input_order is None else self.input_order
        blocks = self._groups[order][::BLOCK_SIZE]
        values = (self.values(start, stop).astype(np.int16) - middle).astype(np.int8)[order].T
        points = None
        if self.type.layout.zero_points:
            points = (self.zero_points(start, stop) - middle).astype(np.int8)[blocks].T
        return Integers(np.ascontiguousarray(values), self.scales(start, stop)[blocks].T, points)

    @cached_property
    def _groups(self) -> NDArray[np.int64]:
        """The group of each input."""
        inputs, count = self.shape[1], self.group_count
        index = next((name for name in self.parts if name.endswith("g_idx") and name in self.shapes), None)
        if index is not None:
            groups = self.tensor(index).astype(np.int64)
            if groups.shape == (inputs,) and groups.min() >= 0 and groups.max() < count:
                return groups
        elif inputs % count == 0:
            return np.arange(inputs) // (inputs // count)
        raise OutriderError(f"{self.path}: {self.stem} has {count} groups for {inputs} inputs; download it again")

    def _checked(self, bits: int, fitting: tuple[int, ...]) -> int:
        if bits not in fitting:
            raise unknown(self.path, f"{self.method} with {bits} bits ({self.stem})")
        return bits


@dataclass(frozen=True)
class QWeight(Grouped):
    """GPTQ and AWQ: for 4 bits, ``qweight`` is ``[inputs / 8, outputs]`` in GPTQ and ``[inputs, outputs / 8]`` in AWQ,
    ``qzeros`` ``[groups, outputs / 8]``, ``scales`` ``[groups, outputs]``.

    ``shift`` is what the stored zero points lack.
    """

    shift: int

    @property
    def parts(self) -> dict[str, tuple[str, ...]]:
        words = {f"{self.stem}.{part}": ("I32",) for part in ("qweight", "qzeros", "g_idx")}
        return words | {f"{self.stem}.scales": FLOATS}

    @property
    def bits(self) -> int:
        columns, outputs = self.shapes[f"{self.stem}.qzeros"][-1], self.shapes[f"{self.stem}.scales"][-1]
        return self._checked(32 * columns // outputs, (4,) if self.method == "awq" else (4, 8))

    @property
    def shape(self) -> tuple[int, int]:
        rows, columns = self.shapes[f"{self.stem}.qweight"]
        size = 32 // self.bits
        return (columns * size, rows) if self.method == "awq" else (columns, rows * size)

    @property
    def group_count(self) -> int:
        return self.shapes[f"{self.stem}.scales"][0]

    def values(self, start: int, stop: int) -> NDArray[np.uint8]:
        if self.method == "awq":
            return self._columns("qweight", start, stop)
        words = self.tensor(f"{self.stem}.qweight", slice(None), slice(start, stop))
        return _unpack(words, self.bits).swapaxes(1, 2).reshape(-1, stop - start)

    def zero_points(self, start: int, stop: int) -> NDArray[np.int16]:
        points = self._columns("qzeros", start, stop).astype(np.int16)
        return np.asarray(points + self.shift & (1 << self.bits) - 1, np.int16)

    def scales(self, start: int, stop: int) -> NDArray[np.float32]:
        return self.tensor(f"{self.stem}.scales", slice(None), slice(start, stop)).astype(np.float32)

    def _columns(self, part: str, start: int, stop: int) -> NDArray[np.uint8]:
        """Columns of a tensor whose words hold neighbouring ones."""
        size = 32 // self.bits
        first = start // size
        words = self.tensor(f"{self.stem}.{part}", slice(None), slice(first, -(-stop // size)))
        values = _unpack(words, self.bits)
        if self.method == "awq":
            values = values[..., _AWQ_NIBBLES]
        return values.reshape(len(words), -1)[:, start - first * size : stop - first * size]


class WeightPacked(Grouped):
    """compressed-tensors: for 4 bits, ``weight_packed`` is ``[outputs, inputs / 8]``, ``weight_scale``
    ``[outputs, groups]``, ``weight_zero_point`` ``[outputs / 8, groups]`` or not there.
    """

    @property
    def parts(self) -> dict[str, tuple[str, ...]]:
        words = {f"{self.stem}.weight_{part}": ("I32",) for part in ("packed", "zero_point", "g_idx")}
        shape = {f"{self.stem}.weight_shape": ("I32", "I64")}
        return words | shape | {f"{self.stem}.weight_scale": FLOATS}

    @cached_property
    def shape(self) -> tuple[int, int]:
        shape = self.tensor(f"{self.stem}.weight_shape").tolist()
        if len(shape) != 2 or shape[0] != self.shapes[f"{self.stem}.weight_packed"][0] or shape[1] < 1:
            raise OutriderError(f"{self.path}: {self.stem}.weight_shape is {shape}; download it again")
        return shape[0], shape[1]

    @property
    def bits(self) -> int:
        return self._checked(32 * self.shapes[f"{self.stem}.weight_packed"][1] // self.shape[1], (4, 8))

    @property
    def group_count(self) -> int:
        return self.shapes[f"{self.stem}.weight_scale"][1]

    def values(self, start: int, stop: int) -> NDArray[np.uint8]:
        words = self.tensor(f"{self.stem}.weight_packed", slice(start, stop))
        return _unpack(words, self.bits).reshape(stop - start, -1)[:, : self.shape[1]].T

    def zero_points(self, start: int, stop: int) -> NDArray[np.int16]:
        name = f"{self.stem}.weight_zero_point"
        if name not in self.shapes:
            return np.full((self.group_count, stop - start), 1 << (self.bits - 1), np.int16)
        size = 32 // self.bits
        first = start // size
        words = self.tensor(name, slice(first, -(-stop // size)))
        points = _unpack(words.T, self.bits).reshape(self.group_count, -1).astype(np.int16)
        return points[:, start - first * size : stop - first * size]

    def scales(self, start: int, stop: int) -> NDArray[np.float32]:
        return self.tensor(f"{self.stem}.weight_scale", slice(start, stop)).astype(np.float32).T


def _in_blocks(groups: NDArray[np.int64]) -> bool:
    """Whether the inputs of each block are of one group."""
    return len(groups) % BLOCK_SIZE == 0 and bool((groups.reshape(-1, BLOCK_SIZE) == groups[::BLOCK_SIZE, None]).all())


def _unpack(words: NDArray[np.int32], bits: int) -> NDArray[np.uint8]:
    """The values of each word, the lowest bits first: one axis more."""
    shifts = np.arange(0, 32, bits, dtype=np.uint32)
    return (np.ascontiguousarray(words).view(np.uint32)[..., None] >> shifts & np.uint32((1 << bits) - 1)).astype(
        np.uint8
    )
