"""Exported engines against Hugging Face transformers (float32, CPU) on tiny random models of every shape we take."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from checkpoints import write_tiny
from numpy.typing import NDArray

from outrider.engines.bundle import Bundle
from outrider.engines.ort import OrtEngine
from outrider.export import ExportOptions, export_bundle
from outrider.export.architectures import decoder_spec
from outrider.export.checkpoint import open_checkpoint
from outrider.export.reference import reference_logits

torch = pytest.importorskip("torch")

LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
SHAPES: dict[str, dict[str, Any]] = {
    "grouped heads, tied": {},
    "untied head": {"tie_word_embeddings": False},
    "one head a group": {"heads": 4, "kv_heads": 4},
    "one shared key head": {"heads": 4, "kv_heads": 1},
    "wide heads": {"heads": 2, "kv_heads": 1, "head_dim": 64},
    "biases": {"biases": True, "attention_bias": True, "mlp_bias": True},
    "llama 3 positions": {"rope_scaling": LLAMA3, "rope_theta": 500000.0},
    "mistral": {"model_type": "mistral", "architectures": ["MistralForCausalLM"], "sliding_window": None},
    "many layers": {"layers": 5},
}
PROMPT, DECODED, VERIFIED = 21, 3, 6


@pytest.fixture(scope="module", params=SHAPES, ids=[name.replace(" ", "-") for name in SHAPES])
def checkpoint(request: pytest.FixtureRequest, workdir: Path) -> Path:
    name = request.param
    path = workdir / "shapes" / name.replace(" ", "-").replace(",", "")
    return path if path.exists() else write_tiny(path, seed=len(name), **SHAPES[name])


@pytest.fixture(scope="module")
def ids() -> NDArray[np.int64]:
    return np.random.default_rng(5).integers(0, 320, PROMPT + DECODED + VERIFIED)


def transformers_logits(checkpoint: Path, ids: NDArray[np.int64]) -> NDArray[np.float32]:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32).eval()
    with torch.inference_mode():
        return np.asarray(model(torch.from_numpy(ids)[None]).logits[0])


def engine_logits(checkpoint: Path, out: Path, lowering: str, precision: str, ids: NDArray[np.int64]) -> dict[str, Any]:
    """Prefill, decode, a verify pass over junk that is rolled back, and the verify pass that stands."""
    if not out.exists():
        options = ExportOptions(precision=precision, lowering=lowering, tiers=(2, 4), max_length=64)
        export_bundle(str(checkpoint), None, out, options, threads=2)
    bundle = Bundle(out)
    engine = OrtEngine(bundle.path("target/model.onnx"), bundle.manifest.target, threads=2)

    def step(tokens: NDArray[np.int64], length: int, rows: int) -> NDArray[np.float32]:
        return engine.plan(len(tokens), rows).run(tokens[None], np.full(1, length, np.int32))[0].copy()

    found = [step(ids[:PROMPT], 0, PROMPT)]
    found += [step(ids[n : n + 1], n, 1) for n in range(PROMPT, PROMPT + DECODED)]
    step(np.flip(ids)[:VERIFIED], PROMPT + DECODED, VERIFIED)
    found.append(step(ids[PROMPT + DECODED :], PROMPT + DECODED, VERIFIED))
    last = step(ids[:PROMPT], 0, 1)
    return {"all": np.concatenate(found), "last": last, "check": bundle.manifest.target.check}


@pytest.mark.parametrize("lowering", ["fused", "standard"])
def test_fp32_equals_transformers(checkpoint: Path, workdir: Path, ids: NDArray[np.int64], lowering: str) -> None:
    expected = transformers_logits(checkpoint, ids)
    out = workdir / f"{checkpoint.name}-{lowering}-fp32"
    found = engine_logits(checkpoint, out, lowering, "fp32", ids)
    assert np.abs(found["all"] - expected).max() < 1e-3
    # A prefill that wants its last row only gives that row.
    assert np.abs(found["last"][-1] - expected[PROMPT - 1]).max() < 1e-3


def test_both_lowerings_agree(checkpoint: Path, workdir: Path, ids: NDArray[np.int64]) -> None:
    both = [
        engine_logits(checkpoint, workdir / f"{checkpoint.name}-{lowering}-fp32", lowering, "fp32", ids)["all"]
        for lowering in ("fused", "standard")
    ]
    assert np.abs(both[0] - both[1]).max() < 1e-3


def test_the_reference_equals_transformers(checkpoint: Path, ids: NDArray[np.int64]) -> None:
    opened = open_checkpoint(str(checkpoint))
    found = reference_logits(decoder_spec(opened), opened, ids)
    assert np.abs(found - transformers_logits(checkpoint, ids)).max() < 1e-3


@pytest.mark.parametrize(
    ("lowering", "precision"), [("fused", "fp16"), ("standard", "fp16"), ("fused", "int8"), ("fused", "int4")]
)
def test_smaller_precisions_stay_close(
    checkpoint: Path, workdir: Path, ids: NDArray[np.int64], lowering: str, precision: str
) -> None:
    """The next-token law stays near the float32 one: the quantization error, not another model."""
    expected = transformers_logits(checkpoint, ids)
    out = workdir / f"{checkpoint.name}-{lowering}-{precision}"
    found = engine_logits(checkpoint, out, lowering, precision, ids)["all"]
    limit = {"fp16": 0.02, "int8": 0.1, "int4": 0.9}[precision]
    assert np.abs(found - expected).mean() < limit * expected.std()
    correlation = np.corrcoef(found.ravel(), expected.ravel())[0, 1]
    assert correlation > {"fp16": 0.9999, "int8": 0.99, "int4": 0.8}[precision]
