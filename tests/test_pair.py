"""Which draft may serve which target."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from checkpoints import tiny_tokenizer, write_tiny
from hypothesis import given
from hypothesis import strategies as st
from safetensors.numpy import load_file, save_file

from outrider.engines.errors import OutriderError
from outrider.export import ExportOptions, export_bundle
from outrider.export.pair import check_pair
from outrider.runtime import Pipeline

OPTIONS = ExportOptions(tiers=(4,), max_length=64)


def test_equal_sizes_are_not_enough() -> None:
    with pytest.raises(OutriderError, match="id 1 is 'b' for the target and 'c' for the draft"):
        check_pair({"a": 0, "b": 1, "c": 2}, {"a": 0, "c": 1, "b": 2})


def test_a_missing_token_is_named() -> None:
    with pytest.raises(OutriderError, match="id 1 is 'b' for the target and no token for the draft"):
        check_pair({"a": 0, "b": 1}, {"a": 0})


@given(tokens=st.lists(st.text(max_size=3), unique=True, min_size=2, max_size=9), data=st.data())
def test_any_other_order_is_refused(tokens: list[str], data: st.DataObject) -> None:
    other = data.draw(st.permutations(tokens))
    target = {token: index for index, token in enumerate(tokens)}
    draft = {token: index for index, token in enumerate(other)}
    if target == draft:
        check_pair(target, draft)
        return
    first = next(index for index, (a, b) in enumerate(zip(tokens, other, strict=True)) if a != b)
    with pytest.raises(OutriderError, match=f"id {first} is"):
        check_pair(target, draft)


def test_padded_vocabularies_are_cut(tmp_path: Path) -> None:
    """Embeddings padded by different amounts behind one tokenizer; the rows of the padding would win every argmax."""
    target = write_tiny(tmp_path / "target", seed=1, vocab=352, tie_word_embeddings=False)
    draft = write_tiny(tmp_path / "draft", seed=1, vocab=384, tie_word_embeddings=False)
    for path in (target, draft):
        file = next(path.glob("*.safetensors"))
        tensors = load_file(file)
        head = tensors["lm_head.weight"]
        rows = head.shape[0]
        tensors["lm_head.weight"] = np.concatenate([head[:320], 1e3 * np.ones((rows - 320, 64), np.float32)])
        save_file(tensors, file)
    export_bundle(str(target), str(draft), tmp_path / "bundle", OPTIONS, threads=2)
    pipeline = Pipeline.load(tmp_path / "bundle", threads=2)
    assert pipeline.manifest.draft is not None
    assert pipeline.manifest.target.vocab_size == pipeline.manifest.draft.vocab_size == 320
    result = pipeline.generate("the quick brown fox", k=4, drafter="model", max_new_tokens=40)
    assert max(result.token_ids) < 320
    assert result.token_ids == pipeline.generate("the quick brown fox", k=0, max_new_tokens=40).token_ids


def test_another_tokenizer_is_refused(tmp_path: Path) -> None:
    target = write_tiny(tmp_path / "target")
    draft = write_tiny(tmp_path / "draft", files=tiny_tokenizer(300), vocab=320)
    with pytest.raises(OutriderError, match="the draft has another tokenizer: id 300 is"):
        export_bundle(str(target), str(draft), tmp_path / "bundle", OPTIONS)
    assert not (tmp_path / "bundle").exists()
