"""A draft distilled from a target: its text, its training, its head, and what the loop makes of it."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import count, islice
from pathlib import Path
from shutil import copytree
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from checkpoints import tiny_tokenizer, write_tiny
from click.testing import CliRunner
from gguf_files import write_gguf
from refusals import edit, write
from residents import on_cpu
from safetensors.numpy import load_file, save_file
from test_families import FAMILIES as TESTED_FAMILIES
from test_families import write_family

from outrider.cli import main
from outrider.distill import DistillOptions, distill_draft
from outrider.distill import text as text_module
from outrider.distill import train as train_module
from outrider.distill.draft import write_draft
from outrider.distill.layers import layers_config, layers_spec, layers_tensors
from outrider.distill.measure import alpha_by_position
from outrider.distill.model import DraftModel
from outrider.distill.source import Source
from outrider.distill.starts import Starts
from outrider.distill.table import write_next_tokens
from outrider.distill.text import WrittenText
from outrider.distill.train import Trainer
from outrider.distill.writer import Writer, Written
from outrider.engines.bundle import Bundle
from outrider.engines.errors import OutriderError
from outrider.engines.next_tokens import NextTokens
from outrider.engines.tensorrt import BuildOptions, build_engine
from outrider.export import ExportOptions, export_bundle
from outrider.export.architectures import decoder_spec
from outrider.export.checkpoint import open_checkpoint
from outrider.export.reference import reference_logits
from outrider.export.shared_embedding import SharedEmbedding
from outrider.export.spec import NO_TOKEN
from outrider.runtime import Pipeline, SamplingOptions
from outrider.runtime.bench import Prompt
from outrider.runtime.drafters.model import ModelDrafter

OPTIONS = DistillOptions(minutes=2, tokens=3000, steps=4, max_length=96)
PROMPT = "the quick brown fox"
FAMILIES = {
    "llama": {},
    "untied": {"tie_word_embeddings": False},
    "biases": {"model_type": "qwen2"},
    "windows": {"model_type": "mistral", "sliding_window": 8},
}


def refusing(message: str) -> Any:
    return pytest.raises(OutriderError, match=re.escape(message))


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory, tiny: Path) -> Path:
    out = tmp_path_factory.mktemp("distill") / "draft"
    distill_draft(str(tiny), out, OPTIONS, threads=2)
    return out


@pytest.fixture(scope="module")
def pair(made: Path, tiny: Path) -> Pipeline:
    out = made.with_name("pair")
    export_bundle(str(tiny), str(made), out, ExportOptions(tiers=(1, 4), max_length=96), threads=2)
    return Pipeline.load(out, threads=2)


def weights_and_table(draft: Path) -> tuple[bytes, bytes]:
    return (draft / "model.safetensors").read_bytes(), (draft / "next_tokens.npz").read_bytes()


def test_steps_and_seed_give_the_same_draft_whatever_came_between(
    made: Path, tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Interrupted while it writes (what was not flushed is lost) and while it trains, and gone on with."""
    out, interrupt = tmp_path / "draft", Interrupt(monkeypatch)
    monkeypatch.setattr(text_module, "_SHARD_TOKENS", 200)
    with interrupt.of(WrittenText, "add", 40), monkeypatch.context() as killed:
        killed.setattr(WrittenText, "flush", lambda self: None)
        distill_draft(str(tiny), out, OPTIONS, threads=2)
    with refusing("holds an earlier distillation; go on with --resume"):
        distill_draft(str(tiny), out, OPTIONS, threads=2)
    with interrupt.of(WrittenText, "add", 30):
        distill_draft(str(tiny), out, OPTIONS, threads=2, resume=True)
    assert len(list((tmp_path / "draft.work/text").glob("*.npz"))) > 0
    monkeypatch.setattr(train_module, "_CHECKPOINT_SECONDS", 0)
    with interrupt.of(Trainer, "_step", 3):
        distill_draft(str(tiny), out, OPTIONS, threads=2, resume=True)
    assert not out.exists()
    with refusing("training.pt is a training with another number of steps"):
        distill_draft(str(tiny), out, replace(OPTIONS, steps=5), threads=2, resume=True)
    (tmp_path / "draft.work/training.pt").write_bytes(whole := (tmp_path / "draft.work/training.pt").read_bytes()[:999])
    with refusing("training.pt is damaged"):
        distill_draft(str(tiny), out, OPTIONS, threads=2, resume=True)
    assert len(whole) == 999
    (tmp_path / "draft.work/training.pt").unlink()
    with refusing("holds text of another seed"):
        distill_draft(str(tiny), out, replace(OPTIONS, seed=1), threads=2, resume=True)
    distill_draft(str(tiny), out, OPTIONS, threads=2, resume=True)
    assert weights_and_table(out) == weights_and_table(made)


class Interrupt:
    """Interrupts the process at a call of a method."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self._patch = patch

    @contextmanager
    def of(self, owner: type, name: str, when: int) -> Iterator[None]:
        real, calls = getattr(owner, name), count()

        def counted(*given: Any) -> Any:
            if next(calls) == when:
                raise KeyboardInterrupt
            return real(*given)

        with self._patch.context() as patch, pytest.raises(KeyboardInterrupt):
            patch.setattr(owner, name, counted)
            yield


def test_text_counts_as_far_as_all_of_it_is_there(tmp_path: Path) -> None:
    """By number, whatever ended first; what came to nothing is waited for, and equal beginnings count once."""

    def one(number: int, size: int) -> Written:
        ids = np.full(size, 7 + number // 2, np.int32)
        return Written(number, 0, ids, np.zeros((size, 2), np.int32), np.zeros((size, 2), np.float16))

    text = WrittenText(tmp_path, {})
    for number, size in ((3, 40), (0, 30), (1, 30)):
        text.add(one(number, size))
    assert text.tokens == 30
    text.add(one(2, 0))
    assert text.tokens == 70
    text.flush()
    text.add(one(5, 9))
    text.flush()
    again = WrittenText(tmp_path, {})
    assert (again.tokens, again.ended) == (70, {0, 1, 2, 3, 5})
    assert [one.number for one in again.sequences()] == [0, 3]
    assert [one.number for one in again.sequences(30)] == [0]
    (tmp_path / "00001.npz").write_bytes((tmp_path / "00001.npz").read_bytes()[:200])
    with refusing("00001.npz is damaged"):
        WrittenText(tmp_path, {})


def test_a_target_without_a_template_writes_texts_that_differ(tmp_path: Path) -> None:
    files = replace(tiny_tokenizer(), chat_template=None)
    target = write_tiny(tmp_path / "target", seed=1, files=files)
    out = tmp_path / "draft"
    report = distill_draft(str(target), out, replace(OPTIONS, steps=1), threads=2)
    assert not report.chat
    assert report.tokens >= 3000
    assert "without a chat template, which it has not" in (out / "README.md").read_text()
    export_bundle(str(target), str(out), tmp_path / "pair", ExportOptions(tiers=(2,), max_length=96), threads=2)


def test_long_prompts_are_left_out_and_counted(tiny: Path, tmp_path: Path) -> None:
    source = Source(str(tiny), tmp_path / "bundle", 96, 2)
    prompts = [Prompt("a", "x", "fox " * 80), Prompt("b", "x", "fox"), Prompt("c", "x", "dog")]
    starts = Starts(source.codec, source.opening, prompts, 96)
    assert starts.too_long == 1
    assert [prompt.id for prompt in starts.held_out_prompts] == ["b"]
    with refusing("no prompt has"):
        Starts(source.codec, source.opening, prompts[:1], 96)
    with refusing("prompt d is not UTF-8 text"):
        Starts(source.codec, source.opening, [Prompt("d", "x", "\ud800")], 96)
    with refusing("leaves no room behind them"):
        Writer(source.engine(), source.opening, starts, source.end_token_ids, 20, 0)


def test_every_drafter_over_a_distilled_draft_gives_plain_text(pair: Pipeline) -> None:
    plain = pair.generate(PROMPT, k=0, max_new_tokens=60)
    for drafter in ("ngram", "model", "cascade"):
        for temperature in (0.0, 1.0):
            expected = plain if not temperature else pair.generate(PROMPT, k=0, temperature=1.0, seed=5)
            found = pair.generate(
                PROMPT,
                k=4,
                drafter=drafter,
                max_new_tokens=60 if not temperature else 128,
                temperature=temperature,
                seed=5,
            )
            assert found.token_ids == expected.token_ids
            assert found.stats.num_draft_tokens or drafter == "ngram"


@pytest.mark.parametrize("lowering", ["fused", "standard"])
@pytest.mark.parametrize("family", FAMILIES)
def test_drafts_of_layers_are_what_pytorch_trained(family: str, lowering: str, tmp_path: Path) -> None:
    target = write_tiny(tmp_path / "target", layers=3, biases=family == "biases", **FAMILIES[family])
    check_layers(target, lowering, tmp_path)


@pytest.mark.parametrize("name", ["opt", "gemma2"])
def test_layers_with_learned_positions_or_caps_can_be_a_draft(name: str, tmp_path: Path) -> None:
    """Caps on scores and logits come with norms behind sublayers and a window in every other layer."""
    target = write_family(tmp_path / "target", {**TESTED_FAMILIES[name], "num_hidden_layers": 3})
    check_layers(target, "fused", tmp_path)


def test_layers_of_a_gguf_file_can_be_a_draft(tmp_path: Path, tiny: Path) -> None:
    write_gguf(tmp_path / "target.gguf", tiny, "F16")
    check_layers(tmp_path / "target.gguf", "fused", tmp_path, layers=(0, 1))


def check_layers(target: Path, lowering: str, folder: Path, layers: tuple[int, ...] = (0, 2)) -> None:
    """The model in training, its folder read by the reference, and its engine agree; other tokens have no chance."""
    source = Source(str(target), folder / "bundle", 64, 2)
    size = len(source.embedding())
    kept = np.arange(1, size, 3)
    config = layers_config(source.checkpoint.config, layers)
    spec = replace(layers_spec(config, source.spec, layers), draft_vocab=kept)
    tensors = layers_tensors(spec, source.spec, layers, source.checkpoint)
    tensors = {name: tensor.half().float() for name, tensor in tensors.items()}  # as they are written
    model = DraftModel(spec, tensors, source.embedding(), 32)
    write_draft(folder / "draft", model, config, source.vocab)
    draft = SharedEmbedding(open_checkpoint(str(folder / "draft")), source.checkpoint, source.spec.embedding)
    ids = np.arange(24) * 7 % size
    expected = reference_logits(decoder_spec(draft), draft, ids)
    seen = torch.ones(24, 24, dtype=torch.bool).tril()[None]
    places = torch.arange(24)[None]
    with torch.no_grad():
        trained = model.logits(model.hidden(torch.from_numpy(ids)[None], places, seen))[0].numpy()
    np.testing.assert_allclose(trained, expected[:, kept], atol=1e-4)
    assert (np.delete(expected, kept, axis=1) == NO_TOKEN).all()
    options = ExportOptions("fp32", lowering, tiers=(2,), max_length=64)
    manifest = export_bundle(str(target), str(folder / "draft"), folder / "out", options, threads=2)
    assert manifest.draft is not None
    assert manifest.draft.check["max_difference"] < 1e-3  # of all tokens, those without a row too


def test_residual_acceptance_never_draws_what_the_head_lacks(reduced: Path, tiny: Path, tmp_path: Path) -> None:
    """q is 0 there; the target's own law is reached by its corrections: they give tokens outside of the head too."""
    export_bundle(str(tiny), str(reduced), tmp_path / "pair", ExportOptions(tiers=(4,), max_length=96), threads=2)
    pipeline = Pipeline.load(tmp_path / "pair", threads=2)
    proposed: set[int] = set()
    propose = ModelDrafter.propose

    def noted(self: ModelDrafter, *given: Any) -> Any:
        drafts = propose(self, *given)
        proposed.update(draft.token for draft in drafts)
        return drafts

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ModelDrafter, "propose", noted)
        for acceptance in ("exact", "residual", "block"):
            found = pipeline.generate(PROMPT, k=4, temperature=1.0, seed=1, acceptance=acceptance, max_new_tokens=60)
            assert any(token % 2 for token in found.token_ids), acceptance
    assert proposed
    assert not any(token % 2 for token in proposed)


@pytest.fixture(scope="module")
def reduced(made: Path) -> Path:
    """The draft with a head of the even tokens only."""
    folder = copytree(made, made.with_name("reduced"))
    tensors = load_file(folder / "model.safetensors")
    kept = np.arange(0, 320, 2)
    tensors["lm_head.weight"], tensors["d2t"] = tensors["lm_head.weight"][kept], kept - np.arange(len(kept))
    save_file(tensors, folder / "model.safetensors")
    edit("config.json", lambda config: config.update(draft_vocab_size=len(kept)))(folder)
    return folder


@pytest.mark.parametrize("law", [{}, {"temperature": 1.0, "seed": 3}])
def test_rounds_on_a_device_take_a_reduced_head(reduced: Path, tiny: Path, tmp_path: Path, law: dict[str, Any]) -> None:
    options = ExportOptions("fp32", tiers=(4,), max_length=96)
    export_bundle(str(tiny), str(reduced), tmp_path / "pair", options, threads=2)
    expected = Pipeline.load(tmp_path / "pair", threads=2).generate(PROMPT, k=4, drafter="model", **law)
    found = on_cpu(tmp_path / "pair").generate(PROMPT, k=4, drafter="model", **law)
    assert (found.token_ids, found.origins) == (expected.token_ids, expected.origins)
    assert found.stats.num_draft_tokens


def test_tensorrt_builds_a_reduced_head(reduced: Path, tiny: Path, tmp_path: Path) -> None:
    options = ExportOptions("fp16", "standard", tiers=(4,), max_length=96)
    export_bundle(str(tiny), str(reduced), tmp_path / "pair", options, threads=2)
    engine, _ = build_engine(Bundle(tmp_path / "pair"), "draft", BuildOptions("tensorrt-rtx", "sm89", (4,)))
    assert engine.role == "draft"


def test_a_written_sequence_is_the_targets_own_text(tiny: Path, tmp_path: Path) -> None:
    """Greedy answers of neighbours in a batch, of other lengths each, are what the pipeline gives alone."""
    source = Source(str(tiny), tmp_path / "bundle", 96, 2)
    prompts = [Prompt(text, "x", text) for text in ("fox", "the lazy dog does not mind", "one two three")]
    starts = Starts(source.codec, source.opening, prompts, 96)
    writer = Writer(source.engine(), source.opening, starts, source.end_token_ids, 96, seed=3)
    pipeline = Pipeline.load(tmp_path / "bundle", threads=2)
    checked = 0
    for one in islice(writer.write(count()), 120):
        start = starts[one.number]
        assert one.ids.shape == one.top_ids.shape[:1] == one.top_logits.shape[:1]
        if start.temperature == 0 and len(one.ids) and checked < 12:
            ids = [*source.opening.before, *one.ids.tolist()]
            asked = len(source.opening.before) + one.answer
            request = pipeline.new_request(ids[:asked], SamplingOptions(max_new_tokens=len(ids) - asked))
            assert list(pipeline.decode(request, "none", 0)) == ids[asked:]
            checked += 1
    assert checked == 12


def test_the_table_knows_what_follows(tmp_path: Path) -> None:
    laws = {(7,): 1, (1, 2): 3, (4, 2): 5}  # behind 2 alone nothing is sure
    written = []
    for number, (context, token) in enumerate([*laws.items()] * 3):
        ids = np.array([9, *context], np.int32)
        top = np.tile(np.array([[token, 8]], np.int32), (len(ids), 1))
        written.append(Written(number, len(ids) - 1, ids, top, np.zeros_like(top, np.float16) - [0, 3]))
    write_next_tokens(tmp_path / "table.npz", written)
    table = NextTokens.load(tmp_path / "table.npz", 10)
    assert table.chain([9, 1, 2], 4) == ([3], [2])
    assert table.chain([4, 2], 1) == ([5], [2])
    assert table.chain([9, 7], 4)[0] == [1, 3]
    assert table.chain([2], 2) == ([], [])


def test_alpha_by_position_is_of_those_that_reached_it() -> None:
    assert alpha_by_position([5, 3, 0, 2]) == [0.5, 0.4, 1.0]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"minutes": 1.0}, "--minutes 1 leaves no time for one evaluation; give 2 or more"),
        ({"kind": "huge"}, "--kind huge is unknown; use tiny, or layers:"),
        ({"tokens": 0}, "--tokens 0 must be 1 or more"),
        ({"minutes": float("nan")}, "--minutes nan leaves no time"),
    ],
)
def test_options_that_make_no_sense(changes: dict[str, Any], message: str) -> None:
    with refusing(message):
        DistillOptions(**changes)


def test_a_draft_is_of_one_target(made: Path, tiny: Path, tmp_path: Path) -> None:
    other = write_tiny(tmp_path / "other", hidden=32, heads=2, kv_heads=1)
    with refusing("embedding_projection.weight has shape [256, 64], and the target's embedding is 32 wide"):
        export_bundle(str(other), str(made), tmp_path / "out", ExportOptions(tiers=(2,)), threads=2)
    words = write_tiny(tmp_path / "words", files=tiny_tokenizer(310), vocab=320)
    with refusing("was distilled from a target with other tokens"):
        export_bundle(str(words), str(made), tmp_path / "out", ExportOptions(tiers=(2,)), threads=2)
    with refusing("has no embedding of its own: it is a draft, for --draft beside its target"):
        export_bundle(str(made), None, tmp_path / "out", ExportOptions(tiers=(2,)), threads=2)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (edit("config.json", lambda config: config.update(draft_vocab_size=7)), "draft_vocab_size is 7"),
        (write("next_tokens.npz", b"not a table"), "next_tokens.npz is not a table of next tokens"),
    ],
)
def test_a_damaged_draft_is_refused(made: Path, tiny: Path, tmp_path: Path, damage: Any, message: str) -> None:
    folder = copytree(made, tmp_path / "draft")
    damage(folder)
    with refusing(message):
        export_bundle(str(tiny), str(folder), tmp_path / "out", ExportOptions(tiers=(2,)), threads=2)
    assert not (tmp_path / "out").exists()


def test_the_command_says_what_is_wrong(
    tiny: Path, made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "a"}\nnonsense\n')

    def failed(*arguments: str) -> str:
        result = CliRunner().invoke(main, ["distill", str(tiny), *arguments])
        assert result.exit_code == 1
        return result.stderr

    new = str(tmp_path / "new")
    assert "prompts.jsonl, line 2: expected" in failed("--out", new, "--prompts", str(tmp_path / "prompts.jsonl"))
    assert f"{made} exists; remove it" in failed("--out", str(made))
    monkeypatch.setattr("shutil.disk_usage", lambda path: SimpleNamespace(free=1000))
    assert "GB free; free some" in failed("--out", new)
    monkeypatch.setitem(sys.modules, "torch", None)
    for name in [name for name in sys.modules if name.startswith("outrider.distill")]:
        monkeypatch.delitem(sys.modules, name)
    assert "torch is not installed; run `pip install 'outrider[cpu,export,distill]'`" in failed("--out", new)
    assert not list(tmp_path.glob("new*"))
