"""Tiny models whose graphs Optimum traced (``scripts/make_traces.py``), and what stands for its environment."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Any

import numpy as np
from checkpoints import tiny_tokenizer

TRACES = Path(__file__).parent / "golden" / "traces"
_TINY = {"vocab_size": 324, "bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0}  # of which the tokenizer has 320
_LLAMA = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "max_position_embeddings": 128,
}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {**_LLAMA, "num_hidden_layers": 2},
    "gptj": {"n_embd": 32, "n_layer": 2, "n_head": 2, "rotary_dim": 8, "n_positions": 128},
    "bloom": {"hidden_size": 32, "n_layer": 2, "n_head": 2},
    "gpt_neo": {
        "hidden_size": 32,
        "num_layers": 2,
        "num_heads": 2,
        "attention_types": [[["global", "local"], 1]],
        "window_size": 7,
        "max_position_embeddings": 128,
    },
    "gemma": {**_LLAMA, "num_hidden_layers": 1},
}
# What cannot be rewritten: ALiBi counted from the end of the cache.
REFUSED: dict[str, dict[str, Any]] = {
    "mpt": {"d_model": 32, "n_layers": 1, "n_heads": 2, "max_seq_len": 128},
}


def write_checkpoint(name: str, path: Path) -> Path:
    """A checkpoint of one of the families; the same weights in every environment."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(name, **_TINY, **{**FAMILIES, **REFUSED}[name]))
    rng = np.random.default_rng(len(name))
    with torch.no_grad():
        for parameter, weight in sorted(model.named_parameters()):
            values = torch.from_numpy(rng.standard_normal(tuple(weight.shape), np.float32))
            if weight.ndim == 1:
                weight.add_(0.2 * values)
            else:
                weight.copy_(values if "emb" in parameter or "wte" in parameter else values * weight.shape[-1] ** -0.5)
    model.save_pretrained(path)
    (path / "tokenizer.json").write_text(tiny_tokenizer().json)
    return path


def standin_python(path: Path) -> Path:
    """Stands for the Python of Optimum's environment: what that gave for a folder of this name, it gives again."""
    path.write_text(
        "#!/bin/sh\n"
        'if [ "$2" = -c ]; then echo 0.1.0; exit; fi\n'
        'while [ "$1" != --model ]; do shift; done\n'
        f'cp {shlex.quote(str(TRACES))}/"$(basename "$2").onnx" "$3/model.onnx"\n'
    )
    path.chmod(0o755)
    return path
