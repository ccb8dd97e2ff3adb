"""What the server answers is what a pipeline of the same bundle gives, whoever else asks at the same time."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from openai import OpenAI
from openai.types import Completion
from openai.types.chat import ChatCompletion
from serving import Served, serving

from outrider.runtime import Pipeline
from outrider.runtime.generation import GenerationResult

PROMPT = "the quick brown fox and the dog and the"
MESSAGES: list[Any] = [
    {"role": "system", "content": "one two"},
    {"role": "user", "content": [{"type": "text", "text": "the quick "}, {"type": "text", "text": "brown fox"}]},
]
PLAIN_MESSAGES = [{"role": "system", "content": "one two"}, {"role": "user", "content": "the quick brown fox"}]

# Options as a client gives them, and as a pipeline takes them.
GREEDY = {"temperature": 0}, {"temperature": 0.0}
LAWS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "greedy": GREEDY,
    "seeded": ({"seed": 7}, {"temperature": 1.0, "seed": 7}),
    "negative seed": ({"seed": -1, "temperature": 0.5}, {"temperature": 0.5, "seed": 2**64 - 1}),
    "filters": (
        {"temperature": 1.5, "top_p": 0.9, "seed": 5, "extra_body": {"top_k": 40, "min_p": 0.01, "typical_p": 0.99}},
        {"temperature": 1.5, "top_p": 0.9, "seed": 5, "top_k": 40, "min_p": 0.01, "typical_p": 0.99},
    ),
    "penalties": (
        {
            "temperature": 0,
            "presence_penalty": 1.5,
            "frequency_penalty": -0.5,
            "logit_bias": {"17": 3, "30": -100},
            "extra_body": {"repetition_penalty": 1.2, "ignore_eos": True},
        },
        {
            "temperature": 0.0,
            "presence_penalty": 1.5,
            "frequency_penalty": -0.5,
            "logit_bias": {17: 3.0, 30: -100.0},
            "repetition_penalty": 1.2,
            "ignore_eos": True,
        },
    ),
}
SPECULATION: list[dict[str, Any]] = [
    {},
    {"num_draft_tokens": 0},
    {"num_draft_tokens": 3, "drafter": "model"},
    {"num_draft_tokens": 8, "drafter": "cascade"},
    {"drafter": "ngram"},
]


@pytest.fixture(scope="module")
def served(tiny_bundle: Path) -> Iterator[Served]:
    with serving(tiny_bundle) as server:
        yield server


@pytest.fixture(scope="module")
def client(served: Served) -> Iterator[OpenAI]:
    with served.openai() as client:
        yield client


def ask(client: OpenAI, chat: bool, **options: Any) -> ChatCompletion | Completion:
    extra = {"return_tokens": True} | options.pop("extra_body", {})
    if chat:
        return client.chat.completions.create(
            **{"model": "tiny", "messages": MESSAGES, "max_tokens": 24} | options, extra_body=extra
        )
    return client.completions.create(
        **{"model": "tiny", "prompt": PROMPT, "max_tokens": 24} | options, extra_body=extra
    )


def told(choice: Any) -> str:
    """The text of a choice, whole or of a stream."""
    for part in ("message", "delta"):
        if hasattr(choice, part):
            return getattr(choice, part).content or ""
    return choice.text or ""


def ids(choice: Any) -> list[int]:
    return [token["id"] for token in choice.tokens]


def streamed(client: OpenAI, chat: bool, **options: Any) -> tuple[list[str], list[list[int]], list[str]]:
    """Texts, ids and finish reasons of the choices of a stream."""
    texts, tokens, reasons = {}, {}, {}
    for chunk in ask(client, chat, stream=True, **options):
        for choice in chunk.choices:
            assert choice.index not in reasons, "something came behind the end"
            texts[choice.index] = texts.get(choice.index, "") + told(choice)
            tokens[choice.index] = tokens.get(choice.index, []) + ids(choice)
            assert told(choice) == "".join(token["text"] for token in choice.tokens)
            if choice.finish_reason:
                reasons[choice.index] = choice.finish_reason
    order = sorted(texts)
    return [texts[i] for i in order], [tokens[i] for i in order], [reasons[i] for i in order]


def generate(pipeline: Pipeline, chat: bool = False, prompt: Any = PROMPT, **options: Any) -> GenerationResult:
    prompt = PLAIN_MESSAGES if chat else prompt
    return pipeline.generate(prompt, **{"max_new_tokens": 24} | options, k=0)


def test_all_at_once_get_what_a_pipeline_gives(client: OpenAI, tiny_pipeline: Pipeline) -> None:
    """Completions and chats, whole and streamed, under every law and speculation, in four lanes from eight threads."""
    expected = {
        (name, chat): generate(tiny_pipeline, chat, **law) for name, (_, law) in LAWS.items() for chat in (False, True)
    }
    cases = list(itertools.product(LAWS, (False, True), SPECULATION, (False, True)))

    def run(case: tuple[str, bool, dict[str, Any], bool]) -> tuple[str, list[int], str]:
        name, chat, speculation, stream = case
        options = dict(LAWS[name][0])
        options["extra_body"] = options.get("extra_body", {}) | speculation
        if stream:
            texts, tokens, reasons = streamed(client, chat, **options)
            return texts[0], tokens[0], reasons[0]
        choice = ask(client, chat, **options).choices[0]
        return told(choice), ids(choice), choice.finish_reason

    with ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(run, cases))
    finish = {"eos": "stop", "stop": "stop", "length": "length"}
    for (name, chat, speculation, stream), (text, tokens, reason) in zip(cases, answers, strict=True):
        result = expected[name, chat]
        assert tokens == result.token_ids, (name, chat, speculation, stream)
        assert (text, reason) == (result.text, finish[result.finish_reason])


def test_speculation_is_what_was_asked_for(client: OpenAI) -> None:
    """Origins and counters tell it: only where something drafts, tokens are accepted."""

    def origins(**speculation: Any) -> tuple[set[str], Any]:
        answer = ask(client, False, temperature=0, extra_body=speculation)
        return {token["origin"] for token in answer.choices[0].tokens}, answer.usage

    plain, usage = origins(num_draft_tokens=0)
    assert plain == {"plain"} and usage.completion_tokens_details.rejected_prediction_tokens == 0
    drafted, usage = origins(num_draft_tokens=4, drafter="model")
    details = usage.completion_tokens_details
    assert "correction" in drafted
    assert details.accepted_prediction_tokens + details.rejected_prediction_tokens > 4


@pytest.mark.parametrize("chat", [False, True])
def test_n_choices_have_seeds_of_their_own(client: OpenAI, tiny_pipeline: Pipeline, chat: bool) -> None:
    options: dict[str, Any] = {"n": 3, "seed": 11}
    expected = [generate(tiny_pipeline, chat, temperature=1.0, seed=11 + index) for index in range(3)]
    answer = ask(client, chat, **options)
    assert [told(choice) for choice in answer.choices] == [result.text for result in expected]
    assert [choice.index for choice in answer.choices] == [0, 1, 2]
    assert answer.usage.completion_tokens == sum(len(result.token_ids) for result in expected)
    assert answer.usage.prompt_tokens == expected[0].stats.num_prompt_tokens
    texts, tokens, _ = streamed(client, chat, **options)
    assert (texts, tokens) == ([result.text for result in expected], [result.token_ids for result in expected])


def test_unseeded_choices_differ(client: OpenAI) -> None:
    first, second = ask(client, False, n=2, temperature=2).choices
    assert first.text != second.text


@pytest.mark.parametrize("stream", [False, True])
def test_several_prompts_and_prompts_of_token_ids(client: OpenAI, tiny_pipeline: Pipeline, stream: bool) -> None:
    texts = [PROMPT, "one two three", "def add(a, b):"]
    tokens = [tiny_pipeline.codec.encode(text) for text in texts]
    expected = [[generate(tiny_pipeline, prompt=text, temperature=1.0, seed=s).text for s in (3, 4)] for text in texts]
    flat = [text for texts in expected for text in texts]

    def answers(prompt: Any, n: int) -> list[str]:
        if stream:
            return streamed(client, False, prompt=prompt, n=n, seed=3)[0]
        answer = ask(client, False, prompt=prompt, n=n, seed=3)
        lengths = map(len, tokens if isinstance(prompt[0], (str, list)) else [prompt])
        assert answer.usage.prompt_tokens == sum(lengths)
        return [choice.text for choice in answer.choices]

    assert answers(texts, 2) == answers(tokens, 2) == flat
    assert answers(tokens[1], 1) == [flat[2]]


@pytest.mark.parametrize("prompt", [PROMPT, "ids", ["one two", "three"]])
def test_echo(client: OpenAI, tiny_pipeline: Pipeline, prompt: Any) -> None:
    given = tiny_pipeline.codec.encode(PROMPT) if prompt == "ids" else prompt
    texts = [PROMPT] if prompt == "ids" else [prompt] if isinstance(prompt, str) else prompt
    expected = [text + generate(tiny_pipeline, prompt=text, temperature=0.0).text for text in texts]
    options = {"prompt": given, "temperature": 0, "echo": True}
    assert [choice.text for choice in ask(client, False, **options).choices] == expected
    chunks = [
        chunk.choices[0] for chunk in client.completions.create(model="tiny", max_tokens=24, stream=True, **options)
    ]
    found = ["".join(choice.text for choice in chunks if choice.index == index) for index in range(len(texts))]
    assert found == expected
    only = client.completions.create(model="tiny", max_tokens=0, **options)
    assert [choice.text for choice in only.choices] == texts and only.usage.completion_tokens == 0


@pytest.mark.parametrize("chat", [False, True])
@pytest.mark.parametrize("several", [False, True])
def test_stop(client: OpenAI, tiny_pipeline: Pipeline, chat: bool, several: bool) -> None:
    """The text ends before the stop string, which is in none of a stream's chunks."""
    law = {"temperature": 1.0, "seed": 2}
    whole = generate(tiny_pipeline, chat, **law).text
    stop = whole[9:12]
    expected = generate(tiny_pipeline, chat, **law, stop_strings=[stop])
    assert expected.finish_reason == "stop" and stop not in expected.text
    given = [stop, "never seen"] if several else stop
    choice = ask(client, chat, seed=2, stop=given).choices[0]
    assert (told(choice), choice.finish_reason) == (expected.text, "stop")
    texts, tokens, reasons = streamed(client, chat, seed=2, stop=given)
    assert (texts, tokens, reasons) == ([expected.text], [expected.token_ids], ["stop"])


@pytest.mark.parametrize("chat", [False, True])
def test_stop_token_ids_and_limits(client: OpenAI, tiny_pipeline: Pipeline, chat: bool) -> None:
    law = {"temperature": 1.0, "seed": 2}
    fifth = generate(tiny_pipeline, chat, **law).token_ids[4]
    expected = generate(tiny_pipeline, chat, **law, stop_token_ids=[fifth], min_new_tokens=3)
    choice = ask(client, chat, seed=2, extra_body={"stop_token_ids": [fifth], "min_tokens": 3}).choices[0]
    assert (ids(choice), choice.finish_reason) == (expected.token_ids, "stop")
    name = "max_completion_tokens" if chat else "max_tokens"
    short = ask(client, chat, seed=2, max_tokens=None, **{name: 5}) if chat else ask(client, chat, seed=2, max_tokens=5)
    assert len(ids(short.choices[0])) == 5 and short.choices[0].finish_reason == "length"


def test_without_a_limit(client: OpenAI, tiny_pipeline: Pipeline) -> None:
    """A completion has 16 tokens, a chat what fits."""
    ignore = {"ignore_eos": True}
    assert ask(client, False, temperature=0, max_tokens=None, extra_body=ignore).usage.completion_tokens == 16
    usage = ask(client, True, temperature=0, max_tokens=None, extra_body=ignore).usage
    assert usage.total_tokens == tiny_pipeline.manifest.max_length


@pytest.mark.parametrize("stream", [False, True])
def test_log_probabilities_of_chats(client: OpenAI, tiny_pipeline: Pipeline, stream: bool) -> None:
    expected = generate(tiny_pipeline, True, temperature=1.0, seed=4, logprobs=3)
    options: dict[str, Any] = {"seed": 4, "logprobs": True, "top_logprobs": 3}
    if stream:
        chunks = [chunk.choices[0] for chunk in ask(client, True, stream=True, **options)]
        content = [entry for choice in chunks if choice.logprobs for entry in choice.logprobs.content]
    else:
        content = ask(client, True, **options).choices[0].logprobs.content
    alone = tiny_pipeline.codec.alone
    for token, entry, theirs in zip(expected.token_ids, expected.logprobs, content, strict=True):
        assert (theirs.token, theirs.logprob) == (alone(token), pytest.approx(entry.logprob, abs=1e-6))
        assert [(top.token, top.logprob) for top in theirs.top_logprobs] == [
            (alone(other), pytest.approx(logprob, abs=1e-6)) for other, logprob in entry.top
        ]
        # Half a character has no text whose bytes would be its own.
        assert theirs.bytes == (None if "\ufffd" in theirs.token else list(theirs.token.encode()))


@pytest.mark.parametrize("stream", [False, True])
def test_log_probabilities_of_completions(client: OpenAI, tiny_pipeline: Pipeline, stream: bool) -> None:
    expected = generate(tiny_pipeline, temperature=1.0, seed=4, logprobs=2)
    options: dict[str, Any] = {"seed": 4, "logprobs": 2}
    if stream:
        chunks = [chunk.choices[0] for chunk in ask(client, False, stream=True, **options)]
        parts = [choice.logprobs for choice in chunks if choice.logprobs]
        text = "".join(choice.text for choice in chunks)
    else:
        choice = ask(client, False, **options).choices[0]
        parts, text = [choice.logprobs], choice.text
    alone = tiny_pipeline.codec.alone
    assert [token for part in parts for token in part.tokens] == [alone(token) for token in expected.token_ids]
    assert [value for part in parts for value in part.token_logprobs] == pytest.approx(
        [entry.logprob for entry in expected.logprobs], abs=1e-6
    )
    tops = [top for part in parts for top in part.top_logprobs]
    for top, entry in zip(tops, expected.logprobs, strict=True):
        assert top == pytest.approx({alone(other): logprob for other, logprob in entry.top}, abs=1e-6)
    pieces = [token.text for token in tiny_pipeline.stream(PROMPT, temperature=1.0, seed=4, max_new_tokens=24, k=0)]
    offsets = [sum(map(len, pieces[:count])) for count in range(len(pieces))]
    assert [offset for part in parts for offset in part.text_offset] == offsets and "".join(pieces) == text


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("chat", [False, True])
def test_answers_in_json(client: OpenAI, tiny_pipeline: Pipeline, chat: bool, stream: bool) -> None:
    schema = {"enum": [{"dog": 1}, {"dog": [2, 3]}, "fox"]}
    expected = generate(tiny_pipeline, chat, temperature=1.0, seed=1, json_schema=schema, max_new_tokens=40)
    wanted = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema, "strict": True}}
    options: dict[str, Any] = {"seed": 1, "max_tokens": 40, "extra_body": {"response_format": wanted}}
    if stream:
        texts, _, reasons = streamed(client, chat, **options)
        text, reason = texts[0], reasons[0]
    else:
        choice = ask(client, chat, **options).choices[0]
        text, reason = told(choice), choice.finish_reason
    assert (text, reason) == (expected.text, "stop")
    assert json.loads(text) in schema["enum"]


def test_any_json_object(client: OpenAI, tiny_pipeline: Pipeline) -> None:
    expected = generate(tiny_pipeline, True, temperature=1.0, seed=1, json_schema={"type": "object"})
    options: dict[str, Any] = {"seed": 1, "response_format": {"type": "json_object"}}
    choice = ask(client, True, **options).choices[0]
    assert told(choice) == expected.text and expected.text.startswith("{")
    options["response_format"] = {"type": "text"}
    assert told(ask(client, True, **options).choices[0]) == generate(tiny_pipeline, True, temperature=1.0, seed=1).text


@pytest.mark.parametrize("chat", [False, True])
def test_usage(client: OpenAI, tiny_pipeline: Pipeline, chat: bool) -> None:
    """A stream tells it in a last chunk without choices, if asked; what a cache held already is counted."""
    expected = generate(tiny_pipeline, chat, temperature=0.0)
    options: dict[str, Any] = {"temperature": 0, "extra_body": {"num_draft_tokens": 4}}
    whole = ask(client, chat, **options).usage
    assert whole.prompt_tokens == expected.stats.num_prompt_tokens
    assert whole.completion_tokens == len(expected.token_ids)
    assert whole.total_tokens == whole.prompt_tokens + whole.completion_tokens
    chunks = list(ask(client, chat, stream=True, stream_options={"include_usage": True}, **options))
    assert [bool(chunk.usage) for chunk in chunks] == [False] * (len(chunks) - 1) + [True]
    last = chunks[-1]
    assert last.choices == [] and last.usage.prompt_tokens_details.cached_tokens == whole.prompt_tokens - 1
    assert last.usage.completion_tokens_details == whole.completion_tokens_details
    assert not any(chunk.usage for chunk in ask(client, chat, stream=True, **options))


def test_a_second_turn_has_the_first_ones_message(client: OpenAI, tiny_pipeline: Pipeline) -> None:
    """As the client gave it, with fields that are null; and what is null is as good as left out."""
    messages: list[Any] = [{"role": "user", "content": "hello"}]
    options: dict[str, Any] = {"model": "tiny", "temperature": 0, "max_tokens": 5, "tools": None}
    first = client.chat.completions.create(messages=messages, **options).choices[0].message
    more = {"role": "user", "content": "more"}
    plain = [*messages, {"role": "assistant", "content": first.content}, more]
    expected = tiny_pipeline.generate(plain, max_new_tokens=5)
    for answer in (first, first.model_dump()):
        again = client.chat.completions.create(messages=[*messages, answer, more], **options)
        assert again.choices[0].message.content == expected.text


def test_objects_are_those_of_the_api(client: OpenAI) -> None:
    (model,) = client.models.list().data
    assert (model.id, model.object, model.owned_by) == ("tiny", "model", "outrider")
    assert client.models.retrieve("tiny").id == "tiny"
    for chat, kind, chunk_kind, prefix in (
        (False, "text_completion", "text_completion", "cmpl-"),
        (True, "chat.completion", "chat.completion.chunk", "chatcmpl-"),
    ):
        answer = ask(client, chat, max_tokens=3)
        assert (answer.object, answer.model) == (kind, "tiny") and answer.id.startswith(prefix)
        chunks = list(ask(client, chat, max_tokens=3, stream=True))
        assert {chunk.object for chunk in chunks} == {chunk_kind} and len({chunk.id for chunk in chunks}) == 1
        if chat:
            assert chunks[0].choices[0].delta.role == answer.choices[0].message.role == "assistant"


def test_a_stream_is_ascii_and_ends_with_done(served: Served) -> None:
    """Some clients split at other ends of lines than the format's own."""
    body = {"prompt": PROMPT, "stream": True, "max_tokens": 24, "seed": 1, "temperature": 2}
    response = served.post("completions", body)
    assert response.headers["content-type"].startswith("text/event-stream")
    assert response.content.isascii()
    events = response.text.split("\n\n")
    assert events[-2:] == ["data: [DONE]", ""]
    texts = [json.loads(event.removeprefix("data: "))["choices"][0]["text"] for event in events[:-2]]
    assert "\ufffd" in "".join(texts)
