"""Answers that follow a grammar: always whole, the same whatever drafts, and no state but that of committed tokens."""

from __future__ import annotations

import ast
import json
import re
import shutil
import sys
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import llguidance
import numpy as np
import pytest
from check_identity import in_step
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from refusals import refused, refused_by_cli
from tokenizers import Tokenizer
from vocabularies import codec_of, gguf_metadata, train_sentencepiece

from outrider.engines.bundle import TOKENIZER, write_manifest
from outrider.export import ExportOptions, export_bundle
from outrider.export.folder import new_bundle
from outrider.export.gguf_tokenizer import tokenizer_from_metadata
from outrider.runtime import GenerationResult, OutriderError, Pipeline, SamplingOptions
from outrider.runtime.accept import RULES
from outrider.runtime.sampling.grammar import GrammarCompiler, GrammarState

PROMPT = "the quick brown fox"
ARMS = [(2, "ngram"), (8, "ngram"), (2, "model"), (8, "model")]
PLAIN = (0, "none")

PARROT: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "minLength": 1, "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "kind": {"enum": ["bird", "fish", None]},
        "tags": {"type": "array", "items": {"type": "string", "maxLength": 6}, "minItems": 1, "maxItems": 2},
    },
    "required": ["name", "age", "kind", "tags"],
    "additionalProperties": False,
}
TIGHT = {**PARROT, "x-guidance": {"whitespace_flexible": False}}
NAMES = r"[A-Z][a-z]{2,9}(, [A-Z][a-z]{2,9}){2}\."
SUM = 'start: sum\nsum: item ("+" item){1,3}\nitem: NUMBER | "(" NUMBER "+" item ")"\nNUMBER: /[1-9][0-9]{0,2}/\n'


def follows_parrot(text: str) -> bool:
    value = json.loads(text)
    return (
        list(value) == ["name", "age", "kind", "tags"]
        and isinstance(value["name"], str)
        and 1 <= len(value["name"]) <= 12
        and type(value["age"]) is int
        and 0 <= value["age"] <= 150
        and value["kind"] in ("bird", "fish", None)
        and 1 <= len(value["tags"]) <= 2
        and all(isinstance(tag, str) and len(tag) <= 6 for tag in value["tags"])
    )


def follows_names(text: str) -> bool:
    return re.fullmatch(NAMES, text) is not None


def follows_sum(text: str) -> bool:
    """A sum of numbers of at most three digits, as Python's own parser sees it."""
    nodes = [type(node) for node in ast.walk(ast.parse(text, mode="eval"))]
    allowed = {ast.Expression, ast.BinOp, ast.Add, ast.Constant}
    return set(nodes) <= allowed and ast.BinOp in nodes and re.search(r"[^\d+()]|\d{4}", text) is None


GRAMMARS = {"json_schema": (PARROT, follows_parrot), "regex": (NAMES, follows_names), "lark": (SUM, follows_sum)}
SMALL = {**GRAMMARS, "json_schema": (TIGHT, follows_parrot)}


@pytest.fixture(scope="module")
def twins(tiny: Path, workdir: Path) -> Pipeline:
    """A pair whose draft is the target."""
    out = workdir / "grammar-twins"
    export_bundle(str(tiny), str(tiny), out, ExportOptions(tiers=(1, 2, 4, 8), max_length=96), threads=2)
    return Pipeline.load(out, threads=2)


@pytest.fixture(scope="module")
def real(smollm2_pair: Pipeline, workdir: Path) -> Pipeline:
    """SmolLM2 as its own draft, made of the files of the bundle with another."""
    source, out = smollm2_pair.bundle, workdir / "grammar-smollm2"
    with new_bundle(out) as work:
        for name in source.files:
            (work / name).parent.mkdir(exist_ok=True)
            (work / name).hardlink_to(source.path(name))
        shutil.copytree(work / "target", work / "draft", copy_function=lambda old, new: Path(new).hardlink_to(old))
        draft = replace(source.manifest.target, graph="draft/model.onnx")
        write_manifest(work, replace(source.manifest, draft=draft))
    return in_step(Pipeline.load(out, threads=2))


def compiler_of(pipeline: Pipeline) -> GrammarCompiler:
    manifest = pipeline.manifest
    return GrammarCompiler(pipeline.codec.tokenizer.to_str(), manifest.target.vocab_size, manifest.eos_token_ids)


@pytest.fixture(scope="module")
def compiler(tiny_pipeline: Pipeline) -> GrammarCompiler:
    return compiler_of(tiny_pipeline)


def outcome(result: GenerationResult) -> tuple[list[int], str, str]:
    return result.token_ids, result.text, result.finish_reason


QUESTION = [{"role": "user", "content": "Describe a parrot."}]


@pytest.mark.parametrize("kind", GRAMMARS)
@pytest.mark.parametrize("sampling", [{}, {"temperature": 1.0, "seed": 1}, {"temperature": 1.0, "seed": 2**64 - 1}])
def test_a_real_model_follows_any_grammar(real: Pipeline, kind: str, sampling: dict[str, Any]) -> None:
    """The answer is whole and ends where nothing can follow; drafts change nothing."""
    grammar, follows = SMALL[kind]
    options = {kind: grammar, "max_new_tokens": 160, **sampling}
    plain = real.generate(QUESTION, k=0, **options)
    assert follows(plain.text), plain.text
    # A sum may end after its second number, the other two have a last character.
    assert plain.finish_reason in (("grammar", "eos") if kind == "lark" else ("grammar",))
    for k, drafter in ARMS[1:3] if sampling else ARMS:
        found = real.generate(QUESTION, k=k, drafter=drafter, **options)
        assert outcome(found) == outcome(plain)
        if drafter == "model":  # the draft is the target, under the same mask
            assert found.stats.draft_acceptance_rate == 1.0


@pytest.mark.parametrize("kind", GRAMMARS)
@pytest.mark.parametrize("seed", range(12))
def test_a_model_that_knows_nothing_follows_any_grammar(tiny_pipeline: Pipeline, kind: str, seed: int) -> None:
    grammar, follows = SMALL[kind]
    options = {kind: grammar, "max_new_tokens": 80, "temperature": 1.0, "seed": seed}
    plain = tiny_pipeline.generate(PROMPT, k=0, **options)
    assert plain.finish_reason in ("grammar", "eos", "length")
    assert plain.finish_reason == "length" or follows(plain.text), plain.text
    for k, drafter in ARMS:
        assert outcome(tiny_pipeline.generate(PROMPT, k=k, drafter=drafter, **options)) == outcome(plain)


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("ends", [{}, {"ignore_eos": True}])
def test_every_acceptance_rule_follows_the_grammar(tiny_pipeline: Pipeline, rule: str, ends: dict[str, Any]) -> None:
    """Also where the drafts of a round go on behind the end of the grammar, as looked-up ones do."""
    for prompt in ("abababababab", PROMPT):
        for k, drafter in ARMS:
            for seed in range(4):
                options: dict[str, Any] = {"k": k, "drafter": drafter, "temperature": 1.0, "seed": seed, **ends}
                found = tiny_pipeline.generate(prompt, acceptance=rule, regex="(ab){4}", **options)
                assert (found.text, found.finish_reason) == ("abababab", "grammar")
                found = tiny_pipeline.generate(prompt, acceptance=rule, regex="[ab]{3,5}|ba", **options)
                assert re.fullmatch("[ab]{3,5}|ba", found.text)


@pytest.mark.parametrize(("k", "drafter"), [PLAIN, *ARMS])
def test_a_whole_text_that_could_go_on_ends_with_an_end_of_sequence(
    tiny_pipeline: Pipeline, k: int, drafter: str
) -> None:
    """However likely, the end comes as soon as the text is whole and not before; never if it is ignored."""
    [end] = tiny_pipeline.manifest.eos_token_ids
    options: dict[str, Any] = {"k": k, "drafter": drafter, "regex": "[xyz]{3,9}", "logit_bias": {end: 1e4}}
    found = tiny_pipeline.generate(PROMPT, **options)
    assert re.fullmatch("[xyz]{3}", found.text)
    assert (len(found.token_ids), found.token_ids[-1], found.finish_reason) == (4, end, "eos")
    for ends in ({"ignore_eos": True}, {"eos_token_id": []}):
        on = tiny_pipeline.generate(PROMPT, **options, **ends)
        assert re.fullmatch("[xyz]{9}", on.text)
        assert (on.finish_reason, end in on.token_ids) == ("grammar", False)
    other = tiny_pipeline.generate(PROMPT, **options, eos_token_id=7)  # the bundle's ends nothing, and is no text
    assert (set(other.token_ids) & {end}, other.finish_reason in ("grammar", "eos")) == (set(), True)
    late = tiny_pipeline.generate(PROMPT, **options, min_new_tokens=6)
    assert (len(late.token_ids), late.finish_reason) == (7, "eos")
    assert re.fullmatch("[xyz]{6}", late.text)
    stop = tiny_pipeline.generate(PROMPT, **{**options, "logit_bias": {8: 1e4}}, stop_token_ids=[8])
    assert (len(stop.token_ids), stop.token_ids[-1], stop.finish_reason) == (4, 8, "stop")


@pytest.mark.parametrize(("k", "drafter"), [PLAIN, *ARMS])
def test_short_grammars(tiny_pipeline: Pipeline, k: int, drafter: str) -> None:
    """What can only be so long ends there, whatever least length is asked for; the empty text is an end at once."""
    run = partial(tiny_pipeline.generate, PROMPT, k=k, drafter=drafter)
    for options in ({}, {"ignore_eos": True}, {"min_new_tokens": 10}):
        found = run(regex="ab", **options)
        assert (found.text, found.finish_reason) == ("ab", "grammar")
    [end] = tiny_pipeline.manifest.eos_token_ids
    for empty in ({"regex": ""}, {"lark": 'start: ""'}):
        assert outcome(run(**empty)) == ([end], "", "eos")
        message = refused(lambda empty=empty: run(**empty, ignore_eos=True))
        assert f"no token is allowed at position {len(tiny_pipeline.codec.encode(PROMPT))}" in message


@pytest.mark.parametrize("kind", GRAMMARS)
@pytest.mark.parametrize(("k", "drafter"), [PLAIN, (8, "ngram")])
def test_cut_by_the_budget_and_by_stop_strings(smollm2_pair: Pipeline, kind: str, k: int, drafter: str) -> None:
    grammar, follows = GRAMMARS[kind]
    options: dict[str, Any] = {"k": k, "drafter": drafter, kind: grammar}
    whole = smollm2_pair.generate(QUESTION, **options)
    assert follows(whole.text)
    for count in (1, 2, 9):
        cut = smollm2_pair.generate(QUESTION, **options, max_new_tokens=count)
        assert (cut.token_ids, cut.finish_reason) == (whole.token_ids[:count], "length")
        assert whole.text.startswith(cut.text)
    stop = whole.text[3:5]
    ended = smollm2_pair.generate(QUESTION, **options, stop_strings=[stop])
    assert (ended.text, ended.finish_reason) == (whole.text.partition(stop)[0], "stop")


# The state of a grammar.

STATES: dict[str, dict[str, Any]] = {
    "alternatives": {"regex": "ab|abc|the dog"},
    "optional": {"regex": "a?"},
    "endless": {"regex": r"(?s:.)*"},
    "counted": {"regex": "[a-c ]{2,4}"},
    "emoji": {"regex": "(🦜|日本|ü){1,2}"},
    "object": {"json_schema": {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}},
    "nested": {"lark": 'start: "x" | "(" start ")"'},
    "sum": {"lark": SUM},
}


def snapshot(state: GrammarState) -> tuple[bool, bool, bytes]:
    return state.may_end, state.complete, state.allowed().tobytes()


@pytest.mark.parametrize("case", STATES)
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_what_is_pushed_and_taken_back_leaves_no_trace(
    compiler: GrammarCompiler, case: str, data: st.DataObject
) -> None:
    """Any pushes and rollbacks, from complete texts too: the masks are those of the tokens that stand."""
    state = compiler.compile(**STATES[case])
    tokens: list[int] = []
    known = [snapshot(state)]
    for _ in range(data.draw(st.integers(1, 14))):
        choices = np.flatnonzero(state.allowed())
        if len(choices) and data.draw(st.integers(0, 2)):
            token = int(choices[data.draw(st.integers(0, len(choices) - 1))])
            state.push(token)
            tokens.append(token)
            known.append(snapshot(state))
        else:
            count = data.draw(st.integers(0, len(tokens)))
            state.rollback(count)
            del tokens[len(tokens) - count :], known[len(known) - count :]
        assert snapshot(state) == known[-1]
        assert state.may_end or not state.complete
        assert not state.complete or not state.allowed().any()
    fresh = compiler.compile(**STATES[case])
    for token in tokens:
        fresh.push(token)
    assert snapshot(fresh) == snapshot(state)


def walk(state: GrammarState, tokens: list[int]) -> Iterator[bool]:
    """Whether each token was allowed behind those before it."""
    for token in tokens:
        yield bool(state.allowed()[token])
        state.push(token)


def test_complete_texts_are_known_at_once_and_can_be_taken_back(
    compiler: GrammarCompiler, tiny_pipeline: Pipeline
) -> None:
    a, b, c = (tiny_pipeline.codec.encode(letter)[0] for letter in "abc")
    state = compiler.compile(regex="ab|abc")
    assert list(walk(state, [a, b])) == [True, True]
    assert (state.may_end, state.complete, np.flatnonzero(state.allowed()).tolist()) == (True, False, [c])
    state.push(c)
    assert (state.may_end, state.complete, state.allowed().any()) == (True, True, False)
    state.rollback(2)
    assert (state.may_end, state.complete, state.allowed()[b]) == (False, False, True)
    with pytest.raises(OutriderError):
        state.push(c)


def test_no_special_token_is_text(compiler: GrammarCompiler, tiny_pipeline: Pipeline) -> None:
    """Where any text goes, tokens that are none do not."""
    allowed = compiler.compile(regex="(?s:.)*").allowed()
    special = [token for token in range(320) if tiny_pipeline.codec.is_special(token)]
    assert len(special) == 4 and not allowed[special].any()
    assert allowed[tiny_pipeline.codec.encode("the dog\n")].all()


def test_states_are_their_own(compiler: GrammarCompiler, tiny_pipeline: Pipeline) -> None:
    """Several grammars of one compiler, and one grammar twice, move apart from each other."""
    letters = {letter: tiny_pipeline.codec.encode(letter)[0] for letter in "abc"}
    states = [compiler.compile(regex=grammar) for grammar in ("abc", "abc", "cba")]
    first = [snapshot(state) for state in states]
    assert all(walk(states[0], [letters["a"], letters["b"]]))
    assert [snapshot(state) for state in states[1:]] == first[1:]
    assert all(walk(states[2], [letters["c"]]))
    assert states[0].allowed()[letters["c"]] and states[1].allowed()[letters["a"]]


@pytest.mark.parametrize("space_prefix", [True, False])
@pytest.mark.parametrize("grammar", ["the dog", "[a-z日🦜\n][a-z 日🦜\n]{2,7}", "\n+the", "<0x41>"])
def test_text_of_sentencepiece_tokens_matches(grammar: str, space_prefix: bool, workdir: Path) -> None:
    """Whatever tokens the grammar lets through, what is decoded from them fits, bytes by name among them."""
    metadata = gguf_metadata(train_sentencepiece(space_prefix=space_prefix))
    files = tokenizer_from_metadata(metadata.get, Path("m.gguf"))
    folder = workdir / f"grammar-sentencepiece-{space_prefix}"
    codec = codec_of(files, folder)
    compiler = GrammarCompiler(codec.tokenizer.to_str(), codec.tokenizer.get_vocab_size(), files.eos_token_ids)
    rng = np.random.default_rng(0)
    whole = 0
    for _ in range(60):
        tokens: list[int] = []
        state = compiler.compile(regex=grammar)
        while (choices := np.flatnonzero(state.allowed())).size and len(tokens) < 40:
            tokens.append(int(rng.choice(choices)))
            state.push(tokens[-1])
        if state.may_end:
            whole += 1
            assert re.fullmatch(grammar, codec.decode(tokens)), [codec.tokenizer.id_to_token(token) for token in tokens]
    assert whole


# Drafts.


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("case", STATES)
def test_draft_tokens_are_drawn_under_the_mask(
    tiny_pipeline: Pipeline, compiler: GrammarCompiler, case: str, rule: str
) -> None:
    """Each fits behind those before it, nothing is drafted behind a complete text, and the state is as before."""
    ends = set(tiny_pipeline.manifest.eos_token_ids)
    drafted = 0
    for seed in range(6):
        options = SamplingOptions(**STATES[case], temperature=1.0, seed=seed)
        request = tiny_pipeline.new_request(tiny_pipeline.codec.encode(PROMPT), options, rule)
        drafter = tiny_pipeline.drafter("model")
        drafter.begin()
        state, history = compiler.compile(**STATES[case]), request.history
        assert history.grammar is not None
        for _ in range(3):
            proposed = [d.token for d in drafter.propose(history, 8, partial(request.rule.draft, request.chooser))]
            assert snapshot(history.grammar) == snapshot(state)
            assert proposed or state.complete
            drafted += len(proposed)
            if ends & set(proposed):
                assert proposed[-1] in ends
                proposed.pop()
                assert list(walk(state, proposed)) == [True] * len(proposed)
                assert state.may_end and not state.complete
                break
            assert list(walk(state, proposed)) == [True] * len(proposed)
            assert len(proposed) == 8 or state.complete
            for token in proposed:
                history.push(token)
    assert drafted


def test_a_draft_that_runs_into_a_dead_end_ends_nothing(tiny_pipeline: Pipeline) -> None:
    """Masks may leave nothing behind a token that the draft takes and the target does not."""
    texts, refusals = set(), 0
    for first, second in ("01", "12", "23", "34", "45", "56", "67", "78", "89", "90"):
        [dead] = tiny_pipeline.codec.encode("z")
        options = {"regex": f"x({first}z|{second}yx)", "bad_words_ids": [[dead]]}

        def run(k: int, drafter: str, options: dict[str, Any] = options) -> object:
            try:
                return outcome(tiny_pipeline.generate(PROMPT, k=k, drafter=drafter, **options))
            except OutriderError as error:
                return str(error)

        plain = run(*PLAIN)
        texts.add(plain[1] if isinstance(plain, tuple) else "")
        refusals += isinstance(plain, str)
        for arm in ARMS:
            assert run(*arm) == plain
    assert len(texts) > 2 and refusals


# What is given, and what is missing.


def test_a_schema_as_text_and_as_an_object(tiny_pipeline: Pipeline) -> None:
    results = [
        outcome(tiny_pipeline.generate(PROMPT, json_schema=schema, max_new_tokens=80, temperature=1.0, seed=4))
        for schema in (TIGHT, json.dumps(TIGHT), f"\n{json.dumps(TIGHT, indent=1)}\n", Read(TIGHT))
    ]
    assert results[1:] == results[:1] * 3


class Read(Mapping[str, Any]):
    """A mapping that is no dict, within and without."""

    def __init__(self, content: dict[str, Any]) -> None:
        self._content = content

    def __getitem__(self, key: str) -> Any:
        value = self._content[key]
        return Read(value) if isinstance(value, dict) else value

    def __iter__(self) -> Iterator[str]:
        return iter(self._content)

    def __len__(self) -> int:
        return len(self._content)


def test_one_tokenizer_for_all_grammars(tiny_bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Reading the vocabulary takes far longer than a grammar: it is done once, and not at all without one."""
    made = []

    def counted(*arguments: Any, **options: Any) -> Any:
        made.append(original(*arguments, **options))
        return made[-1]

    original = llguidance.LLTokenizer
    monkeypatch.setattr(llguidance, "LLTokenizer", counted)
    pipeline = Pipeline.load(tiny_bundle, threads=2)
    assert pipeline.generate(PROMPT, max_new_tokens=3).token_ids
    assert not made
    for grammar in ({"regex": "ab"}, {"regex": "ba"}, {"lark": 'start: "ab"'}, {"json_schema": {"const": 1}}):
        assert pipeline.generate(PROMPT, **grammar).finish_reason == "grammar"
    assert len(made) == 1


def test_without_llguidance(tiny_bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only requests with a grammar need it, and say what to install."""
    pipeline = Pipeline.load(tiny_bundle, threads=2)
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "llguidance", None)
        passes = pipeline.target.passes
        for grammar in ({"regex": "ab"}, {"lark": 'start: "ab"'}, {"json_schema": {}}):
            message = refused(lambda grammar=grammar: pipeline.stream(PROMPT, **grammar))
            assert "llguidance" in message and "pip install llguidance" in message
        assert refused_by_cli("generate", tiny_bundle, "-p", "a", "--regex", "ab") == message
        assert pipeline.target.passes == passes
        assert pipeline.generate(PROMPT, max_new_tokens=3).token_ids
    assert pipeline.generate(PROMPT, regex="ab").text == "ab"


@pytest.mark.parametrize(("k", "drafter"), [PLAIN, *ARMS])
def test_masks_that_leave_nothing(tiny_pipeline: Pipeline, k: int, drafter: str) -> None:
    """Each allows something, both together do not: one line that names the position, and the next request is well."""
    start = len(tiny_pipeline.codec.encode(PROMPT))
    digits = [tiny_pipeline.codec.encode(digit)[0] for digit in "0123456789"]
    run = partial(tiny_pipeline.generate, PROMPT, k=k, drafter=drafter)
    message = refused(lambda: run(regex="[xyz]+", allowed_token_ids=digits))
    assert f"no token is allowed at position {start}" in message and "masks" in message
    message = refused(lambda: run(regex="12[xyz]+", allowed_token_ids=digits))
    assert f"no token is allowed at position {start + 2}" in message
    assert run(regex="[x0-9]{4}", allowed_token_ids=digits).text.isdecimal()
    # A text that is whole already may end: ends are allowed in any case.
    assert run(regex="12[xyz]*", allowed_token_ids=digits).text == "12"


def converse(
    pipeline: Pipeline, k: int, drafter: str, fresh: bool
) -> tuple[list[tuple[list[int], str, str]], list[int]]:
    """Three turns, each with a grammar of its own, from kept caches or from empty ones; and what was kept."""
    pipeline.clear_caches()
    messages = [{"role": "user", "content": "Describe a parrot in JSON."}]
    outcomes, kept = [], []
    for grammar in ({"json_schema": TIGHT}, {"regex": NAMES}, {"regex": "[a-z ]{10}"}):
        if fresh:
            pipeline.clear_caches()
        found = pipeline.generate(messages, k=k, drafter=drafter, max_new_tokens=80, **grammar)
        outcomes.append(outcome(found))
        kept.append(found.stats.num_cached_tokens)
        messages += [{"role": "assistant", "content": found.text}, {"role": "user", "content": "Now three names."}]
    return outcomes, kept


def test_a_conversation_on_a_kept_cache(smollm2_pair: Pipeline) -> None:
    expected, none = converse(smollm2_pair, *PLAIN, fresh=True)
    assert none == [0, 0, 0]
    assert [reason for _, _, reason in expected] == ["grammar"] * 3
    for arm in (PLAIN, (4, "ngram")):
        found, kept = converse(smollm2_pair, *arm, fresh=False)
        assert found == expected
        assert 0 == kept[0] < kept[1] < kept[2]


@pytest.mark.parametrize(("k", "drafter"), [PLAIN, *ARMS])
def test_log_probabilities_under_a_mask_are_json(twins: Pipeline, k: int, drafter: str) -> None:
    """Of fewer allowed tokens than were asked for, the rest are not there rather than infinitely unlikely."""
    found = twins.generate(PROMPT, k=k, drafter=drafter, regex="[xy]{3}", logprobs=5, logprobs_mode="processed")
    json.dumps(found.as_dict(), allow_nan=False)
    letters = {twins.codec.encode(letter)[0] for letter in "xy"}
    assert found.logprobs is not None
    for entry in found.logprobs:
        assert {token for token, _ in entry.top} <= letters
        assert sum(np.exp(logprob) for _, logprob in entry.top) == pytest.approx(1)


def test_the_vocabulary_is_the_bundles(tiny_pipeline: Pipeline) -> None:
    """Any token that is whole text alone is allowed where any text is: the ids are those of the tokenizer."""
    tokenizer = Tokenizer.from_file(str(tiny_pipeline.bundle.path(TOKENIZER)))
    allowed = compiler_of(tiny_pipeline).compile(regex="[a-z ]*").allowed()
    for token in range(320):
        text = tokenizer.decode([token])
        assert allowed[token] == (re.fullmatch("[a-z ]+", text) is not None), text


class GivingUp:
    """A matcher that gives up: at every second token, and at each way back."""

    def __init__(self, matcher: Any) -> None:
        self._matcher = matcher
        self._calls = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._matcher, name)

    def consume_token(self, token: int) -> bool:
        self._calls += 1
        return self._calls % 2 == 1 and bool(self._matcher.consume_token(token))

    def rollback(self, count: int) -> bool:
        return False


def test_a_matcher_that_gives_up_is_replaced(compiler: GrammarCompiler, tiny_pipeline: Pipeline) -> None:
    """Its limits count the drafts that it looked at: none of them may end a request that plain decoding finishes."""
    tokens = [tiny_pipeline.codec.encode(letter)[0] for letter in "abcab"]
    sound, tired = compiler.compile(regex="[abc]{3}(ab)+c"), compiler.compile(regex="[abc]{3}(ab)+c")
    start = tired._start
    tired._start = lambda: GivingUp(start())
    tired._matcher = tired._start()
    for count, token in enumerate(tokens, start=1):
        for state in (sound, tired):
            state.push(token)
        assert np.array_equal(sound.allowed(), tired.allowed())
        if count >= 3:
            for state in (sound, tired):
                state.rollback(2)
                state.push(tokens[count - 2])
                state.push(tokens[count - 1])
            assert (sound.may_end, sound.complete) == (tired.may_end, tired.complete)


def test_a_refused_token_changes_nothing(compiler: GrammarCompiler, tiny_pipeline: Pipeline) -> None:
    state = compiler.compile(regex="ab")
    wrong = tiny_pipeline.codec.encode("z")[0]
    before = state.allowed()
    assert "grammar stopped at token" in refused(lambda: state.push(wrong))
    assert np.array_equal(state.allowed(), before) and not state.complete


def test_a_processor_that_breaks_the_grammar(tiny_pipeline: Pipeline) -> None:
    """The tokens before are streamed, and the refusal is the same, whatever drafts."""
    wrong = tiny_pipeline.codec.encode("Z")[0]
    prompt_length = len(tiny_pipeline.encode(PROMPT))

    def force(tokens: Any, logits: Any) -> Any:
        if len(tokens) == prompt_length + 3:
            logits[wrong] = 1e6
        return logits

    found = []
    for arm in [PLAIN, *ARMS]:
        streamed = []
        running = tiny_pipeline.stream(PROMPT, regex="[a-z ]+", processors=[force], k=arm[0], drafter=arm[1])
        with pytest.raises(OutriderError, match="grammar stopped") as caught:
            for token in running:
                streamed.append(token.token_id)
        found.append((streamed, str(caught.value)))
    assert len(found[0][0]) == 3
    assert all(outcome == found[0] for outcome in found)
