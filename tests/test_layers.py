"""A draft made of some of the target's layers: the model of those layers, over the target's own weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from checkpoints import write_tiny
from make_checkpoint import copy_checkpoint
from refusals import refused, refused_by_cli
from test_families import family

from outrider.engines.bundle import Bundle
from outrider.engines.ort import OrtEngine
from outrider.export import ExportOptions, export_bundle
from outrider.export.architectures import decoder_spec
from outrider.export.checkpoint import open_checkpoint
from outrider.export.reference import reference_logits
from outrider.runtime import Pipeline

torch = pytest.importorskip("torch")

IDS = np.random.default_rng(3).integers(1, 320, 30)
SMALL: dict[str, Any] = {"tiers": (2, 4), "max_length": 96}


@pytest.fixture(scope="module")
def source(workdir: Path) -> Path:
    return write_tiny(workdir / "layered", seed=4, layers=5)


def logits(bundle: Path) -> np.ndarray[Any, Any]:
    opened = Bundle(bundle)
    info = opened.manifest.draft
    assert info is not None
    engine = OrtEngine(opened.path(info.graph), info, threads=2)
    return engine.plan(len(IDS), len(IDS)).run(IDS[None], np.zeros(1, np.int32))[0].copy()


@pytest.mark.parametrize(("lowering", "precision"), [("fused", "int4"), ("fused", "fp32"), ("standard", "int4")])
def test_it_is_the_model_of_those_layers(source: Path, tmp_path: Path, lowering: str, precision: str) -> None:
    """Bit for bit that of a checkpoint that has only them; here the first two, which can be copied out."""
    options = ExportOptions(precision, lowering, **SMALL)
    copy_checkpoint(open_checkpoint(str(source)), tmp_path / "first", 2)
    export_bundle(str(source), str(tmp_path / "first"), tmp_path / "apart", options, threads=2)
    export_bundle(str(source), "layers:0-1", tmp_path / "shared", options, threads=2)
    assert np.array_equal(logits(tmp_path / "apart"), logits(tmp_path / "shared"))
    sizes = [(tmp_path / name / "target" / "weights.bin").stat().st_size for name in ("apart", "shared")]
    assert sizes[0] == sizes[1] and not (tmp_path / "shared" / "draft").exists()


@pytest.mark.parametrize("name", ["gemma3", "smollm3", "cohere2", "qwen3-moe"])
def test_layers_keep_what_is_their_own(name: str, workdir: Path) -> None:
    """Windows, positions, rotary bases, experts: transformers with its other layers taken out is the oracle."""
    from transformers import AutoModelForCausalLM

    path, kept = family(name, workdir), (1, 2)
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    decoder = model.model
    decoder.layers = torch.nn.ModuleList(decoder.layers[layer] for layer in kept)
    config = decoder.config
    if hasattr(config, "layer_types"):
        config.layer_types = [config.layer_types[layer] for layer in kept]
    config.num_hidden_layers = len(kept)
    with torch.inference_mode():
        expected = model(torch.from_numpy(IDS)[None], use_cache=False).logits[0].numpy()
    checkpoint = open_checkpoint(str(path))
    found = reference_logits(decoder_spec(checkpoint).of_layers(kept), checkpoint, IDS)
    assert np.abs(found - expected).max() < 1e-3


def test_text_is_the_targets(source: Path, tmp_path: Path) -> None:
    export_bundle(str(source), "layers:0,3-4", tmp_path / "out", ExportOptions(**SMALL), threads=2)
    pipeline = Pipeline.load(tmp_path / "out", threads=2)
    plain = pipeline.generate("the quick brown fox", max_new_tokens=40, k=0)
    drafted = pipeline.generate("the quick brown fox", max_new_tokens=40, k=4, drafter="model")
    assert drafted.token_ids == plain.token_ids
    assert drafted.stats.num_draft_tokens > 0


@pytest.mark.parametrize(
    ("draft", "more", "words"),
    [
        ("layers:", {}, ["''", "layers:0-3,26-29"]),
        ("layers:a", {}, ["'a'"]),
        ("layers:0-", {}, ["'0-'"]),
        ("layers:-1", {}, ["'-1'"]),
        ("layers:3-1", {}, ["3-1 runs backwards"]),
        ("layers:2,1", {}, ["must rise"]),
        ("layers:0-2,2", {}, ["each named once"]),
        ("layers:5", {}, ["layers 0 to 4"]),
        ("layers:0-99999999", {}, ["layers 0 to 4"]),
        ("layers:0-4", {}, ["the whole target"]),
        ("layers:0", {"draft_precision": "int8"}, ["the target's weights", "--draft-precision"]),
        ("layers:0", {"draft_lowering": "standard"}, ["the target's weights", "--draft-lowering"]),
        ("layers:0", {"translate_draft": True}, ["the target's weights", "--translate-draft"]),
        ("none", {"draft_precision": "int8", "translate_draft": True}, ["--draft-precision and --translate-draft"]),
        ("none", {"draft_lowering": "standard"}, ["--draft-lowering"]),
    ],
)
def test_refusals(source: Path, tmp_path: Path, draft: str, more: dict[str, Any], words: list[str]) -> None:
    options = ExportOptions(**SMALL, **more)
    given = None if draft == "none" else draft
    message = refused(lambda: export_bundle(str(source), given, tmp_path / "out", options))
    for word in (draft, *words):
        assert word in message
    flags = [(f"--{name.replace('_', '-')}", value) for name, value in more.items()]
    changes = [part for flag, value in flags for part in ([flag] if value is True else [flag, value])]
    command = ["--target", source, "--draft", draft, "--out", tmp_path / "out", "--max-length", 96, *changes]
    assert refused_by_cli("export", *command) == message
    assert not list(tmp_path.iterdir())
