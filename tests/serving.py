"""A server as its clients see it: a real one, over a socket, with OpenAI's own client."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import uvicorn
from openai import OpenAI
from prometheus_client.parser import text_string_to_metric_families

from outrider.runtime.batch import Batch
from outrider.runtime.service import Service
from outrider.serve.app import Settings, create_app


@dataclass
class Served:
    """``url`` has no path; ``service`` is what runs behind it."""

    url: str
    service: Service
    server: uvicorn.Server
    http: httpx.Client

    def openai(self, key: str = "none") -> OpenAI:
        return OpenAI(base_url=f"{self.url}/v1", api_key=key, max_retries=0, timeout=30)

    def post(self, path: str, body: Any = None, **options: Any) -> httpx.Response:
        return self.http.post(f"{self.url}/v1/{path}", json=body, **options)

    def connect(self, path: str, body: Any) -> socket.socket:
        """A connection on which a request has been sent, and nothing was read."""
        host, port = self.url.removeprefix("http://").split(":")
        connection = socket.create_connection((host, int(port)), timeout=20)
        content = json.dumps(body).encode()
        head = f"POST /v1/{path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
        connection.sendall(f"{head}Content-Length: {len(content)}\r\n\r\n".encode() + content)
        return connection

    def metrics(self) -> dict[str, float]:
        """Values by name without its prefix; labels other than the model's stand behind it."""
        found = {}
        for family in text_string_to_metric_families(self.http.get(f"{self.url}/metrics").text):
            for sample in family.samples:
                labels = {name: value for name, value in sample.labels.items() if name != "model_name"}
                found[" ".join([sample.name.removeprefix("vllm:"), *labels.values()])] = sample.value
        return found


class Gate:
    """Passes of the target wait here until they are let through."""

    def __init__(self, service: Service) -> None:
        self._engine = service.batch.engines["target"]
        self._run = self._engine.run
        self._permits = threading.Semaphore(0)
        self._open = False
        self.failure: Exception | None = None  # what passes end with from now on
        self._engine.run = self._pass  # type: ignore[method-assign]

    def let(self, passes: int) -> None:
        self._permits.release(passes)

    def open(self) -> None:
        self._open = True
        self._permits.release()

    def _pass(self, segments: Any) -> Any:
        if not self._open:
            self._permits.acquire()
        if self.failure is not None:
            raise self.failure
        return self._run(segments)


@contextmanager
def serving(
    bundle: Path,
    *,
    lanes: int = 4,
    max_waiting: int = 64,
    settings: dict[str, Any] | None = None,
    send_buffer: int | None = None,
) -> Iterator[Served]:
    """Over a loaded bundle, in a thread. ``send_buffer`` are the bytes that the system takes from the server unread."""
    service = Service(Batch.load(bundle, lanes=lanes, threads=1), max_waiting)
    app = create_app(service, Settings("tiny", **(settings or {})))
    listening = socket.create_server(("127.0.0.1", 0))
    if send_buffer is not None:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, send_buffer)
    server = uvicorn.Server(uvicorn.Config(app, log_config=None, access_log=False, timeout_graceful_shutdown=10))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]}, daemon=True)
    thread.start()
    try:
        until(lambda: server.started)
        with httpx.Client(timeout=30) as http:
            yield Served(f"http://127.0.0.1:{listening.getsockname()[1]}", service, server, http)
    finally:
        server.should_exit = True
        thread.join(20)
    assert not thread.is_alive()


def until(holds: Callable[[], Any], seconds: float = 20) -> None:
    """Wait until something comes true."""
    end = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < end, "it did not come true"
        time.sleep(0.002)
