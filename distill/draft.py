"""The draft as a checkpoint folder: what the ordinary export takes with ``--draft``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

from outrider.distill.model import DraftModel
from outrider.export.checkpoint import D2T
from outrider.export.shared_embedding import VOCABULARY, vocabulary_sha256


def write_draft(folder: Path, model: DraftModel, config: dict[str, Any], vocab: dict[str, int]) -> None:
    """Weights in float16; the embedding and the tokenizer are the target's, and left out."""
    draft_vocab = model.spec.draft_vocab
    assert draft_vocab is not None
    folder.mkdir(parents=True, exist_ok=True)
    tensors: dict[str, Any] = {name: values.astype(np.float16) for name, values in model.tensors().items()}
    tensors[D2T] = draft_vocab - np.arange(len(draft_vocab))
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "model.safetensors").chmod(0o644)  # the library gives it to its owner alone
    whole = config | {
        "draft_vocab_size": len(draft_vocab),
        "dtype": "float16",
        VOCABULARY: vocabulary_sha256(vocab),
    }
    (folder / "config.json").write_text(json.dumps(whole, indent=2) + "\n", encoding="utf-8")
