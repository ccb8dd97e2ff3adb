"""Replicas behind Ray Serve: their texts, what becomes of requests when one of them is killed, and how they end."""

from __future__ import annotations

import os
import re
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache, partial
from pathlib import Path
from threading import Event
from typing import Any

import httpx
import pytest
import yaml
from openai import APIError, OpenAI
from refusals import cli

from outrider.export import ExportOptions, export_bundle
from outrider.runtime import Pipeline

pytest.importorskip("ray", reason="the extra `ray` is not installed")

ROOT = Path(__file__).parents[1]
BIN = Path(sys.executable).parent
LANES = 4
STREAMS = 2 * LANES  # as many as two replicas run at once
LONG = 900  # tokens, so that a stream is far from its end when a replica is killed
PATIENCE = 120  # seconds until what must happen has happened
PROMPT = "the fox and the dog"
CUT = (APIError, httpx.HTTPError)  # what a client is told of a stream that broke off


@pytest.fixture(scope="module")
def bundle(workdir: Path, tiny: Path, tiny_draft: Path) -> Path:
    out = workdir / "tiny-ray"
    export_bundle(str(tiny), str(tiny_draft), out, ExportOptions(tiers=(2, 4), max_length=1024), threads=1)
    return out


@pytest.fixture(scope="module")
def alone(bundle: Path) -> Callable[[int, int], str]:
    """What a single process makes of a seed."""
    pipeline = Pipeline.load(bundle, threads=1)

    @cache
    def text(seed: int, tokens: int) -> str:
        options = {"temperature": 1.0, "seed": seed, "ignore_eos": True}
        return pipeline.generate(PROMPT, max_new_tokens=tokens, **options).text

    return text


@dataclass
class Server:
    process: subprocess.Popen[bytes]
    log: Path
    port: int

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def client(self, **options: Any) -> OpenAI:
        return OpenAI(base_url=f"{self.address}/v1", api_key="any", timeout=PATIENCE, **options)

    def served(self) -> dict[str, int]:
        """Requests that came to their ends, by replica; none where nobody answers."""
        try:
            text = httpx.get(f"{self.address}/metrics", timeout=5).text
        except httpx.TransportError:
            return {}
        found = dict.fromkeys(re.findall(r'vllm:num_requests_running{.*replica="(\w+)"}', text), 0)
        for replica, count in re.findall(r'vllm:request_success_total{.*replica="(\w+)"} (\d+)', text):
            found[replica] += int(count)
        return found

    def processes(self) -> set[int]:
        """Of replicas that have answered something."""
        return {int(number) for number in re.findall(r"Replica pid=(\d+)", self.log.read_text())}


@contextmanager
def started(log: Path, port: int, *command: Any) -> Iterator[Server]:
    """Two replicas, in a Ray of their own: its folder has a short name, as Ray needs it, and its key is in no home."""
    folder = tempfile.mkdtemp(prefix="ray")
    own = {"RAY_TMPDIR": folder, "RAY_AUTH_TOKEN": secrets.token_hex(), "RAY_USAGE_STATS_ENABLED": "0"}
    server = launched(log, port, command, own)
    if not up(server) and server.process.poll() is None:  # once in some sixty times Ray hung before it said anything
        server.process.kill()
        server.process.wait()
        server = launched(log, port, command, own)
    try:
        assert up(server), log.read_text()
        yield server
    finally:
        server.process.send_signal(signal.SIGTERM)
        server.process.wait(PATIENCE)
        shutil.rmtree(folder, ignore_errors=True)


def launched(log: Path, port: int, command: Sequence[Any], environment: dict[str, str]) -> Server:
    with log.open("wb") as out:
        environment = {**os.environ, **environment}
        process = subprocess.Popen(list(map(str, command)), stdout=out, stderr=out, env=environment)
    return Server(process, log, port)


def up(server: Server) -> bool:
    """Whether both replicas come up in time."""
    end = time.monotonic() + PATIENCE / 2
    while server.process.poll() is None and time.monotonic() < end:
        if len(server.served()) == 2:
            return True
        time.sleep(0.2)
    return False


def until(condition: Callable[[], Any]) -> Any:
    """What it says, once that is something."""
    end = time.monotonic() + PATIENCE
    while not (found := condition()):
        assert time.monotonic() < end
        time.sleep(0.1)
    return found


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        return int(listening.getsockname()[1])


def ask(client: OpenAI, seed: int, tokens: int, **more: Any) -> Any:
    options = {"model": "tiny-ray", "prompt": PROMPT, "temperature": 1.0, "seed": seed, "max_tokens": tokens} | more
    return client.completions.create(**options, extra_body={"ignore_eos": True})


def whole(client: OpenAI, seed: int, tokens: int) -> str:
    [choice] = ask(client, seed, tokens).choices
    assert choice.finish_reason == "length"
    return str(choice.text)


@dataclass
class Stream:
    """A streamed text, which is whole where ``finish`` is not None."""

    text: str = ""
    finish: str | None = None
    failure: Exception | None = None
    began: Event = field(default_factory=Event)

    def read(self, client: OpenAI, seed: int, tokens: int) -> Stream:
        try:
            for chunk in ask(client, seed, tokens, stream=True):
                self.text += chunk.choices[0].text
                self.finish = chunk.choices[0].finish_reason
                self.began.set()
        except CUT as error:
            self.failure = error
        return self


@contextmanager
def streaming(client: OpenAI, seeds: Sequence[int]) -> Iterator[list[Future[Stream]]]:
    """Long streams, all of which run in lanes by now."""
    with ThreadPoolExecutor(len(seeds)) as pool:
        streams = [Stream() for _ in seeds]
        futures = [pool.submit(one.read, client, seed, LONG) for one, seed in zip(streams, seeds, strict=True)]
        assert all(one.began.wait(PATIENCE) for one in streams)
        yield futures


@pytest.fixture(scope="module")
def replicas(bundle: Path, workdir: Path) -> Iterator[Server]:
    """Two, by the command line."""
    port = free_port()
    options = ("--port", port, "--replicas", 2, "--threads", 1, "--max-batch", LANES)
    with started(workdir / "replicas.log", port, BIN / "outrider", "serve", bundle, *options) as server:
        yield server


@pytest.mark.parametrize("value", ["0", "two", "2:1", "1:", "1:2:3"])
def test_replicas_that_cannot_be(bundle: Path, value: str) -> None:
    result = cli("serve", bundle, "--replicas", value)
    assert (result.exit_code, result.stdout) == (2, "")
    assert f"Invalid value for '--replicas': '{value}' is no whole number" in result.stderr


def test_replicas_write_what_one_process_writes(replicas: Server, alone: Callable[[int, int], str]) -> None:
    """Whole and streamed, more at once than there are lanes; each replica has its share."""
    client, seeds, tokens = replicas.client(max_retries=0), range(12), 40
    with ThreadPoolExecutor(len(seeds)) as pool:
        texts = pool.map(partial(whole, client, tokens=tokens), seeds)
        streams = pool.map(lambda seed: Stream().read(client, seed, tokens), seeds)
        expected = [alone(seed, tokens) for seed in seeds]
        assert list(texts) == expected
        assert [(one.text, one.finish) for one in streams] == [(text, "length") for text in expected]
    counts = until(lambda: served if sum((served := replicas.served()).values()) == 2 * len(seeds) else None)
    assert len(counts) == 2
    assert all(counts.values())


def test_a_replica_is_killed(replicas: Server, alone: Callable[[int, int], str]) -> None:
    """What it streamed breaks off, with an error; what it was to answer whole, clients get from the other; then there
    are two again.
    """
    client = replicas.client()
    victim = until(lambda: pids if len(pids := replicas.processes()) == 2 else None).pop()
    before = replicas.served().keys()
    waiting = range(100, 100 + LANES)
    with ThreadPoolExecutor() as pool, streaming(client, range(STREAMS - 1)) as futures:
        texts = [pool.submit(whole, client, seed, LONG) for seed in waiting]
        os.kill(victim, signal.SIGKILL)
        streams = [future.result() for future in futures]
        assert [text.result() for text in texts] == [alone(seed, LONG) for seed in waiting]
    cut = [seed for seed, one in enumerate(streams) if one.failure]
    assert 0 < len(cut) <= LANES
    for seed, one in enumerate(streams):
        assert one.finish == (None if seed in cut else "length")
        assert alone(seed, LONG).startswith(one.text) if seed in cut else alone(seed, LONG) == one.text
        assert seed not in cut or Stream().read(client, seed, LONG).text == alone(seed, LONG)
    now = until(lambda: alive if len(alive := replicas.served().keys()) == 2 and alive != before else None)
    assert len(now & before) == 1


def test_what_runs_is_answered_before_the_end(replicas: Server, alone: Callable[[int, int], str]) -> None:
    with streaming(replicas.client(max_retries=0), range(LANES)) as futures:
        replicas.process.send_signal(signal.SIGTERM)
        assert [future.result().text for future in futures] == [alone(seed, LONG) for seed in range(LANES)]
    assert replicas.process.wait(PATIENCE) == 0, replicas.log.read_text()
    for process in replicas.processes():
        assert until(lambda process=process: not Path(f"/proc/{process}").exists())


def test_the_configuration_file(bundle: Path, workdir: Path) -> None:
    """``deploy/serve.yaml``, but for sizes: what a session goes on with is in the caches of the replica that it had."""
    port = free_port()
    config = yaml.safe_load((ROOT / "deploy" / "serve.yaml").read_text())
    config["http_options"] = {"host": "127.0.0.1", "port": port}
    config["applications"][0]["args"] |= {"bundle": str(bundle), "threads": 1, "max_replicas": 2}
    file = workdir / "serve.yaml"
    file.write_text(yaml.safe_dump(config))
    with started(workdir / "configured.log", port, sys.executable, "-m", "ray.serve.scripts", "run", file) as server:
        client, before, sessions = server.client(), server.served(), 0
        while sessions < 8 or not all(count > before[name] for name, count in server.served().items()):
            sessions += 1
            session = {"prompt": f"{sessions} {PROMPT}", "extra_headers": {"x-session-id": str(sessions)}}
            first, second = ask(client, 0, 4, **session), ask(client, 0, 4, **session)
            assert first.choices == second.choices
            usage = second.usage
            assert usage.prompt_tokens_details.cached_tokens == usage.prompt_tokens - 1
