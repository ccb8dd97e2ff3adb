"""The server while clients come and go, and when something fails behind it."""

from __future__ import annotations

import json
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from threading import Event
from typing import Any

import httpx
import pytest
from openai import APIError, InternalServerError, RateLimitError
from serving import Gate, Served, serving, until

from outrider.runtime import OutriderError, Pipeline

BODY = {"prompt": "the quick brown fox", "max_tokens": 60, "temperature": 0, "ignore_eos": True, "num_draft_tokens": 0}
CHAT = {"messages": [{"role": "user", "content": "one"}], "max_tokens": 60, "temperature": 0, "num_draft_tokens": 0}


def expected(pipeline: Pipeline) -> str:
    return pipeline.generate(BODY["prompt"], max_new_tokens=60, ignore_eos=True, k=0).text


def text(response: httpx.Response) -> str:
    assert response.status_code == 200, response.text
    return response.json()["choices"][0]["text"]


def events(response: httpx.Response) -> list[Any]:
    """The objects of a stream; its end is looked for."""
    *parts, done, rest = response.text.split("\n\n")
    assert (done, rest) == ("data: [DONE]", "")
    return [json.loads(part.removeprefix("data: ")) for part in parts]


def running(served: Served, count: int, waiting: int = 0) -> None:
    """Wait until so many run and wait."""

    def holds() -> bool:
        found = served.metrics()
        return (found["num_requests_running"], found["num_requests_waiting"]) == (count, waiting)

    until(holds)


def aborted(served: Served, count: int = 1) -> None:
    until(lambda: served.metrics().get("request_success_total abort") == count)


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_goes_away_frees_its_lane(tiny_bundle: Path, tiny_pipeline: Pipeline, stream: bool) -> None:
    with serving(tiny_bundle, lanes=1) as served:
        gate = Gate(served.service)
        connection = served.connect("chat/completions", CHAT | {"stream": stream, "ignore_eos": True})
        running(served, 1)
        gate.let(5)
        if stream:
            assert connection.recv(10_000).startswith(b"HTTP/1.1 200 ")
        connection.close()
        aborted(served)
        gate.open()
        running(served, 0)
        found = served.metrics()
        assert found["generation_tokens_total"] < 10 and found["e2e_request_latency_seconds_count"] == 1
        assert text(served.post("completions", BODY)) == expected(tiny_pipeline)


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_goes_away_before_its_answer_begins(
    tiny_bundle: Path, monkeypatch: pytest.MonkeyPatch, stream: bool
) -> None:
    with serving(tiny_bundle, lanes=1) as served:
        gate, taken, submit = Gate(served.service), Event(), served.service.submit
        monkeypatch.setattr(served.service, "submit", lambda *args, **more: taken.wait(20) and submit(*args, **more))
        connections = len(served.server.server_state.connections)
        connection = served.connect("completions", BODY | {"stream": stream})
        until(lambda: len(served.server.server_state.connections) == connections + 1)
        connection.close()
        until(lambda: len(served.server.server_state.connections) == connections)
        taken.set()
        aborted(served)
        gate.open()
        running(served, 0)


def test_cancelled_in_the_queue(tiny_bundle: Path, tiny_pipeline: Pipeline) -> None:
    with serving(tiny_bundle, lanes=1) as served, ThreadPoolExecutor(1) as pool:
        gate = Gate(served.service)
        first = pool.submit(served.post, "completions", BODY)
        running(served, 1)
        connection = served.connect("completions", BODY | {"n": 2})
        running(served, 1, waiting=2)
        connection.close()
        aborted(served, 2)
        gate.let(1)
        running(served, 1, waiting=0)
        gate.open()
        assert text(first.result()) == expected(tiny_pipeline)
        assert served.metrics()["request_success_total length"] == 1


def test_a_slow_reader_stalls_nobody(tiny_bundle: Path, tiny_pipeline: Pipeline) -> None:
    """Its lanes are free as soon as its tokens are there, whether it reads them or not."""
    with serving(tiny_bundle, send_buffer=4096) as served:
        connection = served.connect("completions", BODY | {"n": 8, "stream": True, "logprobs": 20})
        until(lambda: served.metrics()["num_requests_running"])
        for _ in range(4):
            assert text(served.post("completions", BODY)) == expected(tiny_pipeline)
        running(served, 0)
        assert served.metrics()["request_success_total length"] == 4  # the reader's own are not over
        read = b""
        while b"[DONE]" not in read:
            read += connection.recv(1 << 16)
        connection.close()
        until(lambda: served.metrics()["request_success_total length"] == 12)


@pytest.mark.parametrize("max_waiting", [0, 1])
def test_a_full_queue(tiny_bundle: Path, tiny_pipeline: Pipeline, max_waiting: int) -> None:
    with serving(tiny_bundle, lanes=1, max_waiting=max_waiting) as served, ThreadPoolExecutor(2) as pool:
        gate = Gate(served.service)
        taken: list[Future[httpx.Response]] = []
        for waiting in range(1 + max_waiting):
            taken.append(pool.submit(served.post, "completions", BODY))
            running(served, 1, waiting)
        with served.openai() as client:
            for stream in (False, True):
                with pytest.raises(RateLimitError) as caught:
                    client.completions.create(model="tiny", prompt="x", stream=stream)
                assert caught.value.code == "queue_full" and caught.value.response.headers["retry-after"] == "1"
        gate.open()
        assert [text(future.result()) for future in taken] == [expected(tiny_pipeline)] * (1 + max_waiting)
        assert text(served.post("completions", BODY)) == expected(tiny_pipeline)


@pytest.mark.parametrize("max_waiting", [0, 2])
def test_of_a_request_with_many_choices_all_or_none_run(tiny_bundle: Path, max_waiting: int) -> None:
    with serving(tiny_bundle, lanes=2, max_waiting=max_waiting) as served, ThreadPoolExecutor(1) as pool:
        gate = Gate(served.service)
        first = pool.submit(served.post, "completions", BODY)
        running(served, 1)
        assert served.post("completions", BODY | {"n": 2 + max_waiting}).status_code == 429
        gate.let(1)
        running(served, 1, waiting=0)
        gate.open()
        assert first.result().status_code == 200
        assert served.post("completions", BODY | {"n": 2 + max_waiting}).status_code == 200


def test_requests_that_take_too_long(tiny_bundle: Path) -> None:
    with serving(tiny_bundle, lanes=2, settings={"timeout": 0.2}) as served:
        gate = Gate(served.service)
        with served.openai() as client:
            with pytest.raises(InternalServerError) as caught:
                client.completions.create(model="tiny", prompt="x")
            assert caught.value.status_code == 504 and "longer than" in str(caught.value)
            with pytest.raises(APIError, match="longer than"):
                list(client.completions.create(model="tiny", prompt="x", stream=True))
        (event,) = events(served.post("completions", BODY | {"stream": True}))
        assert event["error"]["type"] == "timeout"
        until(lambda: served.metrics()["request_success_total error"] == 3)
        gate.open()
        running(served, 0)


def test_a_failing_pass(tiny_bundle: Path, tiny_pipeline: Pipeline) -> None:
    """Those whose rows were in it get an error; the next ones do not."""
    with serving(tiny_bundle, lanes=2) as served, ThreadPoolExecutor(3) as pool:
        gate = Gate(served.service)
        whole = pool.submit(served.post, "completions", BODY)
        running(served, 1)
        stream = pool.submit(served.post, "completions", BODY | {"stream": True, "return_tokens": True})
        running(served, 1, waiting=1)
        gate.let(3)
        running(served, 2)
        waits = pool.submit(served.post, "completions", BODY)
        running(served, 2, waiting=1)
        gate.failure = OutriderError("the engine is out of breath")
        gate.let(1)
        assert whole.result().status_code == 500
        assert whole.result().json()["error"] == {
            "message": "the engine is out of breath",
            "type": "server_error",
            "param": None,
            "code": None,
        }
        *pieces, error = events(stream.result())
        assert pieces and error == whole.result().json()
        gate.failure = None
        gate.open()
        assert text(waits.result()) == expected(tiny_pipeline)
        assert text(served.post("completions", BODY)) == expected(tiny_pipeline)
        found = served.metrics()
        assert (found["request_success_total error"], found["request_success_total length"]) == (2, 2)
        assert served.http.get(f"{served.url}/health").status_code == 200


def test_a_fault_in_the_batch(tiny_bundle: Path) -> None:
    """All that ran, waited or had just come to their ends hear of it, and nothing more is taken."""
    with serving(tiny_bundle, lanes=2) as served, ThreadPoolExecutor(4) as pool:
        gate = Gate(served.service)
        stream = pool.submit(served.post, "completions", BODY | {"stream": True})
        running(served, 1)
        done = pool.submit(served.post, "completions", BODY | {"max_tokens": 0})  # in the very step that fails
        running(served, 1, waiting=1)
        others = [pool.submit(served.post, "completions", BODY) for _ in range(2)]
        running(served, 1, waiting=3)
        gate.let(1)
        running(served, 2, waiting=1)
        gate.failure = ZeroDivisionError("a fault")
        gate.open()
        assert done.result().status_code == 200
        for response in [other.result() for other in others]:
            assert response.status_code == 503 and "a fault" in response.json()["error"]["message"]
        assert "a fault" in events(stream.result())[-1]["error"]["message"]
        assert served.post("completions", BODY).status_code == 503
        assert served.post("completions", BODY | {"stream": True}).status_code == 503
        assert served.http.get(f"{served.url}/health").status_code == 503
        assert served.metrics()["num_requests_running"] == served.metrics()["num_requests_waiting"] == 0


def test_a_fault_in_one_request(tiny_bundle: Path, tiny_pipeline: Pipeline, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not foreseen, but its own: it alone ends, by an error that says where to look."""
    with serving(tiny_bundle, lanes=2) as served:
        taken = served.service.submit

        def submit(*args: Any, **more: Any) -> Any:
            job = taken(*args, **more)
            monkeypatch.setattr(job.request.output, "commit_token", lambda *_: 1 / 0)
            return job

        with monkeypatch.context() as patch:
            patch.setattr(served.service, "submit", submit)
            error = served.post("completions", BODY)
            assert error.status_code == 500 and "ZeroDivisionError" in error.json()["error"]["message"]
            (event,) = events(served.post("completions", BODY | {"stream": True}))
            assert "ZeroDivisionError" in event["error"]["message"]
        assert text(served.post("completions", BODY)) == expected(tiny_pipeline)
        assert served.metrics()["request_success_total error"] == 2


def test_a_closed_service(tiny_bundle: Path) -> None:
    with serving(tiny_bundle) as served, ThreadPoolExecutor(2) as pool:
        gate = Gate(served.service)
        cut = pool.submit(served.post, "completions", BODY)
        running(served, 1)
        closed = pool.submit(served.service.close)
        until(lambda: served.service.stopped)
        gate.let(1)
        closed.result(20)
        for response in (cut.result(), served.post("chat/completions", CHAT)):
            assert response.status_code == 503 and "shut" in response.json()["error"]["message"]
        assert served.http.get(f"{served.url}/health").status_code == 503


def test_counters_add_up(tiny_bundle: Path) -> None:
    """Under vLLM's names, to what the answers told."""
    with serving(tiny_bundle) as served:
        asked = [
            BODY,
            BODY | {"num_draft_tokens": 4, "drafter": "model"},
            BODY | {"n": 3, "num_draft_tokens": 8},
            BODY | {"prompt": ["a b", "c d"], "num_draft_tokens": None},
            BODY | {"stop_token_ids": list(range(320)), "max_tokens": 9},
        ]
        usages = [served.post("completions", body).json()["usage"] for body in asked]
        found = served.metrics()
        choices = [1, 1, 3, 1, 1]  # of which each counts its prompt
        details = [usage["completion_tokens_details"] for usage in usages]
        accepted = sum(entry["accepted_prediction_tokens"] for entry in details)
        drafted = accepted + sum(entry["rejected_prediction_tokens"] for entry in details)
        assert found["generation_tokens_total"] == sum(usage["completion_tokens"] for usage in usages)
        prompts = sum(usage["prompt_tokens"] * count for usage, count in zip(usages, choices, strict=True))
        assert found["prompt_tokens_total"] == found["prefix_cache_queries_total"] == prompts
        assert 0 < found["prefix_cache_hits_total"] < prompts
        assert found["spec_decode_num_draft_tokens_total"] == drafted > 0
        assert found["spec_decode_num_accepted_tokens_total"] == accepted
        by_position = [found[f"spec_decode_num_accepted_tokens_per_pos_total {position}"] for position in range(8)]
        assert sum(by_position) == accepted and by_position == sorted(by_position, reverse=True)
        assert by_position[0] <= found["spec_decode_num_drafts_total"] <= drafted
        assert (found["request_success_total length"], found["request_success_total stop"]) == (7, 1)
        assert found["e2e_request_latency_seconds_count"] == found["time_to_first_token_seconds_count"] == 8
        assert found["request_time_per_output_token_seconds_count"] == 7
        assert 0 < found["kv_cache_usage_perc"] <= 1
        refused = served.post("completions", BODY | {"n": 0})
        assert refused.status_code == 400 and served.metrics() == found
