"""GGUF files read back through Hugging Face names: every type, head order, positions, and refusals."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import gguf
import numpy as np
import pytest
from checkpoints import TEXT, write_tiny
from gguf_files import HEADS, K_BLOCKS, KV_HEADS, Array, tensor_names, write_gguf
from tokenizers import Tokenizer

from outrider.engines.bundle import Bundle
from outrider.engines.errors import OutriderError
from outrider.engines.ort import OrtEngine
from outrider.export import ExportOptions, export_bundle
from outrider.export.architectures import decoder_spec
from outrider.export.checkpoint import Checkpoint, open_checkpoint, read_all
from outrider.export.gguf_checkpoint import GGUFCheckpoint

# A step of each type as a share of the largest weight of its block; Q4_0 has 16 steps, from -8 to 7.
STEPS = {"Q8_0": 1 / 127, "Q4_0": 1 / 8, "Q4_1": 2 / 15, "Q5_0": 1 / 16, "Q5_1": 2 / 31}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 32.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}


def pairs(folder: Path, file: Path) -> Iterator[tuple[str, Array, Array, Checkpoint]]:
    source, opened = open_checkpoint(str(folder)), open_checkpoint(str(file))
    for name in tensor_names(folder):
        assert opened.shape(name) == source.shape(name)
        yield name, read_all(opened, name), read_all(source, name), opened


def assert_slices_agree(opened: Checkpoint, name: str, whole: Array) -> None:
    rows = len(whole)
    for start, stop in [(0, 1), (rows - 1, rows), (1, rows // 2 + 3), (rows // 2 - 1, rows)]:
        part = opened.read(name, start, stop)
        assert part.dtype == np.float32
        np.testing.assert_array_equal(part, whole[start:stop])


@pytest.fixture(scope="module")
def wide(workdir: Path) -> Path:
    """Rows of 256, which K-quants need; untied, so that there is a head to read."""
    shape = {"hidden": 256, "intermediate": 256, "heads": HEADS, "kv_heads": KV_HEADS, "head_dim": 64}
    return write_tiny(workdir / "gguf-wide", seed=3, tie_word_embeddings=False, **shape)


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("biases", [False, True])
def test_float32_comes_back_exactly(tmp_path: Path, tied: bool, biases: bool) -> None:
    """Also the biases of queries and keys, whose rows llama.cpp moves with the weights."""
    folder = write_tiny(tmp_path / "hf", tie_word_embeddings=tied, biases=biases)
    write_gguf(tmp_path / "m.gguf", folder, "F32")
    for name, found, expected, opened in pairs(folder, tmp_path / "m.gguf"):
        np.testing.assert_array_equal(found, expected, err_msg=name)
        assert_slices_agree(opened, name, found)
        assert opened.config["tie_word_embeddings"] is tied
        assert (opened.shape("lm_head.weight") is None) is tied
        assert (opened.shape("model.layers.0.self_attn.q_proj.bias") is not None) is biases


@pytest.mark.parametrize("kind", ["F16", "BF16", *STEPS])
def test_smaller_types_stay_within_their_step(tmp_path: Path, wide: Path, kind: str) -> None:
    written = write_gguf(tmp_path / "m.gguf", wide, kind)
    for name, found, source, opened in pairs(wide, tmp_path / "m.gguf"):
        np.testing.assert_array_equal(found, written.get(name, source), err_msg=name)
        assert_slices_agree(opened, name, found)
        if kind in STEPS and source.ndim == 2:
            largest = np.abs(source).reshape(len(source), -1, 32).max(axis=2).repeat(32, axis=1)
            assert (np.abs(found - source) <= 1.01 * STEPS[kind] * largest).all(), name
        else:
            np.testing.assert_allclose(found, source, rtol=2**-8 if kind == "BF16" else 2**-11, atol=2**-24)


@pytest.mark.parametrize("kind", K_BLOCKS)
def test_k_quants(tmp_path: Path, wide: Path, kind: str) -> None:
    written = write_gguf(tmp_path / "m.gguf", wide, kind)
    for name, found, source, opened in pairs(wide, tmp_path / "m.gguf"):
        np.testing.assert_array_equal(found, written.get(name, source), err_msg=name)
        assert_slices_agree(opened, name, found)


def test_reading_does_not_write_to_the_file(tmp_path: Path, tiny: Path) -> None:
    """What a reader does with its rows stays with the reader."""
    write_gguf(tmp_path / "m.gguf", tiny, "F32")
    before = (tmp_path / "m.gguf").read_bytes()
    opened = open_checkpoint(str(tmp_path / "m.gguf"))
    rows = opened.read("model.embed_tokens.weight", 0, 4)
    expected = rows.copy()
    rows += 1
    np.testing.assert_array_equal(opened.read("model.embed_tokens.weight", 0, 4), expected)
    assert (tmp_path / "m.gguf").read_bytes() == before


def test_exports_from_file_and_folder_give_the_same_bits(tmp_path: Path, tiny: Path) -> None:
    write_gguf(tmp_path / "m.gguf", tiny, "F32")
    ids = np.random.default_rng(6).integers(0, 320, (1, 24))
    logits = []
    for source in (tiny, tmp_path / "m.gguf"):
        out = tmp_path / f"{source.stem}-bundle"
        export_bundle(str(source), None, out, ExportOptions(precision="fp32", max_length=64), threads=1)
        bundle = Bundle(out)
        engine = OrtEngine(bundle.path("target/model.onnx"), bundle.manifest.target, threads=1)
        logits.append(engine.plan(24, 24).run(ids, np.zeros(1, np.int32))[0].copy())
    np.testing.assert_array_equal(logits[0], logits[1])


def test_tokenizer_of_the_file_is_the_folders(tmp_path: Path, tiny: Path) -> None:
    write_gguf(tmp_path / "m.gguf", tiny, "F32")
    found, expected = (open_checkpoint(str(source)).tokenizer() for source in (tmp_path / "m.gguf", tiny))
    assert found.chat_template == expected.chat_template
    assert found.special_tokens == expected.special_tokens
    assert found.eos_token_ids == expected.eos_token_ids
    both = [Tokenizer.from_str(files.json) for files in (found, expected)]
    for text in [*TEXT, "<|user|>hi<|end|>", "déjà vu 😀 1969"]:
        assert both[0].encode(text).ids == both[1].encode(text).ids


def llama3_factors(theta: float, head_dim: int) -> Array:
    """As llama.cpp's converter computes them: one divisor a pair, by the pair's wavelength."""
    low = LLAMA3["original_max_position_embeddings"] / LLAMA3["low_freq_factor"]
    high = LLAMA3["original_max_position_embeddings"] / LLAMA3["high_freq_factor"]
    factors = []
    for dim in range(0, head_dim, 2):
        wavelength = 2 * np.pi * theta ** (dim / head_dim)
        if wavelength < high:
            factors.append(1.0)
        elif wavelength > low:
            factors.append(LLAMA3["factor"])
        else:
            smooth = (64 / wavelength - 1.0) / (4.0 - 1.0)
            factors.append(1 / ((1 - smooth) / LLAMA3["factor"] + smooth))
    return np.array(factors, np.float32)


def test_llama3_positions_as_factors(tmp_path: Path) -> None:
    folder = write_tiny(tmp_path / "hf", head_dim=64, rope_scaling=LLAMA3, rope_theta=500000.0)
    factors = llama3_factors(500000.0, 64)
    assert ((factors > 1) & (factors < 32)).sum() > 0  # the blended part is there
    write_gguf(tmp_path / "m.gguf", folder, "F32", factors=factors)
    found, expected = (decoder_spec(open_checkpoint(str(source))).inv_freq for source in (tmp_path / "m.gguf", folder))
    np.testing.assert_allclose(found, expected, rtol=1e-6)
    from transformers import AutoConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    theirs, _ = ROPE_INIT_FUNCTIONS["llama3"](AutoConfig.from_pretrained(folder), "cpu")
    np.testing.assert_allclose(found, theirs.double().numpy(), rtol=1e-6)


def test_config_of_smollm2(smollm2: Path) -> None:
    config = open_checkpoint(str(smollm2)).config
    assert config.pop("rms_norm_eps") == pytest.approx(1e-5, rel=1e-6)
    assert config == {
        "model_type": "llama",
        "num_hidden_layers": 30,
        "hidden_size": 576,
        "intermediate_size": 1536,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "head_dim": 64,
        "rope_theta": 100000.0,
        "rope_scaling": None,
        "max_position_embeddings": 8192,
        "vocab_size": 49152,
        "tie_word_embeddings": True,
        "partial_rotary_factor": 1.0,
    }


@pytest.mark.parametrize("kind", ["IQ4_NL", "IQ4_XS", "TQ1_0", "MXFP4", "Q8_1"])
def test_other_types_are_refused_by_name(tmp_path: Path, kind: str) -> None:
    block, size = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]]
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "llama")
    writer.add_tensor(
        "blk.0.attn_q.weight", np.zeros((2, 256 // block * size), np.uint8), raw_dtype=gguf.GGMLQuantizationType[kind]
    )
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(OutriderError, match=rf"tensor blk\.0\.attn_q\.weight has type {kind}; types that can be read"):
        GGUFCheckpoint(tmp_path / "m.gguf")


@pytest.mark.parametrize("kept", [0.0, 0.001, 0.01, 0.3, 0.99])
def test_a_file_cut_short_is_refused(tmp_path: Path, tiny: Path, kept: float) -> None:
    path = tmp_path / "m.gguf"
    write_gguf(path, tiny, "F32")
    content = path.read_bytes()
    path.write_bytes(content[: int(kept * len(content))])
    with pytest.raises(OutriderError, match=r"m\.gguf is damaged or cut short"):
        open_checkpoint(str(path))
