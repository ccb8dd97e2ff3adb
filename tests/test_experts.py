"""Mixture of experts beyond what all families are tested for: ties, weights as stored, slabs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from refusals import refused
from safetensors.numpy import load_file, save_file
from test_families import TINY, edited, family

from outrider.engines.bundle import Bundle
from outrider.engines.ort import OrtEngine
from outrider.export import ExportOptions, checkpoint, export_bundle
from outrider.export.architectures import decoder_spec, qwen3_moe
from outrider.export.check import check_engine
from outrider.export.checkpoint import open_checkpoint
from outrider.export.decoder import build_decoder
from outrider.export.precision import Formats
from outrider.export.reference import reference_logits
from outrider.export.spec import DecoderSpec
from outrider.export.weights import WeightFile

torch = pytest.importorskip("torch")

FAULTS: dict[str, Callable[[DecoderSpec], DecoderSpec]] = {
    "weights not scaled": lambda spec: replace(spec, normalized_routing=False),
    "an expert less": lambda spec: replace(spec, experts_per_token=1),
    "gate and up swapped": lambda spec: replace(
        spec,
        layer_names={
            **spec.layer_names,
            "expert_gate": spec.layer_names["expert_up"],
            "expert_up": spec.layer_names["expert_gate"],
        },
    ),
}


def exported(source: Path, out: Path, precision: str, lowering: str) -> Bundle:
    if not out.exists():
        export_bundle(str(source), None, out, ExportOptions(precision, lowering, (2, 4), 64), threads=2)
    return Bundle(out)


@pytest.mark.parametrize("precision", ["bf16", "fp8", "int4"])
def test_the_graph_is_the_model_as_stored(workdir: Path, precision: str) -> None:
    """Rows of all experts beside each other are rounded as one row; the router is not rounded at all."""
    out = workdir / f"family-mixtral-standard-{precision}"
    check = exported(family("mixtral", workdir), out, precision, "standard").manifest.target.check
    assert check["kl_stored"] < 1e-4 < check["kl"] + (precision == "bf16")


@pytest.mark.parametrize("pattern", ["*.experts.1.*", "*.gate", "model.layers.0.*"])
def test_experts_have_no_precision_of_their_own(workdir: Path, tmp_path: Path, pattern: str) -> None:
    """A pattern for them, alone or among others, would do nothing that it says."""
    options = ExportOptions("int4", tiers=(2,), max_length=64, tensor_precision={pattern: "int8"})
    source = str(family("mixtral", workdir))
    message = refused(lambda: export_bundle(source, None, tmp_path / "out", options))
    assert message.startswith(f"--tensor-precision {pattern}=int8 matches model.layers.0.block_sparse_moe.")
    assert source in message and message.endswith("such as *.o_proj")


@pytest.mark.parametrize("fault", FAULTS)
def test_other_experts_do_not_pass_the_check(workdir: Path, fault: str) -> None:
    source = family("mixtral", workdir)
    bundle = exported(source, workdir / "family-mixtral-fused-fp16", "fp16", "fused")
    engine = OrtEngine(bundle.path("target/model.onnx"), bundle.manifest.target, threads=2)
    opened, ids = open_checkpoint(str(source)), np.random.default_rng(0).integers(0, 320, 24)
    right, wrong = (
        reference_logits(spec, opened, ids) for spec in (decoder_spec(opened), FAULTS[fault](decoder_spec(opened)))
    )
    check_engine(engine, ids.tolist(), right, right, "fp16", source, routed=True)
    message = refused(lambda: check_engine(engine, ids.tolist(), wrong, wrong, "fp16", source, routed=True))
    assert "is not the model in" in message


def test_a_tie_that_rounding_breaks_is_no_fault(workdir: Path, tmp_path: Path) -> None:
    """Two experts that the router cannot tell apart in float16, and which say different things."""
    folder = edited("mixtral", {}, workdir, tmp_path)
    tensors = load_file(folder / "model.safetensors")
    gate = tensors["model.layers.2.block_sparse_moe.gate.weight"]
    gate[1] = gate[0] * (1 + 1e-6)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    target = exported(folder, tmp_path / "out", "fp16", "fused").manifest.target
    assert target.exactness == "bitwise"
    assert target.check["max_difference"] > 0.5


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"decoder_sparse_step": 2},
        {"decoder_sparse_step": 3, "mlp_only_layers": [2]},
        {"mlp_only_layers": [0, 3]},
        {"num_experts": 0},
    ],
    ids=lambda changes: "-".join(changes) or "all",
)
def test_which_layers_have_experts(changes: dict[str, Any]) -> None:
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model("qwen3_moe", **TINY | {"num_hidden_layers": 6} | changes)
    with torch.device("meta"):
        layers = AutoModelForCausalLM.from_config(config).model.layers
    spec = qwen3_moe.decoder_spec({"model_type": "qwen3_moe", **config.to_dict()})
    assert [spec.routed(layer) for layer in range(6)] == [hasattr(layer.mlp, "experts") for layer in layers]


@pytest.mark.parametrize("name", ["gate.bias", "gate.e_score_correction_bias", "experts.1.w2.bias"])
def test_what_experts_do_not_have_is_refused(name: str, workdir: Path, tmp_path: Path) -> None:
    folder = edited("mixtral", {}, workdir, tmp_path)
    name = f"model.layers.1.block_sparse_moe.{name}"
    tensors = load_file(folder / "model.safetensors") | {name: np.ones(4, np.float32)}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    assert name in refused(lambda: decoder_spec(open_checkpoint(str(folder))))


@pytest.mark.parametrize(("lowering", "precision"), [("fused", "fp32"), ("fused", "int4"), ("standard", "fp8")])
def test_slabs_of_any_size_write_the_same_weights(
    workdir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lowering: str, precision: str
) -> None:
    """Experts are read in slabs of bounded size, whole or in parts."""
    opened = open_checkpoint(str(family("qwen3-moe", workdir)))
    written = []
    for size in (32 << 20, 5000):
        monkeypatch.setattr(checkpoint, "_SLAB_BYTES", size)
        path = tmp_path / f"{size}.bin"
        with WeightFile(path) as weights:
            build_decoder(decoder_spec(opened), opened, weights, Formats(lowering, precision, precision), capacity=64)
        written.append(path.read_bytes())
    assert written[0] == written[1]
