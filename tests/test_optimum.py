"""Architectures without a file here, by way of Optimum: the rewriter on graphs that Optimum traced from tiny models.

The oracle is Hugging Face transformers on the same weights (float32, CPU). The graphs are in ``golden/traces``; Optimum
itself runs where ``OUTRIDER_OPTIMUM_PYTHON`` names an environment that has it.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from conftest import THREADS
from gguf_files import write_gguf
from numpy.typing import NDArray
from refusals import refused, refused_by_cli
from residents import on_cpu
from safetensors.numpy import load_file, save_file
from test_parity import engine_logits, transformers_logits
from traced import FAMILIES, TRACES, standin_python, write_checkpoint

from outrider.engines.bundle import Bundle
from outrider.engines.ort import OrtEngine
from outrider.export import ExportOptions, export_bundle
from outrider.export.optimum.process import PYTHON
from outrider.runtime import Pipeline

pytest.importorskip("torch")

VOCABULARY = 320


@pytest.fixture(scope="module", autouse=True)
def traced_before(workdir: Path) -> Iterator[str | None]:
    """Optimum's environment is stood for by what it gave; the value is that of the environment itself."""
    before = os.environ.get(PYTHON)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(PYTHON, str(standin_python(workdir / "optimum-python")))
        yield before


def checkpoint(name: str, workdir: Path) -> Path:
    path = workdir / "traced" / name
    return path if path.exists() else write_checkpoint(name, path)


def exported(name: str, precision: str, workdir: Path, draft: str | None = None) -> Path:
    out = workdir / f"traced-{name}-{precision}-{draft}"
    if not out.exists():
        options = ExportOptions(precision, tiers=(2, 4), max_length=96, via="optimum")
        drafter = None if draft is None else str(checkpoint(draft, workdir))
        export_bundle(str(checkpoint(name, workdir)), drafter, out, options, threads=THREADS)
    return out


@pytest.fixture(scope="module")
def ids() -> NDArray[np.int64]:
    return np.random.default_rng(5).integers(0, VOCABULARY, 30)


@pytest.mark.parametrize("name", FAMILIES)
def test_fp32_equals_transformers(name: str, workdir: Path, ids: NDArray[np.int64]) -> None:
    """Rotary positions in three forms, ALiBi, learned positions with windows; the padded vocabulary is cut."""
    expected = transformers_logits(checkpoint(name, workdir), ids)[:, :VOCABULARY]
    out = exported(name, "fp32", workdir)
    found = engine_logits(checkpoint(name, workdir), out, "standard", "fp32", ids)
    assert np.abs(found["all"] - expected).max() < 1e-3
    assert np.abs(found["last"][-1] - expected[20]).max() < 1e-3
    info = Bundle(out).manifest.target
    assert (info.architecture, info.lowering, info.vocab_size, info.exactness) == (name, "standard", 320, "bitwise")


@pytest.mark.parametrize("name", ["bloom", "gpt_neo"])
def test_sequences_of_a_batch_have_their_own_lengths(name: str, workdir: Path, ids: NDArray[np.int64]) -> None:
    expected = transformers_logits(checkpoint(name, workdir), ids)[:, :VOCABULARY]
    bundle = Bundle(exported(name, "fp32", workdir))
    engine = OrtEngine(bundle.path("target/model.onnx"), bundle.manifest.target, threads=THREADS, batch=2)
    engine.plan(20, 1).run(np.stack([ids[:20], ids[:20]]), np.zeros(2, np.int32))
    found = engine.plan(4, 4).run(np.stack([ids[20:24], ids[9:13]]), np.array([20, 9], np.int32))
    assert np.abs(found - np.stack([expected[20:24], expected[9:13]])).max() < 1e-3


def test_both_ways_give_the_same_llama(workdir: Path, ids: NDArray[np.int64]) -> None:
    path, out = checkpoint("llama", workdir), workdir / "traced-llama-native"
    options = ExportOptions("fp32", tiers=(2, 4), max_length=96)
    export_bundle(str(path), None, out, options, threads=THREADS)
    bundles = [out, exported("llama", "fp32", workdir)]
    logits = [engine_logits(path, bundle, "", "", ids)["all"] for bundle in bundles]
    assert np.abs(logits[0] - logits[1]).max() < 1e-3
    texts = [Pipeline.load(bundle, threads=THREADS).generate("the fox", max_new_tokens=40, k=0) for bundle in bundles]
    assert texts[0].token_ids == texts[1].token_ids
    assert len(set(texts[0].token_ids)) > 5


@pytest.mark.parametrize(("name", "precision"), [("llama", "fp16"), ("gptj", "int8"), ("bloom", "int4")])
def test_smaller_precisions_stay_close(name: str, precision: str, workdir: Path, ids: NDArray[np.int64]) -> None:
    expected = transformers_logits(checkpoint(name, workdir), ids)[:, :VOCABULARY]
    out = exported(name, precision, workdir)
    found = engine_logits(checkpoint(name, workdir), out, "", precision, ids)
    correlation = np.corrcoef(found["all"].ravel(), expected.ravel())[0, 1]
    assert correlation > {"fp16": 0.9999, "int8": 0.99, "int4": 0.8}[precision]
    info = Bundle(out).manifest.target
    assert info.cache_dtype == ("float16" if precision == "fp16" else "float32")
    assert info.lowering == ("standard" if precision == "fp16" else "fused")
    assert found["check"]["kl_stored"] < 0.01
    sizes = [(folder / "target/weights.bin").stat().st_size for folder in (out, exported(name, "fp32", workdir))]
    assert sizes[0] < 0.9 * sizes[1]


def test_drafts_of_every_kind_leave_the_text_as_it_is(workdir: Path) -> None:
    """A target and a draft of two families, on the host and with heads in the graph."""
    folder = exported("gptj", "fp32", workdir, "bloom")
    host, resident = Pipeline.load(folder, threads=THREADS), on_cpu(folder)
    for law in ({}, {"temperature": 1.0, "seed": 3}):
        options: dict[str, Any] = {"max_new_tokens": 50, "ignore_eos": True, **law}
        plain = host.generate("one two one two one", k=0, **options)
        assert plain.exactness == "bitwise" and len(set(plain.token_ids)) > 5
        for pipeline, k, drafter in product((host, resident), (2, 4), ("model", "ngram")):
            assert (
                pipeline.generate("one two one two one", k=k, drafter=drafter, **options).token_ids == plain.token_ids
            )


def test_what_does_not_fit_is_refused_with_the_nodes_name(workdir: Path, tmp_path: Path) -> None:
    path = checkpoint("mpt", workdir)
    command = ("export", "--target", path, "--draft", "none", "--out", tmp_path / "out", "--via", "optimum")
    message = refused_by_cli(*command, "--precision", "fp32", "--max-length", 64)
    assert f"{path}: node /transformer/blocks.0/attn/Slice_3 depends on the length of the cache" in message
    assert not list(tmp_path.iterdir())


def node(model: onnx.ModelProto, name: str) -> onnx.NodeProto:
    return next(node for node in model.graph.node if node.name == name)


def other_axis(model: onnx.ModelProto) -> None:
    node(model, "/transformer/h.0/self_attention/Softmax").attribute[0].i = 2


def concatenated_otherwise(model: onnx.ModelProto) -> None:
    grown = next(node for node in model.graph.node if "present.1.key" in node.output)
    grown.input[:] = list(grown.input)[::-1]


def without_matrix(model: onnx.ModelProto) -> None:
    head = node(model, "/lm_head/MatMul")
    head.input[1] = head.input[0]


def other_state(model: onnx.ModelProto) -> None:
    model.graph.input[1].name = "conv_state.0"


def other_operator(model: onnx.ModelProto) -> None:
    node(model, "/transformer/h.0/mlp/gelu_impl/Tanh").op_type = "LpNormalization"


def one_position_for_all(model: onnx.ModelProto) -> None:
    for taker in model.graph.node:
        taker.input[:] = ["last" if name == "position_ids" else name for name in taker.input]
    model.graph.node.insert(0, onnx.helper.make_node("ReduceMax", ["position_ids"], ["last"], name="/Last"))


DAMAGES: dict[Callable[[onnx.ModelProto], None], str] = {
    one_position_for_all: "makes of a row's position what depends on the other rows' too",
    other_axis: "node /transformer/h.0/self_attention/Softmax is Softmax over axes",
    concatenated_otherwise: "gives present.1.key, and is no concatenation",
    without_matrix: "node /lm_head/MatMul gives the logits",
    other_state: "input conv_state.0 is no cache",
    other_operator: "node /transformer/h.0/mlp/gelu_impl/Tanh is LpNormalization",
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_other_graphs_are_refused_with_the_nodes_name(
    damage: Callable[[onnx.ModelProto], None], workdir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = "gptj" if damage is one_position_for_all else "bloom"
    model = onnx.load(TRACES / f"{name}.onnx")
    damage(model)
    monkeypatch.setattr("traced.TRACES", tmp_path)
    onnx.save(model, tmp_path / f"{name}.onnx")
    monkeypatch.setenv(PYTHON, str(standin_python(tmp_path / "python")))
    options = ExportOptions("fp32", tiers=(2,), max_length=64, via="optimum")
    path = checkpoint(name, workdir)
    message = refused(lambda: export_bundle(str(path), None, tmp_path / "out", options, threads=THREADS))
    assert DAMAGES[damage] in message and str(path) in message


def test_the_check_finds_another_model(workdir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Positions that end too soon, as a fault of the rewriter would have it."""
    from outrider.export.optimum import rewrite

    right = rewrite.rewrite

    def wrong(trace: Any, **options: Any) -> Any:
        return right(trace, **{**options, "positions": 20})

    monkeypatch.setattr(rewrite, "rewrite", wrong)
    options = ExportOptions("fp32", tiers=(2,), max_length=64, via="optimum")
    path = checkpoint("gptj", workdir)
    message = refused(lambda: export_bundle(str(path), None, tmp_path / "out", options, threads=THREADS))
    assert "the fp32 engine is not the model in" in message


@pytest.mark.parametrize(
    ("options", "parts"),
    [
        ({"via": "other"}, ["'other'", "optimum"]),
        ({"precision": "bf16"}, ["bf16", "fp32, fp16, int8 or int4"]),
        ({"precision": "fp32", "lowering": "fused"}, ["--lowering", "--via optimum"]),
        ({"draft_lowering": "standard"}, ["--draft-lowering", "--via optimum"]),
        ({"precision": "fp32", "head_precision": "fp32"}, ["--head-precision", "--via optimum"]),
        ({"tensor_precision": {"*": "int8"}}, ["--tensor-precision", "--via optimum"]),
    ],
)
def test_options_that_it_does_not_take(options: dict[str, Any], parts: list[str]) -> None:
    message = refused(lambda: ExportOptions(**{"via": "optimum", **options}))
    assert all(part in message for part in parts)


SCRIPTS = {
    "no such file": (None, ["/nowhere/python", "No such file", PYTHON]),
    "without Optimum": ("exit 1", ["not installed", "outrider[optimum]", PYTHON]),
    "failing": (
        '[ "$2" = -c ] || { printf "KeyError: 1\nValueError: no such task\nin vain\n" >&2; exit 1; }',
        ["does not export", "ValueError: no such task from KeyError: 1"],
    ),
    "missing tensors": (
        'for last; do :; done; [ "$2" = -c ] || { touch "$last/model.onnx"; echo "Some weights of X: a" >&2; }',
        ["not just the tensors", "Some weights of X: a"],
    ),
    "writing nothing": ("exit 0", ["does not export", "wrote no model.onnx"]),
    "writing junk": ('[ "$2" = -c ] || for last; do :; done; echo junk > "$last/model.onnx"', ["not ONNX"]),
}


@pytest.mark.parametrize("case", SCRIPTS)
def test_an_environment_that_does_not_work(
    case: str, workdir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script, parts = SCRIPTS[case]
    python = tmp_path / "python" if script else Path("/nowhere/python")
    if script:
        python.write_text(f"#!/bin/sh\n{script}\n")
        python.chmod(0o755)
    monkeypatch.setenv(PYTHON, str(python))
    options = ExportOptions("fp32", tiers=(2,), max_length=64, via="optimum")
    path = checkpoint("bloom", workdir)
    message = refused(lambda: export_bundle(str(path), None, tmp_path / "out", options, threads=THREADS))
    assert all(part in message for part in parts)
    assert not (tmp_path / "out").exists()


def test_other_checkpoints_are_refused(tiny: Path, workdir: Path, tmp_path: Path) -> None:
    options = ExportOptions("fp32", tiers=(2,), max_length=64, via="optimum")
    write_gguf(tmp_path / "tiny.gguf", tiny, "F32")
    message = refused(lambda: export_bundle(str(tmp_path / "tiny.gguf"), None, tmp_path / "out", options))
    assert "Hugging Face folder" in message
    folder = Path(shutil.copytree(checkpoint("llama", workdir), tmp_path / "llama"))
    config = (folder / "config.json").read_text().replace('"rope_type": "default"', '"rope_type": "linear"')
    (folder / "config.json").write_text(config)
    message = refused(lambda: export_bundle(str(folder), None, tmp_path / "out", options))
    assert "rope_parameters" in message and str(folder) in message


@pytest.fixture
def optimum_itself(traced_before: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    if not traced_before:
        pytest.skip(f"{PYTHON} names no environment with Optimum")
    monkeypatch.setenv(PYTHON, traced_before)


def test_a_tensor_that_is_missing(optimum_itself: None, workdir: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(checkpoint("gptj", workdir), tmp_path / "gptj"))
    tensors = load_file(folder / "model.safetensors")
    del tensors["transformer.h.1.mlp.fc_in.weight"]
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    options = ExportOptions("fp32", tiers=(2,), max_length=96, via="optimum")
    message = refused(lambda: export_bundle(str(folder), None, tmp_path / "out", options))
    assert "transformer.h.1.mlp.fc_in.weight" in message


def test_optimum_itself_gives_the_same(
    optimum_itself: None, workdir: Path, tmp_path: Path, ids: NDArray[np.int64]
) -> None:
    path, out = checkpoint("gptj", workdir), tmp_path / "out"
    options = ExportOptions("fp32", tiers=(2,), max_length=96, via="optimum")
    export_bundle(str(path), None, out, options, threads=THREADS)
    found = engine_logits(path, out, "", "", ids)["all"]
    assert np.abs(found - engine_logits(path, exported("gptj", "fp32", workdir), "", "", ids)["all"]).max() < 1e-5
