"""Writes quantized.npz: small matrices packed by the libraries of each format, and what these read back.

Needs, beside the tests' own packages, `pip install --no-deps auto-gptq==0.7.1 autoawq==0.2.9
compressed-tensors==0.20.1 loguru`. The keys are CASE/TENSOR, and CASE/weight for the matrix in float32; fp8 is kept as
bytes.
"""

from __future__ import annotations

import sys
import types
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch

OUTPUTS, INPUTS, GROUP = 32, 64, 32


def without_init(package: str) -> None:
    """Its modules can be imported though the package itself wants other versions of everything."""
    module = types.ModuleType(package)
    module.__path__ = list(find_spec(package).submodule_search_locations)
    sys.modules[package] = module


def grouped(bits: int, groups: torch.Tensor) -> tuple[torch.nn.Linear, torch.Tensor, torch.Tensor]:
    """A linear layer that lies on its grid: its scales and zero points are ``[outputs, groups]``."""
    count = int(groups.max()) + 1
    scales = (torch.rand(OUTPUTS, count) * 0.01 + 0.01).half().float()
    zeros = torch.randint(1, 1 << bits, (OUTPUTS, count)).float()
    values = torch.randint(0, 1 << bits, (OUTPUTS, INPUTS))
    linear = torch.nn.Linear(INPUTS, OUTPUTS, bias=False)
    linear.weight.data = (values - zeros[:, groups]) * scales[:, groups]
    return linear, scales, zeros


def gptq(bits: int, act_order: bool = False) -> dict[str, torch.Tensor]:
    from auto_gptq.nn_modules.qlinear.qlinear_cuda import QuantLinear

    groups = torch.arange(INPUTS) // GROUP
    if act_order:
        groups = groups[torch.randperm(INPUTS)]
    linear, scales, zeros = grouped(bits, groups)
    layer = QuantLinear(bits, GROUP, INPUTS, OUTPUTS, False, kernel_switch_threshold=0, weight_dtype=torch.float32)
    layer.pack(linear, scales, zeros, groups.int())
    layer.autogptq_cuda_available = False
    with torch.inference_mode():
        weight = layer(torch.eye(INPUTS)).T
    return {"qweight": layer.qweight, "qzeros": layer.qzeros, "scales": layer.scales, "g_idx": layer.g_idx} | {
        "weight": weight.float()
    }


def awq() -> dict[str, torch.Tensor]:
    from awq.modules.linear.gemm import WQLinear_GEMM
    from awq.utils.packing_utils import dequantize_gemm

    linear, scales, zeros = grouped(4, torch.arange(INPUTS) // GROUP)
    layer = WQLinear_GEMM.from_linear(linear, 4, GROUP, scales=scales.T.contiguous(), zeros=zeros.T.contiguous())
    weight = dequantize_gemm(layer.qweight, layer.qzeros, layer.scales.float(), 4, GROUP).T
    return {"qweight": layer.qweight, "qzeros": layer.qzeros, "scales": layer.scales, "weight": weight}


def packed(symmetric: bool, size: int) -> dict[str, torch.Tensor]:
    from compressed_tensors.compressors.pack_quantized.base import PackedQuantizationCompressor
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme

    groups = torch.arange(INPUTS) // size
    linear, scales, zeros = grouped(4, groups)
    zeros = torch.zeros_like(zeros) if symmetric else zeros - 8
    kind = {"group_size": size, "strategy": "group"} if size < INPUTS else {"strategy": "channel"}
    scheme = QuantizationScheme(targets=["Linear"], weights=QuantizationArgs(num_bits=4, symmetric=symmetric, **kind))
    parts = {"weight": linear.weight.data, "weight_scale": scales, "weight_zero_point": zeros.to(torch.int8)}
    parts = PackedQuantizationCompressor.compress(parts, scheme)
    weight = PackedQuantizationCompressor.decompress(parts, scheme)["weight"]
    return parts | {"weight": weight.float()}


def fp8(scale: torch.Tensor, block: list[int] | None = None) -> dict[str, torch.Tensor]:
    from compressed_tensors.quantization import QuantizationArgs
    from compressed_tensors.quantization.lifecycle.forward import dequantize
    from transformers.integrations.finegrained_fp8 import Fp8Dequantize

    values = (torch.randn(OUTPUTS, INPUTS) * 100).to(torch.float8_e4m3fn)
    if block:
        found = Fp8Dequantize(None)._dequantize_one(values, scale, torch.float32)
    else:
        strategy = "tensor" if scale.numel() == 1 else "channel"
        found = dequantize(values, scale, args=QuantizationArgs(num_bits=8, type="float", strategy=strategy))
    return {"values": values.view(torch.uint8), "scale": scale, "weight": found}


def main() -> None:
    torch.manual_seed(0)
    without_init("awq")
    without_init("auto_gptq")
    cases: dict[str, dict[str, Any]] = {
        "gptq4": gptq(4),
        "gptq8": gptq(8),
        "gptq4-act-order": gptq(4, act_order=True),
        "awq": awq(),
        "fp8": fp8(torch.rand(OUTPUTS // 16, INPUTS // 16) * 0.01, [16, 16]),
        "fp8-channel": fp8(torch.rand(OUTPUTS, 1) * 0.01),
        "fp8-tensor": fp8(torch.rand(1) * 0.01),
        "packed": packed(symmetric=True, size=GROUP),
        "packed-asymmetric": packed(symmetric=False, size=GROUP),
        "packed-channel": packed(symmetric=True, size=INPUTS),
    }
    arrays = {
        f"{case}/{name}": part.contiguous().numpy() for case, parts in cases.items() for name, part in parts.items()
    }
    np.savez_compressed(Path(__file__).with_name("quantized.npz"), **arrays)


if __name__ == "__main__":
    main()
