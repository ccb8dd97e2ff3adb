"""Checkpoints quantized as GPTQ, AWQ and fp8 write them, from tiny folders; written word by word from the formats."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from gguf_files import tensor_names
from numpy.typing import NDArray
from safetensors.numpy import save_file

from outrider.export.checkpoint import open_checkpoint, read_all

Tensors = dict[str, NDArray[Any]]
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)  # the output that each nibble of a word belongs to, from the lowest


def words(values: NDArray[Any], bits: int, order: tuple[int, ...] | None = None) -> NDArray[np.int32]:
    """Neighbours along the last axis in words of 32 bits."""
    size = 32 // bits
    packed = np.zeros((*values.shape[:-1], values.shape[-1] // size), np.uint32)
    for word in range(packed.shape[-1]):
        for place in range(size):
            at = word * size + (place if order is None else order[place])
            packed[..., word] |= values[..., at].astype(np.uint32) << np.uint32(place * bits)
    return packed.view(np.int32)


def grid(rng: np.random.Generator, shape: tuple[int, int], bits: int, group: int, symmetric: bool) -> Tensors:
    """Random integers ``[outputs, inputs]``, and of each group of inputs a zero point and a scale."""
    outputs, inputs = shape
    zeros = rng.integers(0, 1 << bits, (outputs, inputs // group))
    if symmetric:
        zeros[:] = 1 << (bits - 1)
    scales = rng.uniform(0.5, 1, zeros.shape) * 0.5 / (1 << bits)
    return {"values": rng.integers(0, 1 << bits, shape), "zeros": zeros, "scales": scales.astype(np.float16)}


def gptq(stem: str, parts: Tensors, bits: int, shift: int) -> Tensors:
    zeros = (parts["zeros"] - shift) % (1 << bits)
    return {
        f"{stem}.qweight": np.ascontiguousarray(words(parts["values"], bits).T),
        f"{stem}.qzeros": words(zeros.T, bits),
        f"{stem}.scales": np.ascontiguousarray(parts["scales"].T),
        f"{stem}.g_idx": parts["groups"].astype(np.int32),
    }


def awq(stem: str, parts: Tensors) -> Tensors:
    return {
        f"{stem}.qweight": words(np.ascontiguousarray(parts["values"].T), 4, AWQ_ORDER),
        f"{stem}.qzeros": words(parts["zeros"].T, 4, AWQ_ORDER),
        f"{stem}.scales": np.ascontiguousarray(parts["scales"].T),
    }


def fp8(rng: np.random.Generator, stem: str, shape: tuple[int, int], tile: int) -> tuple[Tensors, NDArray[np.float32]]:
    values = (rng.standard_normal(shape) * 50).astype(ml_dtypes.float8_e4m3fn)
    scales = rng.uniform(0.001, 0.002, [-(-size // tile) for size in shape]).astype(np.float32)
    weight = np.zeros(shape, np.float32)
    for row in range(shape[0]):
        for column in range(shape[1]):
            weight[row, column] = np.float32(values[row, column]) * scales[row // tile, column // tile]
    return {f"{stem}.weight": values, f"{stem}.weight_scale_inv": scales}, weight


def write_packed(
    path: Path,
    folder: Path,
    method: str,
    *,
    bits: int = 4,
    group: int = 32,
    symmetric: bool = False,
    act_order: str = "",
    embedding: bool = False,
    settings: dict[str, Any] | None = None,
) -> Tensors:
    """``folder`` with random quantized matrices, the ``embedding`` too or not; returns every matrix in float32.

    With ``act_order`` the inputs of a group are anywhere: ``shared`` by matrices of the same inputs, or not (``own``).
    """
    rng, source = np.random.default_rng(7), open_checkpoint(str(folder))
    tensors: Tensors = {}
    matrices: Tensors = {}
    for name in tensor_names(folder):
        stem, tensor = name.removesuffix(".weight"), read_all(source, name)
        if tensor.ndim == 1 or ("embed" in name and not embedding):
            tensors[name] = tensor
            continue
        if method == "fp8":
            packed, matrices[name] = fp8(rng, stem, tensor.shape, 24)
        else:
            parts = grid(rng, tensor.shape, bits, min(group, tensor.shape[1]), symmetric)
            size = tensor.shape[1] // parts["zeros"].shape[1]
            parts["groups"] = np.arange(tensor.shape[1]) // size
            if act_order:
                seed = tensor.shape[1] if act_order == "shared" else len(matrices)
                parts["groups"] = np.random.default_rng(seed).permutation(parts["groups"])
            packed = awq(stem, parts) if method == "awq" else gptq(stem, parts, bits, method == "gptq")
            zeros, scales = (parts[part][:, parts["groups"]] for part in ("zeros", "scales"))
            matrices[name] = (parts["values"] - zeros).astype(np.float32) * scales.astype(np.float32)
        tensors |= packed
    path.mkdir()
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {"quant_method": method.removesuffix("_v2")} | (settings or {})
    (path / "config.json").write_text(json.dumps(config))
    (path / "tokenizer.json").write_text((folder / "tokenizer.json").read_text())
    save_file(tensors, path / "model.safetensors")
    plain = {name: tensor for name, tensor in tensors.items() if name.endswith(".weight") and tensor.ndim == 2}
    return plain | matrices
