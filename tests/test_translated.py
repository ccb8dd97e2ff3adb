"""A draft with another tokenizer: plain decoding's own text, drafts that are right where the models agree, refusals."""

from __future__ import annotations

import json
import shutil
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from checkpoints import tiny_tokenizer, write_tiny
from conftest import THREADS
from refusals import Change, cli, edit, flip, refused, refused_by_cli, remove
from residents import on_cpu
from safetensors.numpy import load_file, save_file
from tokenizers import Tokenizer
from vocabularies import gguf_metadata, train_sentencepiece

from outrider.engines.bundle import MANIFEST
from outrider.export import ExportOptions, export_bundle
from outrider.export.checkpoint import TokenizerFiles
from outrider.export.gguf_tokenizer import tokenizer_from_metadata
from outrider.runtime import GenerationResult, Pipeline
from outrider.runtime.bench import Prompt, run_bench
from outrider.runtime.sampling.options import SamplingOptions

CYCLE = " the dog🦜, fox日 two"  # each of its tokens follows one other, in both vocabularies
OPTIONS = ExportOptions(precision="fp32", tiers=(1, 2, 4, 8), max_length=160, translate_draft=True)
LAWS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "temperature": {"temperature": 1.0, "seed": 3},
    "filters": {"temperature": 0.8, "top_p": 0.9, "min_p": 0.02, "seed": 5},
    "log-probabilities": {"logprobs": 2, "temperature": 0.7, "seed": 1},
    "penalty": {"repetition_penalty": 1.3},
    "stop string": {"stop_strings": ["o", "dog"]},
    "grammar": {"regex": "[a-zäöü ]{3,40}"},
    "ends": {"eos_token_id": [5, 40, 300], "stop_token_ids": [17, 21]},
}


def sentencepiece() -> TokenizerFiles:
    metadata = gguf_metadata(train_sentencepiece(space_prefix=True))
    return tokenizer_from_metadata(metadata.get, Path("m.gguf"))


FILES = {"byte-level": tiny_tokenizer, "sentencepiece": sentencepiece}
VOCAB = {"byte-level": 320, "sentencepiece": 464}  # the second padded


def write_cyclic(path: Path, kind: str) -> Path:
    """A model that writes ``CYCLE`` on and on: its layers add nothing, and its head knows what follows each token."""
    files = FILES[kind]()
    write_tiny(path, files=files, vocab=VOCAB[kind], tie_word_embeddings=False)
    tokenizer = Tokenizer.from_str(files.json)
    longer, long = (tokenizer.encode(CYCLE * count, add_special_tokens=False).ids for count in (4, 3))
    period = len(longer) - len(long)
    tokens = longer[-2 * period :]
    assert len(set(tokens)) == period and tokens[:period] == tokens[period:]
    file = next(path.glob("*.safetensors"))
    tensors = load_file(file)
    for name in tensors:
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            tensors[name] *= 0
    head = np.zeros_like(tensors["lm_head.weight"])
    head[tokens[1 : period + 1]] = 4 * tensors["model.embed_tokens.weight"][tokens[:period]]
    save_file(tensors | {"lm_head.weight": head}, file)
    return path


def exported(work: Path, target: Path, draft: Path) -> Path:
    export_bundle(str(target), str(draft), work, OPTIONS, threads=THREADS)
    return work


@pytest.fixture(
    scope="module", params=[("byte-level", "sentencepiece"), ("sentencepiece", "byte-level")], ids="->".join
)
def cyclic(request: pytest.FixtureRequest, workdir: Path) -> Pipeline:
    """Two models that agree on what follows, in other tokens."""
    name = "-".join(request.param)
    paths = [
        write_cyclic(workdir / f"cyclic-{role}-{name}", kind) for role, kind in zip("td", request.param, strict=True)
    ]
    return Pipeline.load(exported(workdir / f"cyclic-{name}", *paths), threads=THREADS)


@pytest.fixture(scope="module")
def bundle(tiny: Path, workdir: Path) -> Path:
    """Two that agree on nothing."""
    draft = write_tiny(workdir / "other-draft", files=sentencepiece(), vocab=464, seed=5, layers=1)
    return exported(workdir / "other-bundle", tiny, draft)


@pytest.fixture(scope="module")
def strangers(bundle: Path) -> Pipeline:
    return Pipeline.load(bundle, threads=THREADS)


def counters(result: GenerationResult) -> dict[str, Any]:
    return {name: value for name, value in result.stats.as_dict().items() if "second" not in name}


@pytest.mark.parametrize("k", [1, 2, 4, 8])
def test_drafts_stand_where_the_models_agree(cyclic: Pipeline, k: int) -> None:
    """Nearly all, also inside the bytes of a character; behind half of a word of its own, this draft knows nothing."""
    plain = cyclic.generate(CYCLE * 2, k=0, max_new_tokens=80)
    result = cyclic.generate(CYCLE * 2, k=k, drafter="model", max_new_tokens=80)
    assert result.token_ids == plain.token_ids and result.text == plain.text
    assert f" {result.text.strip()}".rstrip("\ufffd") == (CYCLE * 20)[: len(result.text.strip("\ufffd ")) + 1]
    assert result.stats.draft_acceptance_rate > 0.75
    assert result.stats.mean_acceptance_length > 1 + 0.35 * k
    assert (result.drafter, result.translated) == ("model", True)


@pytest.mark.parametrize("law", LAWS)
@pytest.mark.parametrize("prompt", ["the quick brown fox", "ünd 🦜", [{"role": "user", "content": "one two"}]], ids=str)
def test_text_is_plain_decodings_own(strangers: Pipeline, prompt: Any, law: str) -> None:
    options = {"max_new_tokens": 50, **LAWS[law]}
    plain = strangers.generate(prompt, k=0, **options)
    for k in (1, 3, 8, None):
        running = strangers.stream(prompt, k=k, drafter="model", **options)
        pieces = [token.text for token in running]
        result = running.result()
        assert (result.token_ids, result.logprobs, result.text) == (plain.token_ids, plain.logprobs, plain.text)
        assert (result.finish_reason, "".join(pieces)) == (plain.finish_reason, plain.text)
        assert result.stats.num_draft_tokens > 0 or len(plain.token_ids) < 3 or k is None


@pytest.mark.parametrize("law", ["greedy", "temperature"])
def test_agreeing_models_under_sampling(cyclic: Pipeline, law: str) -> None:
    plain = cyclic.generate(CYCLE, k=0, max_new_tokens=60, **LAWS[law])
    result = cyclic.generate(CYCLE, k=4, max_new_tokens=60, **LAWS[law])
    assert result.token_ids == plain.token_ids
    assert result.stats.draft_acceptance_rate > 0.5


def test_a_conversation_that_goes_on(cyclic: Pipeline) -> None:
    """The caches of both models keep what the requests share: as fast, and as right, as from the beginning."""
    text, steps = CYCLE, []
    for _ in range(3):
        result = cyclic.generate(text, k=4, max_new_tokens=16)
        steps.append(result.stats)
        cyclic.clear_caches()
        fresh = cyclic.generate(text, k=4, max_new_tokens=16)
        assert result.token_ids == fresh.token_ids
        assert result.stats.acceptance_histogram == fresh.stats.acceptance_histogram
        text += result.text
    assert steps[-1].num_cached_tokens > steps[0].num_cached_tokens


def test_requests_take_turns(strangers: Pipeline) -> None:
    """In any order, with other drafters between: nothing is left of the request before."""
    rng = np.random.default_rng(0)
    texts = ["one two three", "one two", "the 🦜", "def add(a, b):\n    return"]
    for _ in range(16):
        options = {"max_new_tokens": int(rng.integers(1, 14)), **LAWS[str(rng.choice(list(LAWS)))]}
        text, k, drafter = str(rng.choice(texts)), int(rng.integers(1, 9)), str(rng.choice(["model", "ngram"]))
        found = strangers.generate(text, k=k, drafter=drafter, **options)
        assert found.token_ids == strangers.generate(text, k=0, **options).token_ids


def test_up_to_the_end_of_both_contexts(cyclic: Pipeline) -> None:
    """Behind the draft's own, decoding goes on plain."""
    plain = cyclic.generate(CYCLE, k=0, max_new_tokens=1000)
    result = cyclic.generate(CYCLE, k=8, max_new_tokens=1000)
    assert result.token_ids == plain.token_ids
    assert (result.finish_reason, len(cyclic.encode(CYCLE)) + len(result.token_ids)) == ("length", 160)


def test_a_prompt_without_text(strangers: Pipeline) -> None:
    plain = strangers.generate("<|end|><|user|>", k=0, max_new_tokens=20)
    assert strangers.generate("<|end|><|user|>", k=4, max_new_tokens=20).token_ids == plain.token_ids


def test_where_the_target_chooses_on_its_device(cyclic: Pipeline) -> None:
    """The host drives the draft, step by step; the same tokens, and the same drafts stand."""
    resident = on_cpu(cyclic.bundle.folder)
    for law, k in product(("greedy", "temperature", "filters"), (1, 4)):
        options = {"k": k, "max_new_tokens": 40, **LAWS[law]}
        cyclic.clear_caches()
        resident.clear_caches()
        found, expected = resident.generate(CYCLE, **options), cyclic.generate(CYCLE, **options)
        assert (found.token_ids, found.origins) == (expected.token_ids, expected.origins)
        assert counters(found) == counters(expected)


def test_a_draft_that_gives_no_numbers(strangers: Pipeline, monkeypatch: pytest.MonkeyPatch) -> None:
    assert strangers.draft is not None
    row = np.full(strangers.draft.engine.info.vocab_size, np.nan, np.float32)
    monkeypatch.setattr(strangers.draft, "extend", lambda tokens, logit_rows: [row])
    assert "no numbers" in refused(lambda: strangers.generate("one two", k=4))


@pytest.mark.parametrize("rule", ["residual", "block", "lossy-typical"])
def test_rules_that_need_probabilities_are_refused(strangers: Pipeline, bundle: Path, rule: str) -> None:
    message = refused(lambda: strangers.stream("one two", acceptance=rule))
    assert all(part in message for part in (rule, "another tokenizer", "--acceptance exact"))
    assert refused_by_cli("generate", bundle, "-p", "one two", "--acceptance", rule) == message
    prompts = [Prompt("1", "any", "one two")]
    bench = lambda: run_bench(strangers, prompts, options=SamplingOptions(), tiers=(2,), acceptance=rule)  # noqa: E731
    assert refused(bench) == message
    strangers.generate("one two", acceptance=rule, drafter="ngram", max_new_tokens=4)
    assert "unknown acceptance rule" in refused(lambda: strangers.stream("one two", acceptance="some"))


def test_the_option_is_named_and_needed(tiny: Path, workdir: Path, bundle: Path) -> None:
    draft, out = workdir / "other-draft", workdir / "no-bundle"
    args = ["--target", tiny, "--draft", draft, "--out", out]
    assert "--translate-draft" in refused_by_cli("export", *args)
    assert not out.exists()


def test_a_draft_of_the_same_tokenizer_stays_as_it_is(tiny: Path, tiny_draft: Path, tmp_path: Path) -> None:
    manifest = export_bundle(str(tiny), str(tiny_draft), tmp_path / "bundle", OPTIONS, threads=THREADS)
    assert manifest.draft is not None
    assert (manifest.translated, manifest.draft.tokenizer) == (False, "tokenizer.json")
    assert sorted(path.name for path in (tmp_path / "bundle").rglob("tokenizer.json")) == ["tokenizer.json"]


def test_it_is_visible(bundle: Path) -> None:
    result = cli("inspect", bundle)
    [draft] = [line for line in result.stdout.splitlines() if line.startswith("draft:")]
    assert "tokenizer draft/tokenizer.json" in draft and "vocab_size 450" in draft
    assert json.loads(cli("inspect", bundle, "--json").stdout)["draft"]["tokenizer"] == "draft/tokenizer.json"
    result = cli("generate", bundle, "-p", "one two", "--k", 2, "--drafter", "model", "--max-new-tokens", 9)
    assert "model (translated) K=2" in result.stderr


@pytest.mark.parametrize(
    ("damage", "parts"),
    [
        (remove("draft/tokenizer.json"), ["draft/tokenizer.json is missing"]),
        (flip("draft/tokenizer.json", 40), ["draft/tokenizer.json was changed"]),
        (
            edit(MANIFEST, lambda record: record["files"].pop("draft/tokenizer.json") and None),
            ["does not list draft/tokenizer.json"],
        ),
        (
            edit(MANIFEST, lambda record: record["manifest"]["draft"].pop("tokenizer") and None),
            ["manifest.draft.tokenizer is missing"],
        ),
        (edit(MANIFEST, lambda record: record.update(version=2)), ["format version 2", "export the bundle again"]),
    ],
    ids=["missing", "changed", "not listed", "no field", "older"],
)
def test_damaged_bundles(bundle: Path, tmp_path: Path, damage: Change, parts: list[str]) -> None:
    folder = Path(shutil.copytree(bundle, tmp_path / "bundle"))
    damage(folder)
    message = refused(lambda: Pipeline.load(folder))
    assert all(part in message for part in parts)
