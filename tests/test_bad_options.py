"""Bad options: one line that names what is wrong and what would be right, before the engine has done anything."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from checkpoints import tiny_tokenizer, write_tiny
from refusals import cli, refused, refused_by_cli

from outrider.export import ExportOptions, export_bundle
from outrider.runtime import OutriderError, Pipeline, SamplingOptions

PROMPT = "the quick brown fox"
Options = dict[str, Any]

# Options, the words of the refusal, and the same on the command line where it can be said there.
RANGES: dict[str, tuple[Options, list[str], list[Any] | None]] = {
    "temperature negative": ({"temperature": -0.5}, ["temperature -0.5", "use 0"], ["--temperature", -0.5]),
    "temperature nan": ({"temperature": math.nan}, ["temperature is nan", "number"], ["--temperature", "nan"]),
    "temperature inf": ({"temperature": math.inf}, ["temperature is inf", "number"], ["--temperature", "inf"]),
    "temperature -inf": ({"temperature": -math.inf}, ["temperature is -inf"], ["--temperature", "-inf"]),
    "top_k negative": ({"temperature": 1, "top_k": -1}, ["top_k -1", "use 0"], ["--temperature", 1, "--top-k", -1]),
    "top_p zero": ({"temperature": 1.0, "top_p": 0.0}, ["top_p 0", "at most 1"], ["--temperature", 1, "--top-p", 0]),
    "top_p large": ({"temperature": 1, "top_p": 1.5}, ["top_p 1.5", "at most 1"], ["--temperature", 1, "--top-p", 1.5]),
    "top_p negative": ({"temperature": 1, "top_p": -1.0}, ["top_p -1"], ["--temperature", 1, "--top-p", -1]),
    "top_p nan": ({"temperature": 1, "top_p": math.nan}, ["top_p is nan"], ["--temperature", 1, "--top-p", "nan"]),
    "min_p large": ({"temperature": 1, "min_p": 1.01}, ["min_p 1.01", "0 to 1"], ["--temperature", 1, "--min-p", 1.01]),
    "min_p negative": ({"temperature": 1, "min_p": -0.1}, ["min_p -0.1"], ["--temperature", 1, "--min-p", -0.1]),
    "typical_p zero": ({"temperature": 1, "typical_p": 0.0}, ["typical_p 0"], ["--temperature", 1, "--typical-p", 0]),
    "typical_p large": ({"temperature": 1, "typical_p": 2.0}, ["typical_p 2"], ["--temperature", 1, "--typical-p", 2]),
    "seed negative": ({"temperature": 1, "seed": -1}, ["seed -1", "2**64 - 1"], ["--temperature", 1, "--seed", -1]),
    "seed large": (
        {"temperature": 1, "seed": 2**64},
        ["seed 18446744073709551616", "0 to 2**64 - 1"],
        ["--temperature", 1, "--seed", 2**64],
    ),
    "repetition zero": (
        {"repetition_penalty": 0.0},
        ["repetition_penalty 0", "1 for none"],
        ["--repetition-penalty", 0],
    ),
    "repetition negative": ({"repetition_penalty": -1.0}, ["repetition_penalty -1"], ["--repetition-penalty", -1]),
    "repetition nan": (
        {"repetition_penalty": math.nan},
        ["repetition_penalty is nan"],
        ["--repetition-penalty", "nan"],
    ),
    "presence inf": ({"presence_penalty": math.inf}, ["presence_penalty is inf"], ["--presence-penalty", "inf"]),
    "frequency nan": ({"frequency_penalty": math.nan}, ["frequency_penalty is nan"], ["--frequency-penalty", "nan"]),
    "budget negative": ({"max_new_tokens": -3}, ["max_new_tokens -3", "use 0"], ["--max-new-tokens", -3]),
    "least length negative": ({"min_new_tokens": -1}, ["min_new_tokens -1", "use 0"], ["--min-new-tokens", -1]),
    "least length over the budget": (
        {"min_new_tokens": 9, "max_new_tokens": 8},
        ["min_new_tokens 9 is more than max_new_tokens 8"],
        ["--min-new-tokens", 9, "--max-new-tokens", 8],
    ),
    "least length over the default budget": (
        {"min_new_tokens": 129},
        ["min_new_tokens 129 is more than max_new_tokens 128"],
        ["--min-new-tokens", 129],
    ),
    "logprobs negative": ({"logprobs": -1}, ["logprobs -1", "use 0"], ["--json", "--logprobs", -1]),
    "logprobs of more than there are": (
        {"logprobs": 321},
        ["logprobs 321", "320 tokens"],
        ["--json", "--logprobs", 321],
    ),
    "unknown logprobs mode": ({"logprobs": 1, "logprobs_mode": "cooked"}, ["'cooked'", "raw or processed"], None),
    "unknown acceptance rule": ({"acceptance": "hope"}, ["'hope'", "exact, residual, block, lossy-typical"], None),
    "top_k without a temperature": ({"top_k": 5}, ["top_k needs a temperature", "add temperature"], ["--top-k", 5]),
    "top_p without a temperature": ({"top_p": 0.5}, ["top_p needs a temperature"], ["--top-p", 0.5]),
    "min_p without a temperature": ({"min_p": 0.5}, ["min_p needs a temperature"], ["--min-p", 0.5]),
    "typical_p without a temperature": ({"typical_p": 0.5}, ["typical_p needs a temperature"], ["--typical-p", 0.5]),
    "seed without a temperature": ({"seed": 0}, ["seed needs a temperature", "greedy"], ["--seed", 0]),
    "unknown": ({"colour": 1}, ["unknown option 'colour'", "there are max_new_tokens, "], None),
    "misspelt": ({"temprature": 1.0}, ["unknown option 'temprature'", "did you mean temperature?"], None),
    "misspelt top_k": ({"topk": 4}, ["unknown option 'topk'", "did you mean top_k?"], None),
    "another library's": ({"stop_string": ["a"]}, ["unknown option 'stop_string'", "did you mean stop_strings?"], None),
}
TOKENS: dict[str, tuple[Options, list[str], list[Any] | None]] = {
    "bias of no token": ({"logit_bias": {320: 1.0}}, ["logit_bias", "320", "0 to 319"], ["--logit-bias", "320=1.0"]),
    "bias of a negative id": ({"logit_bias": {-1: 1.0}}, ["logit_bias", "-1", "0 to 319"], ["--logit-bias", "-1=1.0"]),
    "bias nan": ({"logit_bias": {5: math.nan}}, ["logit_bias is {5: nan}", "to numbers"], ["--logit-bias", "5=nan"]),
    "bias inf": ({"logit_bias": {5: -math.inf}}, ["logit_bias is {5: -inf}"], ["--logit-bias", "5=-inf"]),
    "bias of a text": ({"logit_bias": {"5": 1.0}}, ["logit_bias is {'5': 1.0}", "token ids"], None),
    "bias that is a text": ({"logit_bias": {5: "1"}}, ["logit_bias is {5: '1'}", "numbers"], None),
    "bias that is true": ({"logit_bias": {5: True}}, ["logit_bias is {5: True}"], None),
    "bias as a list": ({"logit_bias": [(5, 1.0)]}, ["logit_bias is [(5, 1.0)]", "must map"], None),
    "no token allowed": ({"allowed_token_ids": []}, ["allowed_token_ids is empty", "at least one"], None),
    "allowed id outside": (
        {"allowed_token_ids": [1, 320]},
        ["allowed_token_ids", "320"],
        ["--allowed-token-ids", "1,320"],
    ),
    "allowed as a text": ({"allowed_token_ids": "12"}, ["allowed_token_ids is '12'", "list of token ids"], None),
    "allowed as one": ({"allowed_token_ids": 12}, ["allowed_token_ids is 12", "list of token ids"], None),
    "end outside": ({"eos_token_id": 320}, ["eos_token_id", "320", "0 to 319"], ["--eos-token-id", "320"]),
    "one of the ends outside": ({"eos_token_id": [0, -2]}, ["eos_token_id", "-2"], ["--eos-token-id", "0,-2"]),
    "end as a text": ({"eos_token_id": "0"}, ["eos_token_id is '0'", "token ids"], None),
    "end true": ({"eos_token_id": True}, ["eos_token_id is True", "token ids"], None),
    "ends of floats": ({"eos_token_id": [1.0]}, ["eos_token_id is [1.0]"], None),
    "stop outside": ({"stop_token_ids": [320]}, ["stop_token_ids", "320", "0 to 319"], ["--stop-token-ids", "320"]),
    "stop as one": ({"stop_token_ids": 5}, ["stop_token_ids is 5", "list of token ids"], None),
    "stops of texts": ({"stop_token_ids": ["5"]}, ["stop_token_ids is ['5']"], None),
    "bad words outside": ({"bad_words_ids": [[5], [6, 320]]}, ["bad_words_ids", "320", "0 to 319"], None),
    "no bad word": ({"bad_words_ids": [[]]}, ["bad_words_ids is [", "none of them empty"], None),
    "bad words in a set": ({"bad_words_ids": [{5}]}, ["bad_words_ids is [", "token sequences"], None),
    "a stop string of no UTF-8": ({"stop_strings": ["\udcff"]}, ["stop string", "UTF-8"], ["--stop-strings", "\udcff"]),
    "an empty bad word": ({"bad_words_ids": [[5], []]}, ["bad_words_ids is [[5], []]", "empty"], None),
    "bad words as ids": ({"bad_words_ids": [5, 6]}, ["bad_words_ids is [5, 6]", "sequences"], None),
    "bad words as texts": ({"bad_words_ids": ["no"]}, ["bad_words_ids is ['no']", "token sequences"], None),
    "an empty stop string": ({"stop_strings": ["a", ""]}, ["stop_strings", "empty"], ["--stop-strings", ""]),
    "one stop string": ({"stop_strings": "end"}, ["stop_strings is 'end'", "list of texts"], None),
    "stop strings of numbers": ({"stop_strings": [5]}, ["stop_strings is [5]", "list of texts"], None),
    "a processor that is none": ({"processors": [5]}, ["processors is [5]", "list of functions"], None),
    "one processor": ({"processors": np.abs}, ["processors is ", "list of functions"], None),
    "ignore a text": ({"ignore_eos": "no"}, ["ignore_eos is 'no'", "true or false"], None),
    "ignore nothing": ({"ignore_eos": None}, ["ignore_eos is None", "true or false"], None),
    "penalize one": ({"penalize_prompt": 1}, ["penalize_prompt is 1", "true or false"], None),
}
GRAMMARS: dict[str, tuple[Options, list[str], list[Any] | None]] = {
    "regex": ({"regex": "(a"}, ["regex", "does not compile", "unclosed group"], ["--regex", "(a"]),
    "regex that is not supported": ({"regex": "(?=a)b"}, ["regex", "look-ahead"], ["--regex", "(?=a)b"]),
    "regex of bytes": ({"regex": b"a"}, ["regex is b'a'", "text"], None),
    "regex of no UTF-8": ({"regex": "a\ud83d"}, ["regex", "UTF-8"], ["--regex", "a\udcff"]),
    "lark": ({"lark": "start: foo"}, ["lark", "does not compile", 'unknown name: "foo"'], ["--lark", "start: foo"]),
    "lark without a start": ({"lark": 'x: "a"'}, ["lark", "does not compile", "start"], ["--lark", 'x: "a"']),
    "lark of nothing": ({"lark": ""}, ["lark", "does not compile", "mpty"], ["--lark", ""]),
    "lark of no UTF-8": ({"lark": 'start: "\ud83d"'}, ["lark", "UTF-8"], ["--lark", 'start: "\udcff"']),
    "schema": (
        {"json_schema": {"type": "none"}},
        ["json_schema", "Invalid type: none"],
        ["--json-schema", '{"type":"none"}'],
    ),
    "schema of a bad pattern": (
        {"json_schema": {"type": "string", "pattern": "("}},
        ["json_schema", "does not compile", "unclosed group"],
        None,
    ),
    "schema that nothing fits": (
        {"json_schema": "false"},
        ["json_schema", "Unsatisfiable"],
        ["--json-schema", "false"],
    ),
    "schema that is no JSON": (
        {"json_schema": "{'type': 'string'}"},
        ["json_schema"],
        ["--json-schema", "{'type': 'string'}"],
    ),
    "schema cut off": ({"json_schema": '{"type": '}, ["json_schema"], ["--json-schema", '{"type": ']),
    "schema of nothing": ({"json_schema": ""}, ["json_schema"], ["--json-schema", ""]),
    "schema and more": ({"json_schema": '{}, "lark": 5'}, ["json_schema"], ["--json-schema", '{}, "lark": 5']),
    "schema that is a list": ({"json_schema": "[1]"}, ["json_schema", "object"], ["--json-schema", "[1]"]),
    "schema as a list": ({"json_schema": [1]}, ["json_schema is [1]"], None),
    "schema with what JSON has not": ({"json_schema": {"enum": {1, 2}}}, ["json_schema", "JSON"], None),
    "schema that is null": ({"json_schema": "null"}, ["json_schema", "object"], ["--json-schema", "null"]),
    "two grammars": (
        {"regex": "a", "lark": 'start: "a"'},
        ["regex and lark", "one grammar"],
        ["--regex", "a", "--lark", "x"],
    ),
    "three grammars": (
        {"json_schema": {}, "regex": "a", "lark": 'start: "a"'},
        ["json_schema and regex and lark are", "one grammar"],
        None,
    ),
    "nothing fits the regex": ({"regex": r"[^\s\S]"}, ["regex", "allows no token"], ["--regex", r"[^\s\S]"]),
}
CASES = {**RANGES, **TOKENS, **GRAMMARS}


def refused_before_any_work(pipeline: Pipeline, call: Callable[[], Any]) -> str:
    """No pass of either engine ran for it, and a good request is served as before."""
    assert pipeline.draft is not None
    passes = pipeline.target.passes, pipeline.draft.passes
    message = refused(call)
    assert (pipeline.target.passes, pipeline.draft.passes) == passes
    return message


def assert_words(message: str, words: list[str]) -> None:
    for word in words:
        assert word in message, message
    assert len(message) < 400


@pytest.mark.parametrize("case", CASES)
def test_option(case: str, tiny_pipeline: Pipeline) -> None:
    options, words, _ = CASES[case]
    assert_words(refused_before_any_work(tiny_pipeline, lambda: tiny_pipeline.stream(PROMPT, **options)), words)
    assert refused(lambda: tiny_pipeline.generate(PROMPT, **options))
    assert len(tiny_pipeline.generate(PROMPT, max_new_tokens=2, ignore_eos=True).token_ids) == 2


@pytest.mark.parametrize("case", [case for case in CASES if CASES[case][2] is not None])
def test_option_of_the_command(case: str, tiny_bundle: Path) -> None:
    """The same line on standard error, and nothing on standard output."""
    _, words, args = CASES[case]
    assert args is not None
    assert_words(refused_by_cli("generate", tiny_bundle, "-p", PROMPT, "--threads", 2, *args), words)


@pytest.mark.parametrize(
    "args", [["--temperature", -1], ["--regex", "(a"], ["--top-p", 0.5], ["--stop-token-ids", "320"]]
)
def test_option_of_the_other_commands(args: list[Any], tiny_bundle: Path, tmp_path: Path) -> None:
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text(json.dumps({"prompt": PROMPT}))
    message = refused_by_cli("generate", tiny_bundle, "-p", PROMPT, *args)
    assert refused_by_cli("chat", tiny_bundle, *args, input="hello\n") == message
    assert message in refused_by_cli("bench", tiny_bundle, "--prompts", prompts, "--max-new-tokens", 4, *args)


@pytest.mark.parametrize(("word", "what"), [("", "empty"), (" ", "empty"), ("\udcff", "UTF-8")])
def test_a_bad_word_of_the_command(word: str, what: str, tiny_bundle: Path) -> None:
    message = refused_by_cli("generate", tiny_bundle, "-p", PROMPT, "--bad-words", word)
    assert "bad word" in message and what in message


NUMBERS = ["temperature", "top_p", "min_p", "typical_p", "repetition_penalty", "presence_penalty", "frequency_penalty"]
WHOLE = ["max_new_tokens", "min_new_tokens", "top_k", "seed", "logprobs"]


@pytest.mark.parametrize("name", NUMBERS + WHOLE)
@pytest.mark.parametrize(
    "value", [True, False, "1", "", b"1", [1], {}, 1j, np.bool_(True), np.complex64(1), object, Fraction(1, 2)]
)
def test_no_number(name: str, value: Any, tiny_pipeline: Pipeline) -> None:
    options = {"temperature": 1.0, name: value}
    message = refused_before_any_work(tiny_pipeline, lambda: tiny_pipeline.stream(PROMPT, **options))
    assert message.startswith(f"{name} is ") and "number" in message


@pytest.mark.parametrize("name", NUMBERS)
def test_a_number_that_no_float_holds(name: str, tiny_pipeline: Pipeline) -> None:
    options = {"temperature": 1.0, name: 10**400}
    assert name in refused_before_any_work(tiny_pipeline, lambda: tiny_pipeline.stream(PROMPT, **options))
    assert "logit_bias" in refused(lambda: tiny_pipeline.stream(PROMPT, logit_bias={5: 10**400}))


@pytest.mark.parametrize("name", WHOLE)
@pytest.mark.parametrize("value", [1.5, 1.0, math.nan, math.inf, np.float32(2)])
def test_no_whole_number(name: str, value: Any, tiny_pipeline: Pipeline) -> None:
    options = {"temperature": 1.0, name: value}
    message = refused_before_any_work(tiny_pipeline, lambda: tiny_pipeline.stream(PROMPT, **options))
    assert message.startswith(f"{name} is ") and message.endswith("it must be a whole number")


@pytest.mark.parametrize(
    "name", ["max_new_tokens", "min_new_tokens", "top_k", "top_p", "repetition_penalty", "logprobs_mode"]
)
def test_no_value(name: str, tiny_pipeline: Pipeline) -> None:
    """None stands for "not given" only where it is the default."""
    assert name in refused_before_any_work(tiny_pipeline, lambda: tiny_pipeline.stream(PROMPT, **{name: None}))


@pytest.mark.parametrize("value", [True, "4", 2.5, 4.0, [4], math.nan])
def test_k_that_is_no_whole_number(value: Any, tiny_pipeline: Pipeline) -> None:
    message = refused_before_any_work(tiny_pipeline, lambda: tiny_pipeline.stream(PROMPT, k=value))
    assert f"{value!r}" in message


@pytest.mark.parametrize("name", ["drafter", "acceptance"])
@pytest.mark.parametrize("value", ["", "Exact", 5, ["exact"], True])
def test_no_such_name(name: str, value: Any, tiny_pipeline: Pipeline) -> None:
    """None is the default drafter, and nothing else is."""
    message = refused_before_any_work(tiny_pipeline, lambda: tiny_pipeline.stream(PROMPT, **{name: value}))
    assert f"{value!r}" in message and "choose one of" in message


@pytest.mark.parametrize("options", [{"temperature": 1.0}, "greedy", 5, [("top_k", 1)]])
def test_options_of_another_kind(options: Any, tiny_pipeline: Pipeline) -> None:
    message = refused_before_any_work(tiny_pipeline, lambda: tiny_pipeline.stream(PROMPT, options))
    assert "SamplingOptions" in message


def test_changes_of_good_options(tiny_pipeline: Pipeline) -> None:
    """Options that were good are checked again together with what is changed."""
    options = SamplingOptions(temperature=1.0, top_k=5, min_new_tokens=10)
    for changes, word in (
        ({"temperature": None}, "top_k needs a temperature"),
        ({"max_new_tokens": 5}, "min_new_tokens 10 is more than max_new_tokens 5"),
        ({"top_q": 1}, "did you mean top_"),
    ):
        message = refused_before_any_work(
            tiny_pipeline, lambda changes=changes: tiny_pipeline.stream(PROMPT, options, **changes)
        )
        assert word in message


HELLO = {"role": "user", "content": "hello"}
MESSAGES: dict[str, tuple[Any, list[str]]] = {
    "unknown role": ([{"role": "robot", "content": "a"}], ["message 1", "role 'robot'", "user, assistant"]),
    "unknown role later": ([HELLO, {"role": "User", "content": "a"}], ["message 2", "role 'User'"]),
    "role of another kind": ([{"role": ["user"], "content": "a"}], ["message 1", "role ['user']"]),
    "no role": ([HELLO, {"content": "a"}], ["message 2", "role"]),
    "no content": ([{"role": "user"}], ["message 1", "content"]),
    "content nothing": ([{"role": "user", "content": None}], ["message 1", "content", "None", "text"]),
    "content a list": ([{"role": "user", "content": [{"text": "a"}]}], ["message 1", "content", "text"]),
    "content bytes": ([{"role": "user", "content": b"a"}], ["message 1", "content", "b'a'", "text"]),
    "a text among messages": ([HELLO, "hello"], ["message 2", "'hello'", "role"]),
    "a token id that does not exist": ([1, 2, 320], ["the prompt has token 320", "0 to 319"]),
    "a negative token id": ([-1], ["the prompt has token -1"]),
    "a token id among messages": ([HELLO, 1], ["message 2", "1", "role"]),
    "token ids of floats": ([1.0], ["message 1", "1.0", "role"]),
    "one message alone": (HELLO, ["role"]),
    "bytes": (b"hello", ["message"]),
    "no message": ([], ["prompt is empty"]),
    "nothing": (None, ["prompt"]),
    "a number": (5, ["prompt", "5"]),
    "true": (True, ["prompt", "True"]),
}


@pytest.mark.parametrize("case", MESSAGES)
def test_messages(case: str, tiny_pipeline: Pipeline) -> None:
    messages, words = MESSAGES[case]
    assert_words(refused_before_any_work(tiny_pipeline, lambda: tiny_pipeline.stream(messages)), words)


def test_messages_of_every_role_and_kind(tiny_pipeline: Pipeline) -> None:
    """All roles, more keys than two, any sequence; and an iterator is not an empty conversation."""
    messages = [{"role": role, "content": role} for role in ("system", "developer", "user", "assistant", "tool")]
    expected = tiny_pipeline.codec.encode(messages)
    named = [{**message, "name": "x"} for message in messages]
    for given in (tuple(messages), named):
        assert tiny_pipeline.codec.encode(given) == expected
        assert tiny_pipeline.generate(given, max_new_tokens=1).stats.num_prompt_tokens == len(expected)
    try:
        found = tiny_pipeline.codec.encode(iter(messages))  # type: ignore[arg-type]
    except OutriderError:  # either of the two is right
        return
    assert found == expected


def test_a_bundle_without_a_chat_template(workdir: Path) -> None:
    files = replace(tiny_tokenizer(), chat_template=None)
    source, out = write_tiny(workdir / "options-bare", files=files), workdir / "options-bare-bundle"
    export_bundle(str(source), None, out, ExportOptions(tiers=(1, 2), max_length=64), threads=2)
    pipeline = Pipeline.load(out, threads=2)
    for messages in ([HELLO], [{"role": "robot", "content": "a"}]):
        message = refused(lambda messages=messages: pipeline.stream(messages))
        assert "no chat template" in message and "as a text" in message
    assert pipeline.target.passes == 0
    assert refused_by_cli("chat", out, "--threads", 2, input="hello\n") == message


FILES: dict[str, tuple[bytes | None, list[str]]] = {
    "missing": (None, ["grammar.txt", "No such file"]),
    "no text": (b"\xff\xfe", ["grammar.txt", "not UTF-8"]),
    "no grammar": (b"(((", ["does not compile"]),
}


@pytest.mark.parametrize("case", FILES)
@pytest.mark.parametrize("option", ["--regex", "--lark", "--json-schema"])
def test_a_grammar_from_a_file(case: str, option: str, tiny_bundle: Path, tmp_path: Path) -> None:
    content, words = FILES[case]
    path = tmp_path / "grammar.txt"
    if content is not None:
        path.write_bytes(content)
    message = refused_by_cli("generate", tiny_bundle, "-p", PROMPT, option, f"@{path}")
    assert_words(message, words if case != "no grammar" or option != "--json-schema" else ["json_schema"])
    assert "directory" in refused_by_cli("generate", tiny_bundle, "-p", PROMPT, option, f"@{tmp_path}")


def test_log_probabilities_that_nobody_would_see(tiny_bundle: Path) -> None:
    """They are printed as JSON only: asked for elsewhere, that is said rather than ignored."""
    assert "--json" in refused_by_cli("generate", tiny_bundle, "-p", PROMPT, "--logprobs", 2)
    assert "--json" in refused_by_cli("chat", tiny_bundle, "--logprobs", 2, input="hello\n")


@pytest.mark.parametrize(
    "args",
    [
        ["--temperature", "warm"],
        ["--top-k", "2.5"],
        ["--seed", "x"],
        ["--logit-bias", "5"],
        ["--logit-bias", "a=1"],
        ["--logit-bias", "5=high"],
        ["--stop-token-ids", "a"],
        ["--stop-token-ids", ""],
        ["--eos-token-id", "1,,2"],
        ["--allowed-token-ids", "1.5"],
        ["--logprobs-mode", "cooked"],
        ["--acceptance", "hope"],
        ["--temprature", "1"],
    ],
)
def test_usage(args: list[str], tiny_bundle: Path) -> None:
    result = cli("generate", tiny_bundle, "-p", PROMPT, *args)
    assert (result.exit_code, result.stdout) == (2, "")
    assert "Usage:" in result.stderr and args[0] in result.stderr and "Traceback" not in result.stderr


# What is at the edge, and right.

EDGES: dict[str, Options] = {
    "temperature 0": {"temperature": 0},
    "temperature 0.0 with sampling options": {"temperature": 0.0, "top_p": 0.5, "top_k": 3, "min_p": 0.1, "seed": 1},
    "temperature tiny": {"temperature": 1e-6, "seed": 2**64 - 1},
    "temperature nothing": {"temperature": None},
    "all of the mass": {"top_p": 1.0, "min_p": 0.0, "typical_p": 1.0, "top_k": 0},
    "no bias": {"logit_bias": {}},
    "no bad words": {"bad_words_ids": []},
    "no stops": {"stop_strings": (), "stop_token_ids": ()},
    "all tokens": {"allowed_token_ids": range(320)},
    "no processors": {"processors": []},
    "no penalty": {"repetition_penalty": 1, "presence_penalty": 0, "frequency_penalty": 0.0, "penalize_prompt": True},
    "numpy integers": {"max_new_tokens": np.int64(8), "min_new_tokens": np.uint8(0), "logprobs": np.int32(2)},
    "numpy arrays of nothing": {"stop_token_ids": np.array([], np.int64), "bad_words_ids": np.zeros((0, 2), np.int64)},
    "all logprobs": {"logprobs": 320},
}


@pytest.mark.parametrize("case", EDGES)
def test_edges_that_change_nothing(case: str, tiny_pipeline: Pipeline) -> None:
    """Values at the end of their range that mean greedy decoding as it is."""
    expected = tiny_pipeline.generate(PROMPT, k=0, max_new_tokens=8).token_ids
    for k, drafter in ((0, "none"), (4, "ngram"), (4, "model")):
        options = {"max_new_tokens": 8, **EDGES[case]}
        result = tiny_pipeline.generate(PROMPT, k=k, drafter=drafter, **options)
        assert result.token_ids == expected
        assert result.seed is None
        json.dumps(result.as_dict(), allow_nan=False)


SAMPLED: list[Options] = [
    {"temperature": np.float32(0.5), "seed": np.uint64(2**64 - 1)},
    {"temperature": np.float64(1), "seed": np.int64(0), "top_k": np.int16(7), "top_p": np.float16(0.5)},
    {"temperature": 100, "seed": 2**64 - 1},
    {"temperature": 1, "seed": 0, "top_k": 321},
    {"temperature": 1e-5, "seed": 1},
    {"temperature": 1.0, "seed": 1, "min_p": 1.0},
    {"temperature": 1.0, "seed": 1, "top_p": 1e-300},
    {"temperature": 1.0, "seed": 1, "typical_p": 1e-9},
    {"temperature": 1.0, "seed": 1, "repetition_penalty": 1e-3, "presence_penalty": -100, "frequency_penalty": 1e6},
]


@pytest.mark.parametrize("options", SAMPLED)
def test_sampling_at_the_edges(options: Options, tiny_pipeline: Pipeline) -> None:
    """The seed comes back as it was given, as a plain number; the same text whatever drafts."""
    options = {"max_new_tokens": 8, **options}
    plain = tiny_pipeline.generate(PROMPT, k=0, **options)
    for k, drafter in ((4, "ngram"), (4, "model")):
        result = tiny_pipeline.generate(PROMPT, k=k, drafter=drafter, **options)
        assert result.token_ids == plain.token_ids
    assert (plain.seed, type(plain.seed)) == (int(options["seed"]), int)
    json.dumps(plain.as_dict(), allow_nan=False)
    python = {name: value.item() if isinstance(value, np.generic) else value for name, value in options.items()}
    assert tiny_pipeline.generate(PROMPT, k=0, **python).token_ids == plain.token_ids


@pytest.mark.parametrize("temperature", [1e4, 1e38, 1e39, 1e300])
def test_a_temperature_beyond_all_logits(temperature: float, tiny_pipeline: Pipeline) -> None:
    """All that is allowed becomes equally likely and nothing else is drawn, or it is refused by its name."""
    allowed = [70, 71, 72]
    options: Options = {"allowed_token_ids": allowed, "ignore_eos": True, "max_new_tokens": 40, "seed": 1}
    passes = tiny_pipeline.target.passes
    try:
        drawn = tiny_pipeline.generate(PROMPT, k=0, temperature=temperature, **options).token_ids
    except OutriderError as error:
        assert "temperature" in str(error) and temperature > 1e38
        assert tiny_pipeline.target.passes == passes
        return
    assert set(drawn) == set(allowed)


@pytest.mark.parametrize("bias", [1e38, 3e38, 1e39, 1e300])
def test_a_bias_that_no_float32_holds(bias: float, tiny_pipeline: Pipeline) -> None:
    """It decides alone, or it is refused by its name before any work."""
    passes = tiny_pipeline.target.passes
    try:
        found = tiny_pipeline.generate(PROMPT, k=0, logit_bias={70: bias}, max_new_tokens=3)
    except OutriderError as error:
        assert "logit_bias" in str(error)
        assert tiny_pipeline.target.passes == passes
        return
    assert found.token_ids == [70] * 3


@pytest.mark.parametrize("kind", [list, tuple, set, frozenset, np.array, lambda ids: np.array(ids, np.uint16)])
def test_any_collection_of_ids(kind: Callable[[list[int]], Any], tiny_pipeline: Pipeline) -> None:
    """Where the order says nothing, sets and arrays are as good as lists."""
    ids = [70, 71, 90]
    run = tiny_pipeline.generate
    for name in ("allowed_token_ids", "stop_token_ids", "eos_token_id"):
        options: Options = {"k": 4, "temperature": 1.0, "seed": 3, "max_new_tokens": 12}
        expected = run(PROMPT, **options, **{name: ids})
        found = run(PROMPT, **options, **{name: kind(ids)})
        assert (found.token_ids, found.finish_reason) == (expected.token_ids, expected.finish_reason)
        json.dumps(found.as_dict(), allow_nan=False)


def test_ids_as_arrays(tiny_pipeline: Pipeline) -> None:
    free = tiny_pipeline.generate(PROMPT, k=0, max_new_tokens=6).token_ids
    for words in ([[free[0]], free[2:4]], [np.array([free[0]]), np.array(free[2:4])], [(free[0],), tuple(free[2:4])]):
        found = tiny_pipeline.generate(PROMPT, k=4, max_new_tokens=6, bad_words_ids=words)
        assert free[0] not in found.token_ids
    single = tiny_pipeline.generate(PROMPT, k=4, max_new_tokens=6, eos_token_id=np.int64(free[1]))
    assert (single.token_ids, single.finish_reason) == (free[:2], "eos")
    biased = tiny_pipeline.generate(PROMPT, k=4, max_new_tokens=3, logit_bias={np.int64(70): np.float32(1e4)})
    assert biased.token_ids == [70] * 3


def test_a_fresh_seed_for_each_request(tiny_pipeline: Pipeline) -> None:
    """Without one, each request says which it took; with that one the text comes again."""
    results = [tiny_pipeline.generate(PROMPT, temperature=1.0, max_new_tokens=12) for _ in range(4)]
    seeds = [result.seed for result in results]
    assert len(set(seeds)) == 4 and all(type(seed) is int and 0 <= seed < 2**64 for seed in seeds)
    for result in results:
        again = tiny_pipeline.generate(PROMPT, temperature=1.0, max_new_tokens=12, seed=result.seed)
        assert again.token_ids == result.token_ids
