#!/usr/bin/env python3
"""Make Hugging Face checkpoints to test and measure with.

make_checkpoint.py copy SOURCE OUT [--layers N]   SOURCE (GGUF or folder) as a float32 folder, or its first N layers
make_checkpoint.py random OUT --like TARGET [...] random weights of any Llama shape, bf16, with TARGET's tokenizer
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import ml_dtypes
import numpy as np
from safetensors.numpy import save_file

from outrider.export.architectures import llama
from outrider.export.checkpoint import Checkpoint, open_checkpoint, read_all

SHARD_BYTES = 1 << 30


@click.group()
def main() -> None:
    pass


@main.command()
@click.argument("source")
@click.argument("out", type=Path)
@click.option("--layers", type=int, help="Keep only the first N layers.")
def copy(source: str, out: Path, layers: int | None) -> None:
    copy_checkpoint(open_checkpoint(source), out, layers)


@main.command()
@click.argument("out", type=Path)
@click.option("--like", required=True, help="Checkpoint whose tokenizer is copied.")
@click.option("--hidden", default=3072)
@click.option("--intermediate", default=8192)
@click.option("--layers", default=28)
@click.option("--heads", default=24)
@click.option("--kv-heads", default=8)
@click.option("--head-dim", default=128)
@click.option("--vocab", default=128256)
def random(out: Path, like: str, vocab: int, **shape: int) -> None:
    """The defaults are the shape of Llama 3.2 3B."""
    config = llama_config(vocab=vocab, **shape)
    random_checkpoint(out, config, open_checkpoint(like))


def llama_config(
    *, hidden: int, intermediate: int, layers: int, heads: int, kv_heads: int, head_dim: int, vocab: int, **more: Any
) -> dict[str, Any]:
    return {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "hidden_act": "silu",
        "hidden_size": hidden,
        "intermediate_size": intermediate,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "vocab_size": vocab,
        "max_position_embeddings": 8192,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "tie_word_embeddings": True,
        **more,
    }


def copy_checkpoint(source: Checkpoint, out: Path, layers: int | None = None) -> None:
    """``source`` as a float32 folder with all or the first ``layers`` layers."""
    config = {**source.config, "architectures": ["LlamaForCausalLM"]}
    config["num_hidden_layers"] = layers or config["num_hidden_layers"]
    spec = llama.decoder_spec(config)
    names = [name for name, _ in spec.expected_shapes()]
    names += [bias for name in names if source.shape(bias := name.removesuffix("weight") + "bias") is not None]
    write_folder(out, config, source, ((name, read_all(source, name)) for name in names))


def random_checkpoint(
    out: Path,
    config: dict[str, Any],
    like: Checkpoint,
    *,
    seed: int = 0,
    dtype: Any = ml_dtypes.bfloat16,
    biases: bool = False,
) -> None:
    """Random weights of ``config``'s shape (norms at 1), scaled so that activations keep their size."""
    rng = np.random.default_rng(seed)
    spec = llama.decoder_spec(config)

    def tensors() -> Iterator[tuple[str, Any]]:
        for name, shape in spec.expected_shapes():
            if len(shape) == 1:
                yield name, (1 + 0.1 * rng.standard_normal(shape)).astype(dtype)
            else:
                yield name, (rng.standard_normal(shape, np.float32) * shape[1] ** -0.5).astype(dtype)
                if biases and ".layers." in name:
                    bias = 0.1 * rng.standard_normal(shape[0], np.float32)
                    yield name.removesuffix("weight") + "bias", bias.astype(dtype)

    write_folder(out, config, like, tensors())


def write_folder(out: Path, config: dict[str, Any], like: Checkpoint, tensors: Iterator[tuple[str, Any]]) -> None:
    out.mkdir(parents=True)
    files = like.tokenizer()
    (out / "config.json").write_text(json.dumps(config, indent=2))
    (out / "tokenizer.json").write_text(files.json)
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "chat_template": files.chat_template,
        **files.special_tokens,
    }
    (out / "tokenizer_config.json").write_text(json.dumps(settings, indent=2))
    (out / "generation_config.json").write_text(json.dumps({"eos_token_id": list(files.eos_token_ids)}))
    weight_map: dict[str, str] = {}
    shard: dict[str, Any] = {}
    count = 0

    def flush() -> None:
        nonlocal shard, count
        count += 1
        name = f"model-{count:05d}.safetensors"
        save_file(shard, out / name, metadata={"format": "pt"})
        weight_map.update(dict.fromkeys(shard, name))
        shard = {}

    for name, tensor in tensors:
        shard[name] = np.ascontiguousarray(tensor)
        if sum(part.nbytes for part in shard.values()) >= SHARD_BYTES:
            flush()
    if shard:
        flush()
    (out / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


if __name__ == "__main__":
    main()
