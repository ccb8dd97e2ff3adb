"""llama.cpp by its ``llama-server``: a server a setting, since a running one takes no other speculation.

Sources: docs/speculative.md and tools/server/README.md of ggml-org/llama.cpp, of October 2026: options had other names
before. ``predicted_ms`` starts with the first token. An end of sequence cannot be passed over there: ``ignore_eos``
forbids it, so that texts are others behind one.
"""

from __future__ import annotations

import atexit
import json
import socket
import subprocess
import time
import urllib.error
import urllib.request
from typing import Any

from serve import Decode, serve

_SECONDS = 120


class Server:
    """Ends with the worker: in its process group, which ``bench_peers.py`` ends as a whole, or where that is gone."""

    def __init__(self, command: list[str]) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        self.url = f"http://127.0.0.1:{port}"
        self.process = subprocess.Popen([*command, "--host", "127.0.0.1", "--port", str(port)])
        atexit.register(self.process.kill)
        deadline = time.monotonic() + _SECONDS
        while not self._healthy():
            if self.process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"llama-server did not start with {' '.join(command[1:])}")
            time.sleep(0.1)

    def _healthy(self) -> bool:
        try:
            with urllib.request.urlopen(f"{self.url}/health", timeout=5) as reply:
                return reply.status == 200
        except (urllib.error.URLError, ConnectionError, TimeoutError):
            return False

    def complete(self, **request: Any) -> dict[str, Any]:
        body = urllib.request.Request(
            f"{self.url}/completion", json.dumps(request).encode(), {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(body, timeout=_SECONDS) as reply:
            return dict(json.load(reply))


def load(config: dict[str, Any]) -> tuple[str, Decode]:
    threads, servers = str(config["threads"]), dict[str, Server]()
    command = [config["server"], "-m", config["target"], "-t", threads, "-c", "4096", "-np", "1", *config["arguments"]]
    command += ["--poll", "0"]  # else the waiting threads of the idle model keep the busy one's from the cores
    told = subprocess.run([config["server"], "--version"], capture_output=True, text=True)
    version = next(line for line in (told.stdout + told.stderr).splitlines() if line.startswith("version"))

    def decode(ids: list[int], max_new_tokens: int, setting: dict[str, Any]) -> dict[str, Any]:
        key = json.dumps(setting)
        if key not in servers:
            more = ["-md", config["draft"], "-td", threads, "--spec-draft-poll", "0"] if setting.get("draft") else []
            servers[key] = Server([*command, *more, *setting.get("arguments", [])])
        reply = servers[key].complete(
            prompt=ids,
            n_predict=max_new_tokens,
            temperature=0,
            ignore_eos=True,
            cache_prompt=False,
            return_tokens=True,
        )
        timings = reply["timings"]
        accepted = timings.get("draft_n_accepted", 0)
        decoded = timings["predicted_n"] - 1
        return {
            "ids": reply["tokens"],
            "seconds": timings["predicted_ms"] / 1e3,
            "tokens": decoded,
            "passes": decoded - accepted,
            "proposed": timings.get("draft_n", 0),
            "accepted": accepted,
        }

    return f"llama.cpp {version.removeprefix('version: ')}", decode


if __name__ == "__main__":
    serve(load)
