"""``outrider serve`` as a process: what it needs and writes, what signals do, and that its bundle may be replaced."""

from __future__ import annotations

import json
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from checkpoints import write_tiny
from refusals import refused_by_cli
from serving import until

from outrider.export import ExportOptions, export_bundle
from outrider.runtime import Pipeline

LENGTH = 4096
LONG = {"prompt": "the quick brown fox", "temperature": 0, "ignore_eos": True, "num_draft_tokens": 0, "stream": True}
FRESH = ("outrider.serve", "outrider.runtime.batch", "outrider.runtime.lane", "outrider.runtime.service")
SECRET = "seven eight nine"


@pytest.fixture(scope="module")
def long_bundle(workdir: Path) -> Path:
    """Answers as long as a signal takes to arrive."""
    source, out = write_tiny(workdir / "serve-long"), workdir / "serve-long-bundle"
    export_bundle(str(source), None, out, ExportOptions(tiers=(1, 2), max_length=LENGTH), threads=2)
    return out


class Process:
    def __init__(self, process: subprocess.Popen[str]) -> None:
        assert process.stderr is not None
        self.process = process
        self.started = process.stderr.readline()
        assert self.started.startswith("serving "), self.started + process.stderr.read()
        self.url = self.started.split()[3]

    def post(self, path: str, body: Any) -> Any:
        response = httpx.post(f"{self.url}/v1/{path}", json=body, timeout=60)
        assert response.status_code == 200, response.text
        return response.json()

    def refuses_connections(self) -> bool:
        host, port = self.url.removeprefix("http://").split(":")
        try:
            socket.create_connection((host, int(port)), timeout=5).close()
        except ConnectionRefusedError:
            return True
        return False

    def end(self) -> tuple[int, list[Any]]:
        """The exit code, and what was logged."""
        _, logged = self.process.communicate(timeout=60)
        return self.process.returncode, [json.loads(line) for line in logged.splitlines()]


@contextmanager
def serve(bundle: Path, *args: str) -> Iterator[Process]:
    run = "from outrider.cli import main; main()"
    command = [sys.executable, "-c", run, "serve", str(bundle), "--port", "0", "--threads", "1", *args]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    try:
        yield Process(process)
    finally:
        process.kill()
        process.wait(60)


def test_a_replaced_bundle_and_a_signal(long_bundle: Path, tmp_path: Path) -> None:
    """What was loaded is served, whatever comes in its place; at a signal what runs comes to its end."""
    bundle = tmp_path / "model"
    shutil.copytree(long_bundle, bundle)
    pipeline = Pipeline.load(long_bundle, threads=1)
    with serve(bundle) as server:
        bundle.rename(tmp_path / "old")
        bundle.mkdir()
        (bundle / "tokenizer.json").write_text("{}")
        shutil.rmtree(tmp_path / "old")
        schema = {"enum": ["the dog", 17, [1, 2]]}
        form = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
        messages = [{"role": "user", "content": SECRET}]
        answer = server.post("chat/completions", {"messages": messages, "temperature": 0, "response_format": form})
        text = answer["choices"][0]["message"]["content"]
        expected = pipeline.generate(messages, json_schema=schema)
        assert text == expected.text and json.loads(text) in schema["enum"]
        server.post("completions", {"prompt": SECRET, "max_tokens": 1})

        body = LONG | {"max_tokens": 1000, "stream_options": {"include_usage": True}}
        with httpx.stream("POST", f"{server.url}/v1/completions", json=body, timeout=60) as response:
            lines = response.iter_lines()
            first = next(lines)
            server.process.send_signal(signal.SIGTERM)
            until(server.refuses_connections)
            rest = [line for line in lines if line]
        assert first.startswith("data: {") and rest[-1] == "data: [DONE]"
        assert json.loads(rest[-2].removeprefix("data: "))["usage"]["completion_tokens"] == 1000
        code, logged = server.end()
    assert code == 0
    assert [(line["event"], line["finish"], line["completion_tokens"]) for line in logged] == [
        ("request", "stop", len(expected.token_ids)),
        ("request", "length", 1),
        ("request", "length", 1000),
    ]
    assert SECRET not in json.dumps(logged) and all("time" in line and "prompt" not in line for line in logged)


@pytest.mark.parametrize("signals", [(signal.SIGTERM, signal.SIGTERM), (signal.SIGINT, signal.SIGINT)])
def test_a_second_signal_ends_it_at_once(long_bundle: Path, signals: tuple[signal.Signals, ...]) -> None:
    with serve(long_bundle, "--log-prompts", "--name", "m") as server:
        server.post("completions", {"model": "m", "prompt": SECRET, "max_tokens": 1})
        body = LONG | {"n": 8, "max_tokens": LENGTH}
        with httpx.stream("POST", f"{server.url}/v1/completions", json=body, timeout=60) as response:
            lines = response.iter_lines()
            assert next(lines).startswith("data: {")
            server.process.send_signal(signals[0])
            until(server.refuses_connections)
            server.process.send_signal(signals[1])
            with pytest.raises(httpx.RemoteProtocolError):  # cut off
                for _ in lines:
                    pass
        code = server.process.wait(60)
        assert code == 1
        assert server.process.stderr is not None
        first, *cut, last = server.process.stderr.read().splitlines()
    assert json.loads(first)["prompt"] == SECRET and last == "Aborted!"
    assert not [line for line in cut if json.loads(line).get("finish") != "abort"]  # no fault


def test_what_it_needs(long_bundle: Path, tiny: Path, workdir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One line says what is missing."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        message = refused_by_cli("serve", long_bundle, "--port", port)
        assert f"127.0.0.1:{port}" in message and "--port" in message
    assert "cannot listen on" in refused_by_cli("serve", long_bundle, "--host", "203.0.113.1", "--port", "0")
    assert "no-such" in refused_by_cli("serve", workdir / "no-such", "--port", "0")
    export_bundle(str(tiny), None, workdir / "serve-fp16", ExportOptions(precision="fp16", tiers=(1,)), threads=2)
    message = refused_by_cli("serve", workdir / "serve-fp16", "--port", "0")
    assert "several requests at once" in message and "int4" in message
    for module in ("fastapi", "uvicorn", "prometheus_client", "greenlet"):
        with monkeypatch.context() as patch:
            for name in [name for name in sys.modules if name.startswith(FRESH)]:
                patch.delitem(sys.modules, name)
            patch.setitem(sys.modules, module, None)
            message = refused_by_cli("serve", long_bundle, "--port", "0")
            assert module in message and "pip install 'outrider[serve]'" in message
