"""GGUF files as llama.cpp's converter would write them, from tiny checkpoint folders."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from checkpoints import tiny_tokenizer
from numpy.typing import NDArray

from outrider.export.checkpoint import open_checkpoint, read_all

Array = NDArray[Any]

HEADS, KV_HEADS, LAYERS = 4, 2, 2
NAMES = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
LAYER_NAMES = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
NAMES |= {f"model.layers.{n}.{hf}": f"blk.{n}.{name}" for n in range(LAYERS) for hf, name in LAYER_NAMES.items()}
# Bytes a block of 256 weights, and where in it the fp16 scales are; all other bytes may be anything.
K_BLOCKS = {
    "Q2_K": (84, (80, 82)),
    "Q3_K": (110, (108,)),
    "Q4_K": (144, (0, 2)),
    "Q5_K": (176, (0, 2)),
    "Q6_K": (210, (208,)),
}


def gguf_row(row: int, rows: int, heads: int) -> int:
    """Where llama.cpp's converter puts a row of a rotary projection: the two halves of a head alternate."""
    size = rows // heads
    head, inside = divmod(row, size)
    half, pair = divmod(inside, size // 2)
    return head * size + 2 * pair + half


def gguf_order(name: str, tensor: Array) -> Array:
    heads = HEADS if "q_proj" in name else KV_HEADS if "k_proj" in name else 0
    if not heads:
        return tensor
    moved = np.empty_like(tensor)
    for row in range(len(tensor)):
        moved[gguf_row(row, len(tensor), heads)] = tensor[row]
    return moved


def hf_order(name: str, tensor: Array) -> Array:
    heads = HEADS if "q_proj" in name else KV_HEADS if "k_proj" in name else 0
    if not heads:
        return tensor
    return np.stack([tensor[gguf_row(row, len(tensor), heads)] for row in range(len(tensor))])


def tensor_names(folder: Path) -> list[str]:
    return list(json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"])


def gguf_name(name: str) -> str:
    stem, kind = name.rsplit(".", 1)
    return f"{NAMES[stem]}.{kind}"


def quantized(name: str, tensor: Array, kind: str) -> Array:
    """The tensor's bytes in a type; for K-quants, which ``gguf`` only reads, arbitrary blocks with small scales."""
    if kind not in K_BLOCKS:
        return np.asarray(gguf.quantize(tensor, gguf.GGMLQuantizationType[kind]))
    size, scales = K_BLOCKS[kind]
    rng = np.random.default_rng(len(name))
    blocks = rng.integers(0, 256, (*tensor.shape[:-1], tensor.shape[-1] // 256, size), np.uint8)
    for at in scales:
        values = rng.uniform(2e-5, 1e-4, blocks.shape[:-1]).astype(np.float16)
        blocks[..., at : at + 2] = values[..., None].view(np.uint8)
    return blocks.reshape(*tensor.shape[:-1], -1)


def write_gguf(
    path: Path,
    folder: Path,
    kind: str,
    *,
    factors: Array | None = None,
    extra: dict[str, float | str] | None = None,
    vectors_too: bool = False,
    others: dict[str, str] | None = None,
) -> dict[str, Array]:
    """``folder`` as llama.cpp's converter would write it; returns each matrix as written, dequantized by ``gguf``.

    ``extra`` metadata is added; ``vectors_too`` writes norms and biases in ``kind`` as well, as no converter does;
    ``others`` are the types of tensors whose names have a part.
    """
    config = json.loads((folder / "config.json").read_text())
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    if "llama.attention.key_length" not in (extra or {}):
        writer.add_key_length(config["head_dim"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(config["rope_theta"])
    add_tokenizer(writer)
    for key, value in (extra or {}).items():
        if isinstance(value, str):
            writer.add_string(key, value)
        elif isinstance(value, int):
            writer.add_uint32(key, value)
        else:
            writer.add_float32(key, value)
    if factors is not None:
        writer.add_tensor("rope_freqs.weight", factors)
    source, written = open_checkpoint(str(folder)), {}
    for name in tensor_names(folder):
        tensor = gguf_order(name, read_all(source, name))
        if tensor.ndim == 1 and not vectors_too:
            writer.add_tensor(gguf_name(name), tensor)
            continue
        own = next((other for part, other in (others or {}).items() if part in name), kind)
        content, raw_type = quantized(name, tensor, own), gguf.GGMLQuantizationType[own]
        written[name] = hf_order(name, gguf.dequantize(content, raw_type))
        writer.add_tensor(gguf_name(name), content, raw_dtype=raw_type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return written


def add_tokenizer(writer: gguf.GGUFWriter) -> None:
    model = json.loads(tiny_tokenizer().json)
    special = {token["content"] for token in model["added_tokens"]}
    tokens = sorted(model["model"]["vocab"], key=model["model"]["vocab"].__getitem__)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(tokens)
    writer.add_token_types([3 if token in special else 1 for token in tokens])
    writer.add_token_merges([" ".join(merge) for merge in model["model"]["merges"]])
    writer.add_eos_token_id(0)
    writer.add_chat_template(tiny_tokenizer().chat_template)
