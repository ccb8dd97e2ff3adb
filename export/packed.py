"""Quantized matrices in safetensors files, as ``quantization_config`` of config.json says: integers (``grouped``), fp8.

Which matrices are quantized is seen from the tensors. fp8 has scales of tiles as in DeepSeek-V3 (arXiv 2412.19437), or
those of compressed-tensors.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from outrider.engines.errors import OutriderError
from outrider.export.checkpoint import QuantizedType
from outrider.export.grouped import FLOATS, QWeight, Shapes, Tensor, WeightPacked, unknown
from outrider.export.quantize import Integers

_FP8_TILE = (128, 128)
_INPUT_SCALES = ("input_scale", "activation_scale")


class PackedMatrix(Protocol):
    """See ``checkpoint.Quantized``; also the matrix in float."""

    @property
    def type(self) -> QuantizedType: ...

    @property
    def input_order(self) -> NDArray[np.int64] | None: ...

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
        for stem in _stems(shapes, path, ".qweight", ".qzeros", ".scales"):
            matrices[f"{stem}.weight"] = QWeight(method, stem, path, shapes, tensor, shift)
    elif method == "fp8":
        tile = _tile(quantization.get("weight_block_size"), path)
        matrices |= _fp8_matrices("_scale_inv", tile, path, shapes, tensor)
    elif method == "compressed-tensors":
        tile = _compressed_tile(quantization, path)
        for stem in _stems(shapes, path, ".weight_packed", ".weight_scale", ".weight_shape"):
            matrices[f"{stem}.weight"] = WeightPacked(method, stem, path, shapes, tensor)
        matrices |= _fp8_matrices("_scale", tile, path, shapes, tensor)
    else:
        raise unknown(path, repr(method))
    return matrices


def _stems(shapes: Shapes, path: Path, first: str, *others: str) -> list[str]:
    """What has a tensor that ends in ``first``, and the ``others`` with it."""
    stems = [name.removesuffix(first) for name in shapes if name.endswith(first)]
    for stem in stems:
        _need(shapes, path, f"{stem}{first}", *(f"{stem}{other}" for other in others))
    return stems


def _fp8_matrices(
    suffix: str, tile: tuple[int, int], path: Path, shapes: Shapes, tensor: Tensor
) -> dict[str, PackedMatrix]:
    """Those whose scales have the weight's name with a suffix."""
    matrices: dict[str, PackedMatrix] = {}
    for name in shapes:
        weight = name.removesuffix(suffix)
        if name.endswith(f".weight{suffix}") and f"{weight}_packed" not in shapes:
            _need(shapes, path, name, weight)
            _check_scales(path, name, shapes[name], shapes[weight], tile)
            matrices[weight] = _Fp8(weight, name, shapes[weight], tile, tensor)
    return matrices


def _zero_shift(quantization: dict[str, Any], path: Path) -> int:
    """What the stored zero points of GPTQ and AWQ lack: 1 in the first format of GPTQ."""
    if quantization["quant_method"] == "awq":
        version = str(quantization.get("version", "gemm")).lower()
        if version != "gemm":
            raise unknown(path, f"awq in the version {version!r}")
        return 0
    form = quantization.get("checkpoint_format") or "gptq"
    if form not in ("gptq", "gptq_v2") or quantization.get("is_marlin_format"):
        raise unknown(path, f"gptq in the format {form!r}")
    return 1 if form == "gptq" else 0


def _compressed_tile(quantization: dict[str, Any], path: Path) -> tuple[int, int]:
    """The tile of a scale of compressed-tensors in fp8."""
    groups = quantization.get("config_groups") or {}
    weights = [group.get("weights") or {} for group in groups.values() if isinstance(group, dict)]
    for entry in weights:
        kind, bits = entry.get("type"), entry.get("num_bits")
        if (kind, bits) != ("float", 8) and (kind != "int" or quantization.get("format") != "pack-quantized"):
            form = quantization.get("format")
            raise unknown(path, f"compressed-tensors with {form!r} weights of {bits}-bit {kind}")
    tiles = [entry["block_structure"] for entry in weights if entry.get("block_structure")]
    return _tile(tiles[0] if tiles else None, path)


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


def _need(shapes: Shapes, path: Path, name: str, *others: str) -> None:
    for other in others:
        if other not in shapes:
            raise OutriderError(f"{path} has a tensor {name} and no {other}, which belongs to it; download it again")


@dataclass(frozen=True)
class _Fp8:
    """float8_e4m3fn with a scale for all, for each output, or for each tile of outputs and inputs."""

    weight: str
    scale: str
    shape: tuple[int, ...]
    tile: tuple[int, int]
    tensor: Tensor

    type = QuantizedType("fp8")
    input_order = None

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
