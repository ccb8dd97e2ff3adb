"""Rotary positions that depend on the length: short and long sequences against Hugging Face transformers."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from refusals import edit
from test_families import write_family
from test_parity import transformers_logits

from outrider.engines.bundle import Bundle
from outrider.engines.ort import OrtEngine
from outrider.export import ExportOptions, export_bundle
from outrider.export.architectures import decoder_spec
from outrider.export.checkpoint import open_checkpoint
from outrider.export.reference import reference_logits

torch = pytest.importorskip("torch")

ORIGINAL = 48
FACTORS = np.linspace(1, 3, 24)  # of the pairs that rotate: three quarters of a head of 64
LONGROPE = {"rope_type": "longrope", "short_factor": list(FACTORS), "long_factor": list(2 * FACTORS**2)}
SHAPE: dict[str, Any] = {
    "model_type": "phi3",
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "hidden_size": 128,
    "head_dim": 64,
    "partial_rotary_factor": 0.75,
    "original_max_position_embeddings": ORIGINAL,
    "max_position_embeddings": 128,
    "rope_scaling": LONGROPE,
}


@pytest.fixture(scope="module")
def checkpoint(workdir: Path) -> Path:
    return write_family(workdir / "phi3-longrope", SHAPE)


@pytest.fixture(scope="module")
def ids() -> NDArray[np.int64]:
    return np.random.default_rng(5).integers(1, 320, 64)


@pytest.mark.parametrize(("lowering", "longest"), [("fused", ORIGINAL), ("standard", ORIGINAL + 1), ("fused", 128)])
def test_the_longest_sequence_chooses(
    checkpoint: Path, ids: NDArray[np.int64], tmp_path: Path, lowering: str, longest: int
) -> None:
    """An export within the original length is transformers' short sequence, a longer one its long sequence."""
    options = ExportOptions("fp32", lowering, (2,), longest)
    export_bundle(str(checkpoint), None, tmp_path / "out", options, threads=2)
    bundle = Bundle(tmp_path / "out")
    engine = OrtEngine(bundle.path("target/model.onnx"), bundle.manifest.target, threads=2)
    opened = open_checkpoint(str(checkpoint))
    count = min(longest, len(ids))
    expected = transformers_logits(checkpoint, ids[:count])
    prompt = engine.plan(count - 1, count - 1).run(ids[None, : count - 1], np.zeros(1, np.int32))[0].copy()
    last = engine.plan(1, 1).run(ids[None, count - 1 : count], np.full(1, count - 1, np.int32))[0]
    reference = reference_logits(decoder_spec(opened).for_length(longest), opened, ids[:count])
    for found in (np.concatenate([prompt, last]), reference):
        assert np.abs(found - expected).max() < 1e-3
    other = transformers_logits(checkpoint, ids[:-1] if count <= ORIGINAL else ids[:ORIGINAL])[:ORIGINAL]
    assert np.abs(other - expected[:ORIGINAL]).max() > 0.1  # the two sides do differ


OLD = {"type": "longrope", **{key: LONGROPE[key] for key in ("short_factor", "long_factor")}}
KEYS: dict[str, dict[str, Any]] = {
    "su": {"rope_scaling": {**OLD, "type": "su", "original_max_position_embeddings": ORIGINAL}},
    "yarn": {"rope_scaling": {**OLD, "type": "yarn"}, "rope_theta": 5e4},
    "attention factor": {"rope_scaling": {**OLD, "attention_factor": 1.7}},
    "factor": {"rope_scaling": {**OLD, "factor": 32.0}},
    "no extension": {"rope_scaling": OLD, "max_position_embeddings": ORIGINAL},
    "original length in both places": {"rope_scaling": {**OLD, "original_max_position_embeddings": 7}},
}


@pytest.mark.parametrize("name", KEYS)
def test_keys_of_longrope(checkpoint: Path, ids: NDArray[np.int64], tmp_path: Path, name: str) -> None:
    """As older versions wrote them, at both sides of the original length."""
    folder = Path(shutil.copytree(checkpoint, tmp_path / "checkpoint"))
    edit("config.json", lambda config: config.pop("rope_parameters") and None)(folder)
    edit("config.json", lambda config: config.update(KEYS[name]))(folder)
    opened = open_checkpoint(str(folder))
    for count in (ORIGINAL, ORIGINAL + 1):
        spec = decoder_spec(opened).for_length(count)
        if count > spec.max_positions:
            continue
        expected = transformers_logits(folder, ids[:count])
        assert np.abs(reference_logits(spec, opened, ids[:count]) - expected).max() < 1e-3
