"""GGUF files of many families, as llama.cpp's converter wrote them, against the folders that they were made from."""

from __future__ import annotations

import dataclasses
import zipfile
from pathlib import Path

import numpy as np
import pytest
from gguf_families import CONFIGS, GOLDEN, tensors, write_folder
from gguf_files import write_gguf
from refusals import refused

from outrider.export.architectures import decoder_spec
from outrider.export.checkpoint import open_checkpoint, read_all
from outrider.export.reference import reference_logits
from outrider.export.spec import DecoderSpec

torch = pytest.importorskip("torch")

# Those whose metadata transformers reads well enough: not their rope scaling, partial rotation and windows.
READ_BY_TRANSFORMERS = ("qwen2", "qwen3", "gemma2", "phi3", "starcoder2", "gpt2")


@pytest.fixture(scope="module")
def files(workdir: Path) -> Path:
    with zipfile.ZipFile(GOLDEN) as archive:
        archive.extractall(workdir / "gguf-families")
    return workdir / "gguf-families"


@pytest.mark.parametrize("name", CONFIGS)
def test_a_file_is_the_folder_that_it_was_made_from(name: str, files: Path, tmp_path: Path) -> None:
    """The same ``DecoderSpec``, which is compared with transformers elsewhere, and the same tensors to the last bit."""
    folder = open_checkpoint(str(write_folder(tmp_path / name, name)))
    file = open_checkpoint(str(files / f"{name}.gguf"))
    specs = [decoder_spec(folder), decoder_spec(file)]
    offset = np.float32(specs[0].norm_offset - specs[1].norm_offset)  # what the file's norms have added
    for field in dataclasses.fields(DecoderSpec):
        theirs, ours = (getattr(spec, field.name) for spec in specs)
        if isinstance(theirs, (float, np.ndarray)) and field.name != "norm_offset":
            np.testing.assert_allclose(ours, theirs, rtol=1e-6, err_msg=field.name)
        elif field.name != "norm_offset":
            assert ours == theirs, field.name
    for key, tensor in tensors(name).items():
        np.testing.assert_array_equal(read_all(folder, key), tensor, err_msg=key)
        added = offset if key.endswith("norm.weight") else np.float32(0)
        np.testing.assert_array_equal(read_all(file, key), tensor + added, err_msg=key)
        np.testing.assert_array_equal(file.read(key, 5, 12), (tensor + added)[5:12], err_msg=key)


@pytest.mark.parametrize("name", READ_BY_TRANSFORMERS)
def test_a_file_is_what_transformers_reads_in_it(name: str, files: Path) -> None:
    from transformers import AutoModelForCausalLM

    ids = np.random.default_rng(8).integers(0, 48, 20)
    model = AutoModelForCausalLM.from_pretrained(files, gguf_file=f"{name}.gguf", dtype=torch.float32).eval()
    with torch.inference_mode():
        expected = np.asarray(model(torch.from_numpy(ids)[None]).logits[0])
    file = open_checkpoint(str(files / f"{name}.gguf"))
    assert np.abs(reference_logits(decoder_spec(file), file, ids) - expected).max() < 1e-3
    assert expected.std() > 0.1


@pytest.mark.parametrize(("key", "value"), [("attention.clamp_kqv", 8.0), ("logit_scale", 0.5), ("expert_count", 8)])
def test_settings_that_would_make_another_model(key: str, value: float, tiny: Path, tmp_path: Path) -> None:
    write_gguf(tmp_path / "m.gguf", tiny, "F16", extra={f"llama.{key}": value})
    message = refused(lambda: decoder_spec(open_checkpoint(str(tmp_path / "m.gguf"))))
    assert f"{value!r} in its config is not implemented for this family" in message
