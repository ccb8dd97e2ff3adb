"""Checkpoints that are quantized already: read as their libraries read them, and not rounded a second time."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import onnx
import pytest
from checkpoints import write_tiny
from conftest import THREADS
from gguf_files import write_gguf
from numpy.typing import NDArray
from packed_files import Tensors, write_packed
from products import fewest_rows
from refusals import cli, refused
from safetensors.numpy import load_file, save_file

from outrider.engines.bundle import Bundle, ModelInfo
from outrider.export import ExportOptions, export_bundle, gguf_blocks, model
from outrider.export.checkpoint import open_checkpoint, read_all
from outrider.export.quantize import dequantize_blocks, pack_blocks
from outrider.runtime import Pipeline

GOLDEN = Path(__file__).parent / "golden" / "quantized.npz"  # made by golden/make_quantized.py
CHANNELS = {"config_groups": {"all": {"weights": {"num_bits": 8, "type": "float", "strategy": "channel"}}}}
INTEGERS = {"format": "pack-quantized", "config_groups": {"all": {"weights": {"num_bits": 4, "type": "int"}}}}
GOLDEN_CASES: dict[str, dict[str, Any]] = {
    "gptq4": {"quant_method": "gptq", "bits": 4},
    "gptq8": {"quant_method": "gptq", "bits": 8, "checkpoint_format": "gptq"},
    "gptq4-act-order": {"quant_method": "gptq", "bits": 4, "desc_act": True},
    "awq": {"quant_method": "awq", "version": "gemm"},
    "packed": {"quant_method": "compressed-tensors", **INTEGERS},
    "packed-asymmetric": {"quant_method": "compressed-tensors", **INTEGERS},
    "packed-channel": {"quant_method": "compressed-tensors", **INTEGERS},
    "fp8": {"quant_method": "fp8", "weight_block_size": [16, 16]},
    "fp8-channel": {"quant_method": "compressed-tensors", **CHANNELS},
    "fp8-tensor": {"quant_method": "compressed-tensors", **CHANNELS},
}
# Method, how it is written, precision, lowering, and the type that is counted.
PACKED: dict[str, tuple[str, dict[str, Any], str, str, str]] = {
    "gptq": ("gptq", {}, "int4", "fused", "gptq 4-bit"),
    "gptq_v2": ("gptq_v2", {"settings": {"checkpoint_format": "gptq_v2"}}, "int4", "fused", "gptq 4-bit"),
    "gptq-symmetric": ("gptq", {"symmetric": True, "group": 64}, "int4", "standard", "gptq 4-bit"),
    "gptq-act-order": ("gptq", {"act_order": "shared"}, "int4", "fused", "gptq 4-bit"),
    "gptq-act-orders": ("gptq", {"act_order": "own"}, "int4", "fused", "gptq 4-bit"),
    "gptq-whole-rows": ("gptq", {"group": 1 << 20}, "int4", "fused", "gptq 4-bit"),
    "gptq-embedding": ("gptq", {"embedding": True}, "int4", "fused", "gptq 4-bit"),
    "gptq8": ("gptq", {"bits": 8}, "int8", "fused", "gptq 8-bit"),
    "awq": ("awq", {"group": 64}, "int4", "fused", "awq 4-bit"),
    "awq-as-int8": ("awq", {"group": 64}, "int8", "fused", "awq 4-bit"),
}
# Types of GGUF under each precision: those that are taken over.
GGUF = {("int4", "fused"): ("Q3_K", "Q4_0", "Q4_1", "Q4_K"), ("int8", "fused"): ("Q4_0", "Q5_0", "Q6_K", "Q8_0")}
GGUF[("int4", "standard")] = ("Q4_0",)


@pytest.fixture(scope="module")
def wide(workdir: Path) -> Path:
    """A layer with rows of 256, which K-quants need, and a head of its own."""
    shape = {"hidden": 256, "intermediate": 256, "heads": 4, "kv_heads": 2, "head_dim": 64, "layers": 1}
    return write_tiny(workdir / "quantized-wide", seed=3, tie_word_embeddings=False, **shape)


@pytest.fixture(scope="module")
def plain(workdir: Path) -> Path:
    return write_tiny(workdir / "quantized-plain", seed=8, intermediate=128, tie_word_embeddings=False)


def export(source: Path, out: Path, precision: str, lowering: str = "fused") -> ModelInfo:
    options = ExportOptions(precision, lowering, tiers=(2,), max_length=64)
    return export_bundle(str(source), None, out, options, threads=THREADS).target


def values(tensor: NDArray[Any], bits: int) -> NDArray[np.float32]:
    """Of the bytes of a row, the low half of each first."""
    halves = np.stack([tensor % 16, tensor // 16], axis=-1).reshape(len(tensor), -1)
    return (halves if bits == 4 else tensor.reshape(len(tensor), -1)).astype(np.float32)


def engine_matrices(bundle: Path) -> Tensors:
    """The matrices of a graph that are stored in blocks, expanded as its operators are specified."""
    graph = onnx.load(bundle / "target" / "model.onnx").graph
    tensors = {tensor.name: onnx.numpy_helper.to_array(tensor) for tensor in graph.initializer}
    gathered = {node.output[0]: node.input[1] for node in graph.node if node.op_type == "Gather"}
    matrices = {}
    for node in graph.node:
        settings = {attribute.name: onnx.helper.get_attribute_value(attribute) for attribute in node.attribute}
        if node.op_type == "MatMulNBits":
            bits, size = settings["bits"], settings["block_size"]
            scales = tensors[node.input[2]].repeat(size, axis=1)
            zeros: Any = 1 << (bits - 1)
            if len(node.input) > 3 and node.input[3]:
                zeros = values(tensors[node.input[3]], bits)[:, : len(scales[0]) // size].repeat(size, axis=1)
            weight = (values(tensors[node.input[1]], bits) - zeros) * scales
            if f"{node.input[1]}.offsets" in tensors:
                weight = weight + tensors[f"{node.input[1]}.offsets"].repeat(size, axis=1)
            if node.input[0] in gathered:
                weight = weight[:, np.argsort(tensors[gathered[node.input[0]]])]
            matrices[node.input[1]] = weight
        elif node.op_type == "DequantizeLinear":
            weight, scales = (tensors[name].astype(np.float32) for name in node.input)
            matrices[node.input[0].removesuffix(".int4")] = weight * scales.repeat(settings["block_size"], axis=1)
    return matrices


def assert_taken_over(bundle: Path, expected: Tensors, layers: int = 1, rtol: float = 0.0) -> None:
    """The graph's matrices are those of the file, parts stacked as the graph has them."""
    found = engine_matrices(bundle)
    for layer in range(layers):
        inside = f"model.layers.{layer}"
        for name, parts in {
            "attention.qkv": [f"self_attn.{role}_proj" for role in "qkv"],
            "attention.output": ["self_attn.o_proj"],
            "mlp.gate_up": ["mlp.gate_proj", "mlp.up_proj"],
            "mlp.output": ["mlp.down_proj"],
        }.items():
            matrix = np.concatenate([expected[f"{inside}.{part}.weight"] for part in parts])
            stem, roles = f"layer.{layer}.{name}", [part.partition(".")[2].partition("_")[0] for part in parts]
            own = [found[f"{stem}.{role}.weight"] for role in roles if f"{stem}.{role}.weight" in found]
            stored = np.concatenate(own or [found[f"{stem}.weight"]])
            np.testing.assert_allclose(stored, matrix, rtol=0, atol=rtol * np.abs(matrix).max(), err_msg=name)
    np.testing.assert_allclose(found["lm_head.weight"], expected["lm_head.weight"], rtol=0, atol=rtol)


@pytest.mark.parametrize("case", GOLDEN_CASES)
def test_a_matrix_is_what_its_library_says(tmp_path: Path, case: str) -> None:
    with np.load(GOLDEN) as file:
        golden = {name.partition("/")[2]: file[name] for name in file if name.startswith(f"{case}/")}
    expected = golden.pop("weight")
    if "values" in golden:
        scale = "weight_scale_inv" if case == "fp8" else "weight_scale"
        golden = {"weight": golden["values"].view(ml_dtypes.float8_e4m3fn), scale: golden["scale"]}
    save_file({f"linear.{name}": part for name, part in golden.items()}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps({"quantization_config": GOLDEN_CASES[case]}))
    checkpoint = open_checkpoint(str(tmp_path))
    assert checkpoint.shape("linear.weight") == expected.shape
    np.testing.assert_array_equal(read_all(checkpoint, "linear.weight"), expected)
    np.testing.assert_array_equal(checkpoint.read("linear.weight", 5, 22), expected[5:22])
    matrix = checkpoint.quantized("linear.weight")
    assert matrix is not None
    assert matrix.type.bits == {"gptq8": 8, "fp8": 0}.get(case.partition("-")[0], 4)
    assert (matrix.input_order is not None) == ("act-order" in case)
    if matrix.type.bits:
        blocks = pack_blocks(matrix.integers(5, 22), matrix.type.bits)
        order = slice(None) if matrix.input_order is None else matrix.input_order
        np.testing.assert_array_equal(dequantize_blocks(blocks, matrix.type.bits, 64), expected[5:22, order])


@pytest.mark.parametrize("case", PACKED)
def test_packed_folders_are_taken_over(tmp_path: Path, plain: Path, case: str) -> None:
    method, how, precision, lowering, kind = PACKED[case]
    expected = write_packed(tmp_path / "packed", plain, method, **how)
    checkpoint = open_checkpoint(str(tmp_path / "packed"))
    for name, matrix in expected.items():
        np.testing.assert_array_equal(read_all(checkpoint, name), matrix, err_msg=name)
    info = export(tmp_path / "packed", tmp_path / "out", precision, lowering)
    own = "embedding" in how
    rounded = {} if own or lowering == "standard" else {"float": 1}  # the embedding, which stays float there
    assert (info.taken_over, info.rounded_anew) == ({kind: 15 + own}, rounded)
    assert info.check["kl_stored"] < 2e-3
    assert (info.exactness, info.min_rows) == ("bitwise", fewest_rows(precision) if lowering == "fused" else 2)
    assert_taken_over(tmp_path / "out", expected, layers=2)


@pytest.mark.parametrize(("precision", "lowering", "kind"), [(*how, kind) for how in GGUF for kind in GGUF[how]])
def test_gguf_types_are_taken_over(tmp_path: Path, wide: Path, precision: str, lowering: str, kind: str) -> None:
    """Rotary rows in another order, embedding and head included."""
    expected = write_gguf(tmp_path / "m.gguf", wide, kind)
    info = export(tmp_path / "m.gguf", tmp_path / "out", precision, lowering)
    assert (info.taken_over, info.rounded_anew) == ({kind: 9 - (lowering == "standard")}, {})
    assert info.check["kl_stored"] < 2e-3
    fewest = fewest_rows(precision, block_size=16 if kind == "Q3_K" else 32) if lowering == "fused" else 2
    assert (info.exactness, info.min_rows) == ("bitwise", fewest)
    assert_taken_over(tmp_path / "out", expected, rtol=1e-6 if kind in ("Q4_1", "Q4_K") else 0)


def test_a_stacked_matrix_of_several_types(tmp_path: Path, wide: Path) -> None:
    """Each part as it can be; what is rounded anew is said."""
    others = {"q_proj": "Q4_1", "v_proj": "Q6_K", "embed": "Q8_0", "lm_head": "F16", "up_proj": "Q3_K"}
    expected = write_gguf(tmp_path / "m.gguf", wide, "Q4_0", others=others)
    source = ("--target", tmp_path / "m.gguf", "--draft", "none", "--k", "2", "--max-length", 64)
    shown = cli("export", *source, "--out", tmp_path / "out").stdout
    assert "; 6 of 9 matrices as the file holds them, rounded anew: 1 Q6_K, 1 Q8_0, 1 float\n" in shown
    found = engine_matrices(tmp_path / "out")["layer.0.attention.qkv.weight"]
    parts = [expected[f"model.layers.0.self_attn.{role}_proj.weight"] for role in "qkv"]
    assert np.abs(found[:384] - np.concatenate(parts[:2])).max() < 1e-6
    assert 1e-4 < np.abs(found[384:] - parts[2]).max() < np.abs(parts[2]).max() / 7
    assert "taken_over Q3_K 1, Q4_0 4, Q4_1 1" in cli("inspect", tmp_path / "out").stdout


def test_integers_that_are_not_the_files_do_not_pass(
    tmp_path: Path, wide: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The check at the end reads the file in another way than the engine was written."""
    write_gguf(tmp_path / "m.gguf", wide, "Q4_0")
    size, read = gguf_blocks._READERS["Q4_0"]
    monkeypatch.setitem(
        gguf_blocks._READERS, "Q4_0", (size, lambda blocks: read(blocks)._replace(values=read(blocks).values[:, ::-1]))
    )
    message = refused(lambda: export(tmp_path / "m.gguf", tmp_path / "out", "int4"))
    assert message.startswith("the int4 engine is not the model in")


@pytest.mark.parametrize(("precision", "taken"), [("fp32", {}), ("int4", {})])
def test_fp8_folders_are_read(tmp_path: Path, plain: Path, precision: str, taken: dict[str, int]) -> None:
    """Tiles that do not divide the matrix; in int4 it is rounded anew."""
    expected = write_packed(tmp_path / "fp8", plain, "fp8", settings={"weight_block_size": [24, 24]})
    checkpoint = open_checkpoint(str(tmp_path / "fp8"))
    for name, matrix in expected.items():
        np.testing.assert_array_equal(read_all(checkpoint, name), matrix, err_msg=name)
    info = export(tmp_path / "fp8", tmp_path / "out", precision)
    assert info.taken_over == taken
    assert info.rounded_anew == ({} if precision == "fp32" else {"float": 1, "fp8": 15})


def test_smollm2_is_the_files_own(smollm2_pair: Pipeline) -> None:
    """Rounded a second time, its law was 0.8 nats away."""
    info = Bundle(smollm2_pair.bundle.folder).manifest.target
    assert (info.taken_over, info.rounded_anew) == ({"Q4_1": 210}, {"Q8_0": 1})
    assert info.check["kl"] < 0.2


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"quant_method": "bitsandbytes"}, "says 'bitsandbytes', which cannot be read; awq (gemm), gptq, fp8"),
        ({"quant_method": "awq", "version": "GEMV"}, "says awq in the version 'gemv'"),
        ({"quant_method": "gptq", "checkpoint_format": "marlin"}, "says gptq in the format 'marlin'"),
        ({"quant_method": "fp8", "weight_block_size": 128}, "a block of the quantized weights is 128, not two sizes"),
        (
            {"quant_method": "compressed-tensors", "config_groups": {"a": {"weights": {"num_bits": 4, "type": "int"}}}},
            "says compressed-tensors with None weights of 4-bit int",
        ),
    ],
)
def test_other_methods_are_refused_by_name(plain: Path, tmp_path: Path, settings: dict[str, Any], words: str) -> None:
    write_packed(tmp_path / "packed", plain, "gptq", settings=settings)
    assert words in refused(lambda: open_checkpoint(str(tmp_path / "packed")))


@pytest.mark.parametrize(
    ("method", "part", "change", "words"),
    [
        ("gptq", "scales", None, "down_proj.qweight and no model.layers.1.mlp.down_proj.scales"),
        ("gptq", "qweight", lambda part: part.astype(np.float32), "down_proj.qweight has type F32; types that can be"),
        ("gptq", "g_idx", lambda part: part + 9, "down_proj has 4 groups for 128 inputs"),
        ("gptq", "qzeros", lambda part: part[:, :6], "says gptq with 3 bits (model.layers.1.mlp.down_proj)"),
        ("fp8", "weight", None, "down_proj.weight_scale_inv and no model.layers.1.mlp.down_proj.weight"),
        ("fp8", "weight_scale_inv", lambda part: part[:, :2], "weight_scale_inv has shape [3, 2], which fits no"),
        ("fp8", "weight_scale_inv", None, "down_proj.weight has type F8_E4M3; types that can be read"),
    ],
)
def test_damaged_parts_are_named(plain: Path, tmp_path: Path, method: str, part: str, change: Any, words: str) -> None:
    tile = {"settings": {"weight_block_size": [24, 24]}} if method == "fp8" else {}
    write_packed(tmp_path / "packed", plain, method, **tile)
    file = tmp_path / "packed" / "model.safetensors"
    tensors, name = load_packed(file), f"model.layers.1.mlp.down_proj.{part}"
    found = tensors.pop(name)
    save_file(tensors if change is None else tensors | {name: np.ascontiguousarray(change(found))}, file)
    assert words in refused(lambda: export(tmp_path / "packed", tmp_path / "out", "int4"))
    assert not (tmp_path / "out").exists()


def test_matrices_of_all_layers_are_counted_though_two_are_checked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(model, "memory_bytes", lambda: 1)
    write_packed(tmp_path / "packed", write_tiny(tmp_path / "plain", layers=3, intermediate=128), "awq")
    info = export(tmp_path / "packed", tmp_path / "out", "int4")
    assert (info.taken_over, info.num_layers, info.check["layers"]) == ({"awq 4-bit": 21}, 3, 2)


def test_optimum_is_not_asked_to_trace_one(plain: Path, tmp_path: Path) -> None:
    write_packed(tmp_path / "packed", plain, "gptq")
    options = ExportOptions("fp32", via="optimum")
    message = refused(lambda: export_bundle(str(tmp_path / "packed"), None, tmp_path / "out", options))
    assert message.endswith("--via optimum takes no quantized checkpoint (quantization_config)")


def load_packed(file: Path) -> Tensors:
    """``load_file``, which needs a numpy that knows fp8."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(np, "float8_e4m3fn", ml_dtypes.float8_e4m3fn, raising=False)
        return dict(load_file(file))
