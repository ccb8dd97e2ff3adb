"""What the server refuses: always in the API's shape, always by the name of what is wrong; it never fails at it."""

from __future__ import annotations

import json
import math
import socket
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest
import schemathesis
from checkpoints import tiny_tokenizer, write_tiny
from hypothesis import HealthCheck, given, settings
from openai import AuthenticationError, BadRequestError, NotFoundError
from schemathesis import Case, GenerationMode
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)
from serving import Served, serving

from outrider.export import ExportOptions, export_bundle

MOST_BYTES = 20_000
KEY = "schlüssel"


@pytest.fixture(scope="module")
def served(tiny_bundle: Path) -> Iterator[Served]:
    with serving(tiny_bundle, max_waiting=12, settings={"max_body": MOST_BYTES}) as server:
        yield server


def error_of(response: httpx.Response, status: int) -> dict[str, Any]:
    assert response.status_code == status, response.text
    body = response.json()
    assert body.keys() == {"error"} and body["error"].keys() == {"message", "type", "param", "code"}
    assert body["error"]["message"] and body["error"]["type"]
    return body["error"]


COMPLETION = {"prompt": "one two", "max_tokens": 3}
CHAT = {"messages": [{"role": "user", "content": "one two"}], "max_tokens": 3}
UNSUPPORTED_BY_COMPLETIONS = {"best_of": 2, "suffix": "x", "tools": [], "guided_json": {}}
UNSUPPORTED_BY_CHATS: dict[str, Any] = {
    "tools": [{"type": "function", "function": {"name": "f"}}],
    "tool_choice": "auto",
    "parallel_tool_calls": True,
    "functions": [],
    "function_call": "none",
    "audio": {"voice": "alloy", "format": "mp3"},
    "modalities": ["text"],
    "prediction": {"type": "content", "content": "x"},
    "reasoning_effort": "low",
    "service_tier": "auto",
    "store": True,
    "metadata": {},
    "web_search_options": {},
    "anything": 1,
}


@pytest.mark.parametrize("field", UNSUPPORTED_BY_CHATS)
def test_unsupported_fields_of_chats(served: Served, field: str) -> None:
    error = error_of(served.post("chat/completions", CHAT | {field: UNSUPPORTED_BY_CHATS[field]}), 400)
    assert error["param"] == field and f"the field {field} is not supported" in error["message"]


@pytest.mark.parametrize("field", UNSUPPORTED_BY_COMPLETIONS)
def test_unsupported_fields_of_completions(served: Served, field: str) -> None:
    error = error_of(served.post("completions", COMPLETION | {field: UNSUPPORTED_BY_COMPLETIONS[field]}), 400)
    assert error["param"] == field


PART = {"type": "text", "text": "a"}
# Values by the place that is named.
WRONG: list[tuple[str, dict[str, Any]]] = [
    ("n", {"n": "2"}),
    ("n", {"n": 0}),
    ("n", {"n": 2.5}),
    ("n", {"n": True}),
    ("max_tokens", {"max_tokens": -1}),
    ("max_tokens", {"max_tokens": "3"}),
    ("temperature", {"temperature": -0.1}),
    ("temperature", {"temperature": 2.1}),
    ("temperature", {"temperature": "1"}),
    ("temperature", {"temperature": math.nan}),
    ("temperature", {"temperature": math.inf}),
    ("top_p", {"top_p": 0}),
    ("top_p", {"top_p": [1]}),
    ("min_p", {"min_p": 1.1}),
    ("typical_p", {"typical_p": 0}),
    ("top_k", {"top_k": -1}),
    ("seed", {"seed": 2**63}),
    ("seed", {"seed": "x"}),
    ("presence_penalty", {"presence_penalty": 3}),
    ("frequency_penalty", {"frequency_penalty": -3}),
    ("repetition_penalty", {"repetition_penalty": 0}),
    ("stream", {"stream": "yes"}),
    ("stream_options", {"stream_options": {"include_usage": True}}),
    ("stream_options.x", {"stream": True, "stream_options": {"x": 1}}),
    ("stop", {"stop": ""}),
    ("stop", {"stop": ["x"] * 33}),
    ("stop.1", {"stop": ["a", ""]}),
    ("stop.0", {"stop": [5]}),
    ("stop_token_ids.0", {"stop_token_ids": ["1"]}),
    ("logit_bias", {"logit_bias": [1]}),
    ("logit_bias.5", {"logit_bias": {"5": 101}}),
    ("logit_bias.five", {"logit_bias": {"five": 1}}),
    ("logit_bias.-1", {"logit_bias": {"-1": 1}}),
    ("logit_bias." + "9" * 5000, {"logit_bias": {"9" * 5000: 1}}),
    ("logprobs", {"logprobs": 21}),
    ("min_tokens", {"min_tokens": 4}),
    ("ignore_eos", {"ignore_eos": 1}),
    ("num_draft_tokens", {"num_draft_tokens": -1}),
    ("num_draft_tokens", {"num_draft_tokens": "auto"}),
    ("drafter", {"drafter": "eagle"}),
    ("echo", {"echo": True, "logprobs": 1}),
    ("prompt", {"prompt": 5}),
    ("prompt", {"prompt": None}),
    ("prompt", {"prompt": []}),
    ("prompt.0", {"prompt": [[]]}),
    ("prompt.1.0", {"prompt": [[1], ["a"]]}),
    ("response_format.type", {"response_format": {"type": "regex"}}),
    ("response_format", {"response_format": "json"}),
    ("response_format.json_schema", {"response_format": {"type": "json_schema"}}),
    ("response_format.json_schema", {"response_format": {"type": "text", "json_schema": {"name": "x", "schema": {}}}}),
    ("response_format.json_schema.schema", {"response_format": {"type": "json_schema", "json_schema": {"name": "x"}}}),
    ("response_format.json_schema.name", {"response_format": {"type": "json_schema", "json_schema": {"schema": {}}}}),
]
WRONG_CHATS: list[tuple[str, dict[str, Any]]] = [
    ("messages", {"messages": None}),
    ("messages", {"messages": "hi"}),
    ("messages", {"messages": []}),
    ("messages.0", {"messages": ["hi"]}),
    ("messages.0.content", {"messages": [{"role": "user"}]}),
    ("messages.0.role", {"messages": [{"content": "hi"}]}),
    ("messages.1.role", {"messages": [*CHAT["messages"], {"role": "function", "content": "hi"}]}),
    ("messages.0.content", {"messages": [{"role": "user", "content": 5}]}),
    ("messages.0.content.0.type", {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}),
    ("messages.0.content.1.text", {"messages": [{"role": "user", "content": [PART, {"type": "text"}]}]}),
    ("messages.0.tool_calls", {"messages": [{"role": "assistant", "content": "a", "tool_calls": []}]}),
    ("messages.0.role", {"messages": [{"role": "tool", "content": "a", "tool_call_id": "1"}]}),
    ("max_tokens", {"max_tokens": 0}),
    ("max_tokens", {"max_completion_tokens": 3}),
    ("max_completion_tokens", {"max_completion_tokens": "3", "max_tokens": None}),
    ("top_logprobs", {"top_logprobs": 3}),
    ("top_logprobs", {"logprobs": True, "top_logprobs": 21}),
    ("logprobs", {"logprobs": 3}),
    ("prompt", {"prompt": "x"}),
]


def posted(served: Served, path: str, body: dict[str, Any]) -> httpx.Response:
    """As Python writes JSON: NaN and infinity too."""
    return served.post(path, content=json.dumps(body).encode(), headers={"Content-Type": "application/json"})


@pytest.mark.parametrize(("place", "change"), WRONG, ids=lambda value: str(value)[:60])
def test_wrong_completions(served: Served, place: str, change: dict[str, Any]) -> None:
    error = error_of(posted(served, "completions", COMPLETION | change), 400)
    assert error["param"] == place and place.rpartition(".")[2] in error["message"]


@pytest.mark.parametrize(("place", "change"), WRONG_CHATS, ids=lambda value: str(value)[:60])
def test_wrong_chats(served: Served, place: str, change: dict[str, Any]) -> None:
    error = error_of(posted(served, "chat/completions", CHAT | change), 400)
    assert error["param"] == place and place in error["message"]


def schema(content: Any) -> dict[str, Any]:
    return {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": content}}}


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"logit_bias": {"320": 1}}, ["logit_bias", "320", "0 to 319"]),
        ({"stop_token_ids": [10**30]}, ["stop_token_ids", "0 to 319"]),
        ({"prompt": [1, -1], "echo": True}, ["prompt", "token -1", "0 to 319"]),
        ({"prompt": [2**70]}, ["prompt", "0 to 319"]),
        ({"prompt": ""}, ["prompt is empty"]),
        ({"prompt": "a \ud83d"}, ["prompt", "UTF-8"]),
        ({"stop": "\ud83d"}, ["stop", "unicode"]),
        ({"num_draft_tokens": 9}, ["num_draft_tokens 9", "0 to 8"]),
        ({"repetition_penalty": 1e-40}, ["repetition_penalty"]),
        ({"prompt": ["a"] * 17}, ["17 prompts", "at most 16"]),
        ({"prompt": ["a", "b"], "n": 9}, ["2 prompts with 9 choices", "at most 16"]),
        (schema({"type": "nonsense"}), ["json_schema", "nonsense"]),
        (schema(False), ["json_schema", "false"]),
        (schema({"const": math.nan}), ["json_schema"]),
        (schema({"$ref": "https://example.com/x"}), ["json_schema"]),
    ],
    ids=lambda value: str(value)[:60].encode(errors="replace").decode(),
)
def test_what_the_model_cannot_do(served: Served, change: dict[str, Any], words: list[str]) -> None:
    error = error_of(posted(served, "completions", COMPLETION | change), 400)
    assert all(word in error["message"] for word in words), error["message"]


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{",
        b"null",
        b"[]",
        b'"text"',
        b"\xff\xfe",
        b'{"prompt": "\xff"}',
        b"[" * 10_000,
        b'{"prompt": "a", "max_tokens": ' + b"9" * 5000 + b"}",
        b'{"prompt": "a"} {"prompt": "a"}',
        b'{"\\ud800": 1, "prompt": "a"}',
        b'{"model": "\\ud800", "prompt": "a"}',
        b'{"prompt": "a", "stream_options": {"\\udfff": 1}, "stream": true}',
    ],
    ids=lambda content: repr(content[:30]),
)
def test_bodies_that_are_no_requests(served: Served, content: bytes) -> None:
    headers = {"Content-Type": "application/json"}
    response = served.post("completions", content=content, headers=headers)
    error_of(response, 404 if b"model" in content else 400)


@pytest.mark.parametrize(
    ("content", "words"),
    [(b'{"prompt": "\xff"}', "not UTF-8 text"), (b"[" * 10_000, "nested too deeply"), (b"9" * 5000, "4300 digits")],
    ids=["bytes", "depth", "digits"],
)
def test_bodies_that_cannot_be_read(served: Served, content: bytes, words: str) -> None:
    response = served.post("completions", content=content, headers={"Content-Type": "application/json"})
    assert words in error_of(response, 400)["message"]


@pytest.mark.parametrize("kind", [None, "text/plain", "application/x-www-form-urlencoded", "multipart/form-data"])
def test_a_body_of_another_kind(served: Served, kind: str | None) -> None:
    """What a page of any site may send without asking is not taken."""
    headers = {} if kind is None else {"Content-Type": kind}
    error = error_of(served.post("completions", content=json.dumps(COMPLETION).encode(), headers=headers), 400)
    assert "Content-Type: application/json" in error["message"]


def test_too_long_prompts(served: Served) -> None:
    with served.openai() as client:
        for messages in ([{"role": "user", "content": "one two three " * 60}], CHAT["messages"] * 40):
            with pytest.raises(BadRequestError) as caught:
                client.chat.completions.create(model="tiny", messages=messages)
            assert caught.value.code == "context_length_exceeded" and "at most 95" in str(caught.value)
        with pytest.raises(BadRequestError) as caught:
            client.completions.create(model="tiny", prompt=["a", [5] * 96], stream=True)
        with pytest.raises(BadRequestError) as caught:
            client.completions.create(model="tiny", prompt=[[5], [5] * 96], stream=True)
        assert caught.value.code == "context_length_exceeded"
        last = client.completions.create(model="tiny", prompt=[5] * 95, max_tokens=5, temperature=0)
        assert last.usage.completion_tokens == 1 and last.choices[0].finish_reason == "length"


def test_unknown_models(served: Served) -> None:
    with served.openai() as client:
        for ask in (
            lambda: client.models.retrieve("gpt-4"),
            lambda: client.completions.create(model="a/b\u2028", prompt="x"),
            lambda: client.chat.completions.create(model="", messages=CHAT["messages"]),
        ):
            with pytest.raises(NotFoundError) as caught:
                ask()
            assert (caught.value.code, caught.value.param) == ("model_not_found", "model")
            assert "'tiny'" in str(caught.value)


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/v1/completions", 405),
        ("PUT", "/v1/chat/completions", 405),
        ("DELETE", "/v1/models/tiny", 405),
        ("POST", "/health", 405),
        ("GET", "/v1/embeddings", 404),
        ("POST", "/v1/responses", 404),
        ("GET", "/docs", 404),
        ("GET", "/..%2f..%2fetc/passwd", 404),
    ],
)
def test_wrong_paths_and_methods(served: Served, method: str, path: str, status: int) -> None:
    response = served.http.request(method, served.url + path)
    error_of(response, status)
    assert ("allow" in response.headers) == (status == 405)


def test_large_bodies(served: Served) -> None:
    """Known by the length they claim, or when so much has come; not one byte less is refused."""
    empty = json.dumps(COMPLETION | {"user": ""}).encode()
    body = empty.replace(b'"user": ""', b'"user": "' + b"x" * (MOST_BYTES - len(empty)) + b'"')
    headers = {"Content-Type": "application/json"}

    def in_parts(content: bytes) -> Iterator[bytes]:
        yield from (content[start : start + 1000] for start in range(0, len(content), 1000))

    for content in (body, in_parts(body)):
        assert served.post("completions", content=content, headers=headers).status_code == 200
    for content in (body + b" ", in_parts(body + b" ")):
        assert str(MOST_BYTES) in error_of(served.post("completions", content=content, headers=headers), 413)["message"]
    # Refused before any of it has come.
    host, port = served.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=10) as connection:
        connection.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 99999999999\r\n\r\n")
        assert connection.recv(100).startswith(b"HTTP/1.1 413 ")


def test_keys(tiny_bundle: Path) -> None:
    """Asked for by all under /v1, and before a body is looked at."""
    with serving(tiny_bundle, settings={"api_key": KEY}) as served:
        bearer = f"Bearer {KEY}".encode()
        for authorization in (None, b"", b"Bearer", b"Bearer no", KEY.encode(), bearer + b"x", bearer[:-1], b"\xff"):
            headers = {} if authorization is None else {b"Authorization": authorization}
            for path in ("models", "completions", "nothing"):
                response = served.post(path, content=b"{", headers=headers)
                assert error_of(response, 401)["code"] == "invalid_api_key"
                assert response.headers["www-authenticate"] == "Bearer"
        with served.openai("wrong") as client, pytest.raises(AuthenticationError):
            client.models.list()
        assert served.post("completions", COMPLETION, headers={b"Authorization": bearer}).status_code == 200
        assert (
            served.http.get(f"{served.url}/health").status_code
            == served.http.get(f"{served.url}/metrics").status_code
            == 200
        )


def test_a_body_that_does_not_come_to_its_end(tiny_bundle: Path) -> None:
    with serving(tiny_bundle, settings={"timeout": 0.2}) as served:
        host, port = served.url.removeprefix("http://").split(":")
        with socket.create_connection((host, int(port)), timeout=10) as connection:
            connection.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 10\r\n\r\n{")
            assert connection.recv(100).startswith(b"HTTP/1.1 408 ")


def test_a_bundle_without_a_template_and_a_draft(workdir: Path) -> None:
    source = write_tiny(workdir / "serve-bare", files=replace(tiny_tokenizer(), chat_template=None))
    bundle = workdir / "serve-bare-bundle"
    export_bundle(str(source), None, bundle, ExportOptions(tiers=(1, 2), max_length=64), threads=2)
    with serving(bundle) as served:
        assert "no chat template" in error_of(served.post("chat/completions", CHAT), 400)["message"]
        drafted = served.post("completions", COMPLETION | {"drafter": "model"})
        assert "no draft model" in error_of(drafted, 400)["message"]
        assert served.post("completions", COMPLETION).status_code == 200


POST = ["/v1/completions", "/v1/chat/completions"]
WRITTEN = [(path, mode) for path in POST for mode in (GenerationMode.POSITIVE, GenerationMode.NEGATIVE)]


@pytest.mark.parametrize(("path", "mode"), [*WRITTEN, ("/v1/models/{name}", GenerationMode.POSITIVE)])
def test_any_request_is_answered(served: Served, path: str, mode: GenerationMode) -> None:
    """Requests made from the server's own description, right and wrong: none fails, and answers are as described."""
    description = schemathesis.openapi.from_url(f"{served.url}/openapi.json")
    operation = next(iter(description[path].values()))
    checks = [not_a_server_error, status_code_conformance, content_type_conformance, response_schema_conformance]
    answers = Counter()

    @settings(max_examples=40, derandomize=True, deadline=None, database=None, suppress_health_check=list(HealthCheck))
    @given(operation.as_strategy(generation_mode=mode))
    def run(case: Case) -> None:
        response = case.call(timeout=20)
        case.validate_response(response, checks=checks)
        answers[response.status_code] += 1
        if path in POST and mode is GenerationMode.POSITIVE and response.status_code != 200:
            case.body.update(CHAT if "chat" in path else COMPLETION)  # the rest of it with what this model can read
            case.body.pop("model", None)
            response = case.call(timeout=20)
            case.validate_response(response, checks=checks)
            answers[response.status_code] += 1

    run()
    if mode is GenerationMode.NEGATIVE:
        assert 200 not in answers
    elif path in POST:
        assert answers[200]
