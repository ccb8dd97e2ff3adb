"""Weights for TensorRT: the standard graph in bf16, fp8 and int4, run here on the CPU and built by TensorRT-RTX."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import onnx
import pytest
from checkpoints import write_tiny
from onnx.reference import ReferenceEvaluator
from refusals import refused, refused_by_cli

from outrider.engines.bundle import Bundle, ModelInfo
from outrider.engines.errors import OutriderError
from outrider.engines.ort import OrtEngine
from outrider.export import ExportOptions, export_bundle
from outrider.export.architectures import decoder_spec
from outrider.export.check import check_engine
from outrider.export.checkpoint import open_checkpoint, read_all
from outrider.export.precision import Formats
from outrider.export.quantize import quantize_fp8
from outrider.export.reference import reference_logits
from outrider.export.spec import DecoderSpec
from outrider.export.stored import as_stored
from outrider.export.widen import widened_engine

PRECISIONS = ("bf16", "fp8", "int4")
LAYERS, ROWS = 2, 5
CACHES = ("key", "value")
SHAPES: dict[str, dict[str, Any]] = {
    # Large enough for the weights to outweigh the rest of an engine.
    "wide": {"hidden": 512, "intermediate": 1536, "heads": 8, "kv_heads": 4, "head_dim": 64},
    "untied": {"tie_word_embeddings": False},
    "biases": {"biases": True, "attention_bias": True, "mlp_bias": True},
}
FAULTS: dict[str, Callable[[DecoderSpec], DecoderSpec]] = {
    "other positions": lambda spec: replace(spec, inv_freq=spec.inv_freq * 1.5),
    "a layer less": lambda spec: replace(spec, num_layers=spec.num_layers - 1),
}


@dataclass(frozen=True)
class Exported:
    source: Path
    folder: Path
    info: ModelInfo

    @property
    def graph(self) -> Path:
        return self.folder / self.info.graph


Exporter = Callable[[str, str], Exported]


@pytest.fixture(scope="module")
def exported(workdir: Path) -> Exporter:
    """``exported(shape, precision)``; each bundle is made once."""

    def export(shape: str, precision: str) -> Exported:
        source, out = workdir / f"precisions-{shape}", workdir / f"precisions-{shape}-{precision}"
        if not source.exists():
            write_tiny(source, seed=4, layers=LAYERS, **SHAPES[shape])
        if not out.exists():
            options = ExportOptions(precision, "standard", tiers=(4,), max_length=64)
            export_bundle(str(source), None, out, options, threads=2)
        return Exported(source, out, Bundle(out).manifest.target)

    return export


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("shape", SHAPES)
def test_the_graph_is_the_model_as_stored(exported: Exporter, shape: str, precision: str) -> None:
    check = exported(shape, precision).info.check
    assert check["kl_stored"] < 1e-4
    assert check["kl_stored"] < check["kl"] < {"bf16": 0.001, "fp8": 0.05, "int4": 0.5}[precision]


@pytest.mark.parametrize("precision", PRECISIONS)
def test_the_graph_means_the_same_elsewhere(exported: Exporter, precision: str) -> None:
    """ONNX's own evaluator, which computes in bfloat16 what ONNX Runtime cannot."""
    bundle = exported("untied", precision)
    checkpoint = open_checkpoint(str(bundle.source))
    spec, stored = as_stored(decoder_spec(checkpoint), checkpoint, Formats("standard", precision, precision))
    ids = np.random.default_rng(0).integers(0, 320, 12)
    cache = np.zeros((1, bundle.info.num_kv_heads, bundle.info.capacity, bundle.info.head_dim))
    kind = ml_dtypes.bfloat16 if precision == "bf16" else np.float16
    inputs: dict[str, Any] = {f"past_{part}.{layer}": cache.astype(kind) for part in CACHES for layer in range(LAYERS)}
    inputs |= {"input_ids": ids[None], "cache_lengths": np.zeros(1, np.int32), "logit_rows": np.arange(len(ids))[None]}
    onnx.checker.check_model(bundle.graph, full_check=True)
    logits = ReferenceEvaluator(onnx.load(bundle.graph)).run(["logits"], inputs)[0]
    assert np.abs(logits[0] - reference_logits(spec, stored, ids)).max() < (0.2 if precision == "bf16" else 0.03)


@pytest.mark.parametrize("precision", PRECISIONS)
def test_the_manifest_says_what_was_probed(exported: Exporter, precision: str) -> None:
    """ONNX Runtime's CPU kernels know no bfloat16: only the values of that graph could be checked."""
    bundle = exported("untied", precision)
    found = (bundle.info.cache_dtype, bundle.info.exactness, bool(bundle.info.device))
    assert found == (("bfloat16", "unprobed", False) if precision == "bf16" else ("float16", "bitwise", True))
    assert not list(bundle.folder.rglob("widened*"))


@pytest.mark.parametrize("name", ["model.embed_tokens", "lm_head", "layer.1.mlp.output"])
@pytest.mark.parametrize("precision", PRECISIONS)
def test_each_weight_is_near_what_was_read(exported: Exporter, precision: str, name: str) -> None:
    """The largest error of a weight follows from how it is stored."""
    bundle = exported("untied", precision)
    source = "model.layers.1.mlp.down_proj" if "mlp" in name else name
    read = read_all(open_checkpoint(str(bundle.source)), f"{source}.weight")
    stored = {tensor.name: onnx.numpy_helper.to_array(tensor) for tensor in onnx.load(bundle.graph).graph.initializer}
    if name == "model.embed_tokens" or precision == "bf16":
        found = stored[f"{name}.weight"]
        kind, bits = (ml_dtypes.bfloat16, 8) if precision == "bf16" else (np.float16, 11)
        assert found.dtype == kind
        assert (np.abs(found.astype(np.float32) - read) <= 2.0**-bits * np.abs(read) + 1e-7).all()
        return
    values, scales = (stored[f"{name}.weight.{part}"].astype(np.float32) for part in (precision, "scales"))
    steps = scales.reshape(len(read), -1).repeat(32 if precision == "int4" else read.shape[1], axis=1)
    error = np.abs(values * steps - read)
    if precision == "int4":  # the largest of a block may lie beyond the last step of the other sign
        assert (error <= 1.01 * np.abs(steps)).all()
        assert np.mean(error <= 0.51 * np.abs(steps)) > 0.95
    else:
        assert (error <= 1.01 * np.maximum(2.0**-4 * np.abs(read), 2.0**-10 * steps)).all()


def test_fp8_takes_rows_of_any_size() -> None:
    rows = np.random.default_rng(2).standard_normal((5, 64)).astype(np.float32)
    rows *= np.array([0.0, 1e-9, 1e-4, 1.0, 1e4], np.float32)[:, None]
    values, scales = quantize_fp8(rows)
    assert (scales > 0).all()
    error = np.abs(values.astype(np.float32) * scales[:, None].astype(np.float32) - rows)
    assert (error.max(axis=1) <= 0.07 * np.abs(rows).max(axis=1)).all()


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("precision", PRECISIONS)
def test_another_model_does_not_pass(exported: Exporter, precision: str, fault: str) -> None:
    bundle = exported("untied", precision)
    checkpoint = open_checkpoint(str(bundle.source))
    faulty = FAULTS[fault](decoder_spec(checkpoint))
    spec, stored = as_stored(faulty, checkpoint, Formats("standard", precision, precision))
    ids = np.random.default_rng(0).integers(0, 320, 24)
    logits = reference_logits(spec, stored, ids)
    open_engine = widened_engine if precision == "bf16" else OrtEngine
    engine = open_engine(bundle.graph, bundle.info, threads=2)
    with pytest.raises(OutriderError, match=f"the {precision} engine is not the model in"):
        check_engine(engine, ids.tolist(), logits, logits, [precision], bundle.source)


@pytest.mark.parametrize(
    ("lowering", "precision", "others"),
    [
        ("fused", "bf16", "fp32, fp16, int8 or int4"),
        ("fused", "fp8", "fp32, fp16, int8 or int4"),
        ("standard", "int8", "fp32, fp16, bf16, fp8 or int4"),
    ],
)
def test_precisions_that_a_lowering_does_not_have(
    tiny: Path, tmp_path: Path, lowering: str, precision: str, others: str
) -> None:
    out = tmp_path / "out"
    message = refused(lambda: export_bundle(str(tiny), None, out, ExportOptions(precision, lowering)))
    assert message == f"--lowering {lowering} has no {precision}; use {others}"
    options = ["--target", tiny, "--draft", "none", "--out", out, "--precision", precision, "--lowering", lowering]
    assert refused_by_cli("export", *options) == message


@pytest.mark.parametrize(
    ("shape", "words"),
    [
        ({"hidden": 80}, "hidden_size is 80"),
        ({"intermediate": 80}, "intermediate_size is 80"),
        ({"heads": 1, "kv_heads": 1}, "heads * head_dim is 16"),
    ],
)
def test_widths_without_whole_blocks(tmp_path: Path, shape: dict[str, int], words: str) -> None:
    source = write_tiny(tmp_path / "source", **shape)
    message = refused(
        lambda: export_bundle(str(source), None, tmp_path / "out", ExportOptions("int4", "standard", max_length=64))
    )
    assert message == f"{source}: {words}, and int4 needs a multiple of 32; use fp32 or fp16"


def tensorrt_engine(bundle: Exported) -> tuple[Counter[str], int]:
    """The layers that TensorRT-RTX makes of a graph, and the size of the engine for one static verify pass."""
    trt = pytest.importorskip("tensorrt_rtx")
    logger = trt.Logger(trt.Logger.ERROR)
    builder = trt.Builder(logger)
    network = builder.create_network(1 << int(trt.NetworkDefinitionCreationFlag.STRONGLY_TYPED))
    parser = trt.OnnxParser(network, logger)
    parsed = parser.parse_from_file(str(bundle.graph))
    assert parsed, [parser.get_error(index).desc() for index in range(parser.num_errors)]
    layers = Counter(network.get_layer(index).type.name for index in range(network.num_layers))
    profile = builder.create_optimization_profile()
    cache = (1, bundle.info.num_kv_heads, bundle.info.capacity, bundle.info.head_dim)
    for index in range(network.num_inputs):
        name = network.get_input(index).name
        shape = {"input_ids": (1, ROWS), "cache_lengths": (1,), "logit_rows": (1, ROWS)}.get(name, cache)
        profile.set_shape(name, shape, shape, shape)
    config = builder.create_builder_config()
    config.add_optimization_profile(profile)
    config.num_compute_capabilities = 1
    config.set_compute_capability(trt.ComputeCapability.SM89, 0)
    engine = builder.build_serialized_network(network, config)
    assert engine is not None
    return layers, int(engine.nbytes)


@pytest.mark.parametrize("precision", PRECISIONS)
def test_tensorrt_builds_it(exported: Exporter, precision: str) -> None:
    layers, _ = tensorrt_engine(exported("wide", precision))
    assert layers["KV_CACHE_UPDATE"] == 2 * LAYERS
    assert layers["ATTENTION_INPUT"] == LAYERS
    # Four matrices a layer and the head, each expanded on its own.
    assert layers["DEQUANTIZE"] == (0 if precision == "bf16" else 4 * LAYERS + 1)


def test_engines_keep_their_weights_small(exported: Exporter) -> None:
    """An engine that expanded its weights while it was built would be as large as the fp16 one."""
    sizes = {precision: tensorrt_engine(exported("wide", precision))[1] for precision in ("fp16", *PRECISIONS)}
    assert sizes["int4"] < 0.5 * sizes["fp16"] and sizes["fp8"] < 0.7 * sizes["fp16"]
    assert abs(sizes["bf16"] - sizes["fp16"]) < 0.01 * sizes["fp16"]


@pytest.mark.parametrize(
    ("lowering", "precision", "head"),
    [
        ("fused", "int4", "int8"),
        ("fused", "int4", "fp32"),
        ("fused", "fp32", "int4"),
        ("standard", "int4", "fp8"),
        ("standard", "int4", "fp16"),
        ("standard", "fp16", "int4"),
    ],
)
@pytest.mark.parametrize("tied", [True, False])
def test_a_head_of_its_own_precision(lowering: str, precision: str, head: str, tied: bool, tmp_path: Path) -> None:
    """Within limits of the weights as stored, and nearer to the checkpoint than with the coarser one for all."""
    source = write_tiny(tmp_path / "model", seed=4, tie_word_embeddings=tied)
    losses = {}
    for name, heads in (("own", head), ("all", "int4")):
        options = ExportOptions("int4" if name == "all" else precision, lowering, (2,), 64, head_precision=heads)
        info = export_bundle(str(source), None, tmp_path / name, options, threads=2).target
        assert (info.head_precision, info.exactness) == (heads, "bitwise")
        losses[name] = info.check["kl"]
    assert 0 < losses["own"] < losses["all"]


def test_heads_that_do_not_fit(tiny: Path, tmp_path: Path) -> None:
    for lowering, precision, head in (
        ("fused", "int4", "fp16"),
        ("standard", "bf16", "int4"),
        ("fused", "int4", "fp8"),
    ):
        options = ExportOptions(precision, lowering, (2,), 64, head_precision=head)
        message = refused(lambda: export_bundle(str(tiny), None, tmp_path / "out", options, threads=2))  # noqa: B023
        assert f"--head-precision {head} does not go with" in message and "use " in message
    with pytest.raises(OutriderError, match="unknown precision 'int3'"):
        ExportOptions(head_precision="int3")
