"""What a precision costs, as export measures it, and what keeps the cost down: zero points, and matrices by name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from products import fewest_rows
from refusals import cli, refused, refused_by_cli
from tokenizers import Tokenizer

from outrider.engines.bundle import Bundle, ModelInfo
from outrider.engines.ort import OrtEngine
from outrider.export import ExportOptions, export_bundle
from outrider.export.check import check_text, compare
from outrider.export.quantize import dequantize_blocks, quantize_blocks

Patterns = dict[str, str]


def exported(source: Path, out: Path, patterns: Patterns, precision: str = "int4", lowering: str = "fused") -> Any:
    options = ExportOptions(precision, lowering, (2,), 64, tensor_precision=patterns)
    return export_bundle(str(source), None, out, options, threads=2)


def bits(out: Path) -> dict[str, int]:
    """Of each product with integers."""
    nodes = onnx.load(out / "target" / "model.onnx", load_external_data=False).graph.node
    return {
        node.output[0]: next(int(entry.i) for entry in node.attribute if entry.name == "bits")
        for node in nodes
        if node.op_type == "MatMulNBits"
    }


def test_perplexity_and_agreement_are_those_of_torch(tiny: Path, tiny_bundle: Path) -> None:
    """Over more than a pass, of engine and checkpoint, by transformers and torch."""
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    bundle = Bundle(tiny_bundle)
    check = bundle.manifest.target.check
    ids = Tokenizer.from_file(str(tiny_bundle / "tokenizer.json")).encode(check_text()).ids[:96]
    assert check["tokens"] == 96  # what the bundle's longest sequence allows
    model = transformers.AutoModelForCausalLM.from_pretrained(tiny, dtype=torch.float32)
    with torch.inference_mode():
        reference = model(torch.tensor([ids])).logits[0]
    engine = OrtEngine(bundle.path("target/model.onnx"), bundle.manifest.target, threads=2)
    found = torch.from_numpy(engine.plan(96, 96).run(np.array([ids]), np.zeros(1, np.int32))[0].copy())
    following = torch.tensor(ids[1:])
    laws = [logits.double().log_softmax(-1) for logits in (reference, found)]
    expected = {
        "perplexity": torch.nn.functional.nll_loss(laws[1][:-1], following).exp(),
        "perplexity_checkpoint": torch.nn.functional.nll_loss(laws[0][:-1], following).exp(),
        "kl": torch.nn.functional.kl_div(laws[1], laws[0], reduction="batchmean", log_target=True),
        "same_argmax": (reference.argmax(-1) == found.argmax(-1)).double().mean(),
        "max_difference": (reference - found).abs().max(),
    }
    for name, value in expected.items():
        assert check[name] == pytest.approx(float(value), rel=1e-3), name
    same = compare(engine, ids, found.numpy())
    assert (same.kl, same.max_difference, same.same_argmax) == (0, 0, 1)
    assert same.perplexity == same.reference_perplexity == check["perplexity"]


def test_the_text_has_tokens_for_every_export() -> None:
    assert len(check_text()) > 4 * 256


def test_zero_points_come_nearer() -> None:
    """And are exact where a block has 16 values that are multiples of its step."""
    rows = np.random.default_rng(3).gamma(2, size=(64, 80)).astype(np.float32)
    errors = [
        np.square(dequantize_blocks(quantize_blocks(rows, 4, zero_points=points), 4, 80) - rows).mean()
        for points in (False, True)
    ]
    assert errors[1] < 0.5 * errors[0]
    integers = np.tile(np.arange(-5, 11, dtype=np.float32) * 0.25, (3, 6))
    back = dequantize_blocks(quantize_blocks(integers, 4, zero_points=True), 4, 96)
    assert np.allclose(back, integers, atol=1e-6)


@pytest.mark.parametrize(
    ("patterns", "int8"),
    [
        ({"*.down_proj": "int8"}, {"layer.0.mlp.output", "layer.1.mlp.output"}),
        ({"*.layers.1.mlp.*": "int8"}, {"layer.1.mlp.gate_up", "layer.1.mlp.output"}),
        # One product: query, key and value go together.
        ({"model.layers.0.*.v_proj": "int8"}, {"layer.0.attention.qkv"}),
        ({"*.o_proj": "int8", "*.0.*.o_proj": "int4"}, {"layer.1.attention.output"}),
    ],
)
def test_matrices_of_a_precision_of_their_own(tiny: Path, tmp_path: Path, patterns: Patterns, int8: set[str]) -> None:
    info: ModelInfo = exported(tiny, tmp_path / "out", patterns).target
    assert {name for name, width in bits(tmp_path / "out").items() if width == 8} == int8
    assert info.tensor_precision == Bundle(tmp_path / "out").manifest.target.tensor_precision == patterns
    assert (info.exactness, info.min_rows) == ("bitwise", fewest_rows("int4"))


def test_more_bits_lose_less(tiny: Path, tmp_path: Path) -> None:
    losses = [
        exported(tiny, tmp_path / str(number), patterns).target.check["kl"]
        for number, patterns in enumerate(({}, {"*.down_proj": "int8"}, {"*": "int8"}))
    ]
    assert losses == sorted(losses, reverse=True) and losses[2] < 0.6 * losses[0]


def test_tensorrt_form_with_fp8_matrices(tiny: Path, tmp_path: Path) -> None:
    info = exported(tiny, tmp_path / "out", {"*.mlp.*": "fp8"}, lowering="standard").target
    graph = onnx.load(tmp_path / "out" / "target" / "model.onnx", load_external_data=False).graph
    kinds = {tensor.name.rpartition(".")[2] for tensor in graph.initializer if ".weight." in tensor.name}
    assert {"int4", "fp8"} < kinds
    assert info.exactness == "bitwise"


def test_the_command_says_what_it_did(tiny: Path, tiny_draft: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    options = ["--target", tiny, "--draft", tiny_draft, "--out", out, "--max-length", 64, "--threads", 2]
    result = cli("export", *options, "--tensor-precision", "*.down_proj=int8, *.o_proj=fp32")
    target, draft, _ = result.stdout.splitlines()
    assert "int4 with *.down_proj in int8, *.o_proj in fp32, " in target
    assert "over 64 tokens against the checkpoint: perplexity " in target
    assert " with " not in draft.partition(";")[0]  # the target's matrices alone
    facts = json.loads(cli("inspect", out, "--threads", 2, "--json").stdout)
    assert facts["target"]["tensor_precision"] == {"*.down_proj": "int8", "*.o_proj": "fp32"}


def test_patterns_that_do_not_go(tiny: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    nowhere = refused(lambda: exported(tiny, out, {"*.down": "int8"}))
    assert nowhere.startswith("--tensor-precision *.down=int8 matches none of model.layers.0.self_attn.q_proj to ")
    assert "--head-precision" in nowhere
    options = ["--target", tiny, "--draft", "none", "--out", out]
    assert refused_by_cli("export", *options, "--tensor-precision", "*.down=int8") == nowhere
    assert "matches none of" in refused(lambda: exported(tiny, out, {"lm_head": "int8"}))
    other = refused(lambda: exported(tiny, out, {"*.down_proj": "fp16"}))
    assert other == (
        "--tensor-precision fp16 does not go with --precision int4 --lowering fused; use fp32 or int8 or int4"
    )
    assert "unknown precision 'int7'" in refused(lambda: exported(tiny, out, {"*.down_proj": "int7"}))
    result = cli("export", *options, "--tensor-precision", "*.down_proj")
    assert result.exit_code == 2 and "is not PATTERN=PRECISION,... such as *.down_proj=int8" in result.stderr
    assert not list(tmp_path.iterdir())
