"""Settings of a checkpoint that would change the model or the text without a word: honoured, or refused out loud."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from checkpoints import tiny_tokenizer, write_tiny
from gguf_files import write_gguf
from safetensors.numpy import load_file, save_file

from outrider.engines.errors import OutriderError
from outrider.export import ExportOptions, export_bundle
from outrider.export.architectures import decoder_spec
from outrider.export.checkpoint import TokenizerFiles, open_checkpoint
from outrider.runtime import Pipeline

OPTIONS = ExportOptions(tiers=(2,), max_length=64)


def refuse(checkpoint: Path, tmp_path: Path, words: str) -> None:
    with pytest.raises(OutriderError, match=words):
        export_bundle(str(checkpoint), None, tmp_path / "bundle", OPTIONS, threads=2)
    assert not (tmp_path / "bundle").exists()


@pytest.mark.parametrize("dtype", [np.int8, np.int32, ml_dtypes.float8_e4m3fn])
def test_weights_of_another_type_are_refused(tmp_path: Path, dtype: Any) -> None:
    path = write_tiny(tmp_path / "tiny")
    file = next(path.glob("*.safetensors"))
    tensors = load_file(file)
    name = "model.layers.1.mlp.up_proj.weight"
    tensors[name] = (tensors[name] * 50).astype(dtype)
    save_file(tensors, file)
    refuse(path, tmp_path, f"tensor {name} has type")


def test_k_above_the_widest_pass_is_refused() -> None:
    with pytest.raises(OutriderError, match="K = 256 is too large"):
        ExportOptions(tiers=(2, 256))


def test_saved_truncation_and_padding_do_not_touch_prompts(tmp_path: Path) -> None:
    files = tiny_tokenizer()
    settings = json.loads(files.json)
    settings["truncation"] = {"direction": "Right", "max_length": 4, "strategy": "LongestFirst", "stride": 0}
    settings["padding"] = {
        "strategy": {"Fixed": 32},
        "direction": "Right",
        "pad_to_multiple_of": None,
        "pad_id": 0,
        "pad_type_id": 0,
        "pad_token": "<|end|>",
    }
    trained = TokenizerFiles(json.dumps(settings), None, {}, (0,))
    write_tiny(tmp_path / "tiny", files=trained)
    export_bundle(str(tmp_path / "tiny"), None, tmp_path / "bundle", OPTIONS, threads=2)
    ids = Pipeline.load(tmp_path / "bundle", threads=2).codec.encode("the quick brown fox jumps over")
    assert 4 < len(ids) < 32
    assert 0 not in ids


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"scaling.type": "longrope"}, r"rope scaling 'longrope \(GGUF\)' is not implemented"),
        (
            {"scaling.type": "yarn", "scaling.factor": 4.0, "scaling.yarn_attn_factor": 0.8},
            r"rope scaling 'yarn \(GGUF",
        ),
        ({"dimension_count": 8}, "partial_rotary_factor"),
    ],
)
def test_positions_of_another_kind_are_refused(tmp_path: Path, settings: dict[str, Any], words: str) -> None:
    folder = write_tiny(tmp_path / "hf")
    extra = {"llama.attention.key_length": 16} | {f"llama.rope.{key}": value for key, value in settings.items()}
    write_gguf(tmp_path / "m.gguf", folder, "F32", extra=extra)
    refuse(tmp_path / "m.gguf", tmp_path, words)


def test_linear_positions_of_old_files(tmp_path: Path) -> None:
    """Their key is another than that of new ones."""
    folder = write_tiny(tmp_path / "hf")
    plain = decoder_spec(open_checkpoint(str(folder))).inv_freq
    new = {"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 4.0}
    for number, keys in enumerate(({"llama.rope.scale_linear": 4.0}, new)):
        write_gguf(tmp_path / f"{number}.gguf", folder, "F32", extra={"llama.attention.key_length": 16, **keys})
        found = decoder_spec(open_checkpoint(str(tmp_path / f"{number}.gguf"))).inv_freq
        np.testing.assert_allclose(found, plain / 4, rtol=1e-6)


def test_vectors_in_bf16_are_read_whole(tmp_path: Path) -> None:
    """One row of a type that the reader hands out as bytes."""
    folder = write_tiny(tmp_path / "hf")
    write_gguf(tmp_path / "m.gguf", folder, "BF16", vectors_too=True)
    source, opened = open_checkpoint(str(folder)), open_checkpoint(str(tmp_path / "m.gguf"))
    expected = source.read("model.norm.weight", 0, 64).astype(ml_dtypes.bfloat16).astype(np.float32)
    np.testing.assert_array_equal(opened.read("model.norm.weight", 0, 64), expected)
    np.testing.assert_array_equal(opened.read("model.norm.weight", 3, 9), expected[3:9])


def test_a_provider_that_is_not_here_is_refused(tmp_path: Path) -> None:
    """Never the CPU instead, without a word."""
    import onnxruntime

    if "CUDAExecutionProvider" in onnxruntime.get_available_providers():
        pytest.skip("this ONNX Runtime has the provider")
    path = write_tiny(tmp_path / "tiny")
    export_bundle(str(path), None, tmp_path / "bundle", ExportOptions("fp16", tiers=(2,), max_length=64), threads=2)
    with pytest.raises(OutriderError, match="has no CUDAExecutionProvider"):
        Pipeline.load(tmp_path / "bundle", provider="cuda")
