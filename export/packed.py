"""Quantized matrices in safetensors files: GPTQ, AWQ and fp8, as ``quantization_config`` of config.json says.

Layouts: AutoGPTQ / GPTQModel (arXiv 2210.17323), AutoAWQ's GEMM kernels (arXiv 2306.00978), fp8 weights with scales of
tiles as DeepSeek-V3 has them (arXiv 2412.19437), compressed-tensors. Which matrices are
quantized, with how many bits and in which groups, is seen from the tensors.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from outrider.engines.errors import OutriderError
from outrider.export.checkpoint import QuantizedType
from outrider.export.quantize import BLOCK_SIZE, BlockLayout, Integers

Tensor = Callable[..., NDArray[Any]]  # (name, *slices) -> those of the tensor
Shapes = dict[str, tuple[int, ...]]
_AWQ_NIBBLES = np.array([0, 4, 1, 5, 2, 6, 3, 7])  # in which of a word's nibbles each of 8 outputs is
_FP8_TILE = (128, 128)
_INPUT_SCALES = ("input_scale", "activation_scale")
FLOATS = ("F32", "F16", "BF16")


class PackedMatrix(Protocol):
    """See ``checkpoint.Quantized``; also the matrix in float."""

    @property
    def type(self) -> QuantizedType: ...

    @property
    def order(self) -> NDArray[np.int64] | None: ...

    @property
    def shape(self) -> tuple[int, ...]: ...

    @property
    def parts(self) -> dict[str, tuple[str, ...]]:
        """The names of all tensors that belong to it, with the dtypes that they may have."""
        ...

    def read(self, start: int, stop: int) -> NDArray[np.float32]: ...

    def integers(self, start: int, stop: int) -> Integers: ...


def packed_matrices(config: dict[str, Any], path: Path, shapes: Shapes, tensor: Tensor) -> dict[str, PackedMatrix]:
    """The quantized matrices of a folder by the name of the weight that they stand for.

    Raises:
        OutriderError: a method that is not read, by its name, or a matrix of which a part is missing.
    """
    quantization = config.get("quantization_config")
    if not quantization:
        return {}
    method = quantization.get("quant_method") if isinstance(quantization, dict) else quantization
    matrices: dict[str, PackedMatrix] = {}
    if method in ("gptq", "awq"):
        shift = _zero_shift(quantization, path)
        for name in shapes:
            if name.endswith(".qweight"):
                stem = name.removesuffix(".qweight")
                _need(shapes, path, name, f"{stem}.qzeros", f"{stem}.scales")
                matrices[f"{stem}.weight"] = _Grouped(method, shift, stem, path, shapes, tensor)
        return matrices
    suffix, tile = _fp8_scales(quantization, method, path)
    for name in shapes:
        if name.endswith(suffix):
            weight = name.removesuffix(suffix)
            _need(shapes, path, name, weight)
            _check_scales(path, name, shapes[name], shapes[weight], tile)
            matrices[weight] = _Fp8(weight, name, shapes[weight], tile, tensor)
    return matrices


def _zero_shift(quantization: dict[str, Any], path: Path) -> int:
    """What the stored zero points of GPTQ and AWQ lack: 1 in the first format of GPTQ."""
    if quantization["quant_method"] == "awq":
        version = str(quantization.get("version", "gemm")).lower()
        if version != "gemm":
            raise _unknown(path, f"awq in the version {version!r}")
        return 0
    form = quantization.get("checkpoint_format") or "gptq"
    if form not in ("gptq", "gptq_v2") or quantization.get("is_marlin_format"):
        raise _unknown(path, f"gptq in the format {form!r}")
    return 1 if form == "gptq" else 0


def _fp8_scales(quantization: Any, method: Any, path: Path) -> tuple[str, tuple[int, int]]:
    """What names of scales end in behind the weight's, and the tile of a scale where there are many."""
    if method == "fp8":
        return "_scale_inv", _tile(quantization.get("weight_block_size"), path)
    if method != "compressed-tensors":
        raise _unknown(path, repr(method))
    groups = quantization.get("config_groups") or {}
    weights = [group.get("weights") or {} for group in groups.values() if isinstance(group, dict)]
    for entry in weights:
        if (entry.get("type"), entry.get("num_bits")) != ("float", 8):
            raise _unknown(path, f"compressed-tensors with weights of {entry.get('num_bits')}-bit {entry.get('type')}")
    tiles = [entry["block_structure"] for entry in weights if entry.get("block_structure")]
    return "_scale", _tile(tiles[0] if tiles else None, path)


def _tile(size: Any, path: Path) -> tuple[int, int]:
    if size is None:
        return _FP8_TILE
    if not isinstance(size, list) or len(size) != 2 or not all(isinstance(part, int) and part > 0 for part in size):
        raise OutriderError(f"{path / 'config.json'}: a block of the quantized weights is {size!r}, not two sizes")
    return size[0], size[1]


def _check_scales(
    path: Path, name: str, scales: tuple[int, ...], weight: tuple[int, ...], tile: tuple[int, int]
) -> None:
    outputs, inputs = weight if len(weight) == 2 else (0, 0)
    fitting = [(), (1,), (1, 1), (outputs,), (outputs, 1), (-(-outputs // tile[0]), -(-inputs // tile[1]))]
    if not outputs or scales not in fitting:
        raise OutriderError(
            f"{path}: tensor {name} has shape {list(scales)}, which fits no weight of {list(weight)} in blocks of "
            f"{list(tile)}"
        )


def _unknown(path: Path, what: str) -> OutriderError:
    return OutriderError(
        f"{path}: quantization_config in config.json says {what}, which cannot be read; awq (gemm), gptq, fp8 and "
        "compressed-tensors in fp8 can; export from the original weights"
    )


def _need(shapes: Shapes, path: Path, name: str, *others: str) -> None:
    for other in others:
        if other not in shapes:
            raise OutriderError(f"{path} has a tensor {name} and no {other}, which belongs to it; download it again")


@dataclass(frozen=True)
class _Grouped:
    """(value - zero point) * scale, both of a group of inputs; values in words of 32 bits.

    ``qweight`` of GPTQ is ``[inputs / 8, outputs]``, that of AWQ ``[inputs, outputs / 8]`` (for 4 bits); ``qzeros`` is
    ``[groups, outputs / 8]``, ``scales`` ``[groups, outputs]``. ``shift`` is what the stored zero points lack.
    """

    method: str
    shift: int
    stem: str
    path: Path
    shapes: Shapes
    tensor: Tensor

    @property
    def parts(self) -> dict[str, tuple[str, ...]]:
        return {f"{self.stem}.{part}": ("I32",) for part in ("qweight", "qzeros", "g_idx")} | {
            f"{self.stem}.scales": FLOATS
        }

    @cached_property
    def bits(self) -> int:
        columns, outputs = self.shapes[f"{self.stem}.qzeros"][-1], self.shapes[f"{self.stem}.scales"][-1]
        bits = 32 * columns // outputs
        if bits not in ((4,) if self.method == "awq" else (4, 8)):
            raise _unknown(self.path, f"{self.method} with {bits} bits ({self.stem})")
        return bits

    @cached_property
    def shape(self) -> tuple[int, int]:
        rows, columns = self.shapes[f"{self.stem}.qweight"]
        size = 32 // self.bits
        return (columns * size, rows) if self.method == "awq" else (columns, rows * size)

    @cached_property
    def type(self) -> QuantizedType:
        name = f"{self.method} {self.bits}-bit"
        groups = self._groups if self.order is None else self._groups[self.order]
        if not _in_blocks(groups):
            return QuantizedType(f"{name} with uneven groups")
        symmetric = bool((self._zero_points(0, self.shape[0]) == 1 << (self.bits - 1)).all())
        return QuantizedType(name, self.bits, BlockLayout(zero_points=not symmetric))

    @cached_property
    def order(self) -> NDArray[np.int64] | None:
        """With GPTQ's act-order, the inputs of a group are anywhere."""
        return None if _in_blocks(self._groups) else np.argsort(self._groups, kind="stable")

    def read(self, start: int, stop: int) -> NDArray[np.float32]:
        values = self._values(start, stop).astype(np.float32)
        points, scales = self._zero_points(start, stop), self._scales(start, stop)
        return np.ascontiguousarray(((values - points[self._groups]) * scales[self._groups]).T)

    def integers(self, start: int, stop: int) -> Integers:
        middle = 1 << (self.bits - 1)
        order: Any = slice(None) if self.order is None else self.order
        blocks = self._groups[order][::BLOCK_SIZE]
        values = (self._values(start, stop).astype(np.int16) - middle).astype(np.int8)[order].T
        points = None
        if self.type.layout.zero_points:
            points = (self._zero_points(start, stop) - middle).astype(np.int8)[blocks].T
        return Integers(np.ascontiguousarray(values), self._scales(start, stop)[blocks].T, points)

    @cached_property
    def _groups(self) -> NDArray[np.int64]:
        """The group of each input."""
        inputs, count = self.shape[1], self.shapes[f"{self.stem}.scales"][0]
        if f"{self.stem}.g_idx" in self.shapes:
            groups = self.tensor(f"{self.stem}.g_idx").astype(np.int64)
            if groups.shape == (inputs,) and groups.min() >= 0 and groups.max() < count:
                return groups
        elif inputs % count == 0:
            return np.arange(inputs) // (inputs // count)
        raise OutriderError(f"{self.path}: {self.stem} has {count} groups for {inputs} inputs; download it again")

    def _values(self, start: int, stop: int) -> NDArray[np.uint8]:
        """``[inputs, outputs]``"""
        if self.method == "awq":
            return self._columns("qweight", start, stop)
        words = self.tensor(f"{self.stem}.qweight", slice(None), slice(start, stop))
        return _unpack(words, self.bits).swapaxes(1, 2).reshape(-1, stop - start)

    def _zero_points(self, start: int, stop: int) -> NDArray[np.int16]:
        """``[groups, outputs]``"""
        points = self._columns("qzeros", start, stop).astype(np.int16)
        return np.asarray(points + self.shift & (1 << self.bits) - 1, np.int16)

    def _scales(self, start: int, stop: int) -> NDArray[np.float32]:
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


def _in_blocks(groups: NDArray[np.int64]) -> bool:
    """Whether the inputs of each block are of one group."""
    return len(groups) % BLOCK_SIZE == 0 and bool((groups.reshape(-1, BLOCK_SIZE) == groups[::BLOCK_SIZE, None]).all())


def _unpack(words: NDArray[np.int32], bits: int) -> NDArray[np.uint8]:
    """The values of each word, the lowest bits first: one axis more."""
    shifts = np.arange(0, 32, bits, dtype=np.uint32)
    return (words.view(np.uint32)[..., None] >> shifts & np.uint32((1 << bits) - 1)).astype(np.uint8)


@dataclass(frozen=True)
class _Fp8:
    """float8_e4m3fn with a scale for all, for each output, or for each tile of outputs and inputs."""

    weight: str
    scale: str
    shape: tuple[int, ...]
    tile: tuple[int, int]
    tensor: Tensor

    type = QuantizedType("fp8")
    order = None

    @property
    def parts(self) -> dict[str, tuple[str, ...]]:
        stem = self.weight.removesuffix("weight")  # scales of its inputs are of no use where these stay floats
        return {self.weight: ("F8_E4M3",), self.scale: FLOATS} | {f"{stem}{name}": FLOATS for name in _INPUT_SCALES}

    def read(self, start: int, stop: int) -> NDArray[np.float32]:
        rows = self.tensor(self.weight, slice(start, stop)).astype(np.float32)
        scales = self.tensor(self.scale).astype(np.float32)
        if scales.size == 1:
            return np.asarray(rows * scales.reshape(()))
        scales = scales.reshape(len(scales), -1)
        if len(scales) != self.shape[0]:
            scales = scales.repeat(self.tile[0], axis=0)
        if scales.shape[1] > 1:
            scales = scales.repeat(self.tile[1], axis=1)[:, : self.shape[1]]
        return np.asarray(rows * scales[start:stop])

    def integers(self, start: int, stop: int) -> Integers:
        raise NotImplementedError  # its type has no bits
