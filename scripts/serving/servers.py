"""Servers of OpenAI's API as processes of their own."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import httpx

_SECONDS = 120.0


class Server:
    """Runs ``command`` until ``close``; in it ``{port}`` is a free port.

    Raises:
        RuntimeError: it does not come up.
    """

    def __init__(self, name: str, command: list[str], log: Path) -> None:
        self.name = name
        with socket.create_server(("127.0.0.1", 0)) as probe:
            port = probe.getsockname()[1]
        self.url = f"http://127.0.0.1:{port}"
        with log.open("wb") as output:
            self.process = subprocess.Popen(
                [part.replace("{port}", str(port)) for part in command], stdout=output, stderr=output
            )
        end = time.monotonic() + _SECONDS
        while not self._healthy():
            if self.process.poll() is not None or time.monotonic() > end:
                self.close()
                raise RuntimeError(f"{name} did not start; see {log}")
            time.sleep(0.2)

    def resident_bytes(self) -> int:
        """Memory that is the process's own or mapped by it, as the system counts it (Linux)."""
        status = Path(f"/proc/{self.process.pid}/status").read_text()
        line = next(line for line in status.splitlines() if line.startswith("VmRSS"))
        return int(line.split()[1]) * 1024

    def metric(self, name: str) -> float:
        """A gauge or counter of vLLM's name, summed over its labels."""
        lines = httpx.get(f"{self.url}/metrics").text.splitlines()
        return sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith(f"vllm:{name}{{"))

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            try:
                self.process.wait(20)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()

    def _healthy(self) -> bool:
        try:
            return httpx.get(f"{self.url}/health", timeout=2).status_code == 200
        except httpx.HTTPError:
            return False


def outrider_command(bundle: Path, threads: int, lanes: int, waiting: int = 256) -> list[str]:
    command = [str(Path(sys.executable).with_name("outrider")), "serve", str(bundle), "--port", "{port}"]
    return [*command, "--threads", str(threads), "--max-batch", str(lanes), "--max-waiting", str(waiting)]


def llama_command(binary: Path, model: Path, threads: int, lanes: int) -> list[str]:
    """All lanes share the context; 1,024 tokens each are more than the prompts need."""
    command = [str(binary), "-m", str(model), "--host", "127.0.0.1", "--port", "{port}"]
    return [*command, "-t", str(threads), "-np", str(lanes), "-c", str(1024 * lanes), "--poll", "0"]
