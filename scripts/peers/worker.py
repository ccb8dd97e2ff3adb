"""A peer's worker as ``bench_peers.py`` sees it: a process that decodes prompt after prompt."""

from __future__ import annotations

import json
import os
import selectors
import signal
import subprocess
from contextlib import suppress
from pathlib import Path
from typing import Any

_SECONDS = 300.0


class WorkerError(Exception):
    """The worker is gone, with the reason in a line."""


class SettingError(Exception):
    """The worker goes on, but cannot decode with this setting."""


class Worker:
    """Starts ``python script config`` in a process group of its own, which ends with ``close``.

    ``log`` takes what the worker writes to standard error.

    Raises:
        WorkerError: it does not come up.
    """

    def __init__(self, python: Path, script: Path, config: dict[str, Any], log: Path) -> None:
        self.log = log
        with log.open("wb") as errors:
            self.process = subprocess.Popen(
                [str(python), str(script), json.dumps(config)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                start_new_session=True,
            )
        try:
            self.version = str(self._reply()["version"])
        except WorkerError:
            self.close()
            raise

    def decode(self, ids: list[int], max_new_tokens: int, setting: dict[str, Any]) -> dict[str, Any]:
        """The reply that ``serve.py`` describes.

        Raises:
            WorkerError: the worker is gone.
            SettingError: what its library raised, or a text of another length.
        """
        reply = self.ask({"ids": ids, "max_new_tokens": max_new_tokens, "setting": setting})
        if len(reply["ids"]) != max_new_tokens:
            raise SettingError(f"it gave {len(reply['ids'])} tokens where {max_new_tokens} were asked for")
        return reply

    def ask(self, request: dict[str, Any]) -> dict[str, Any]:
        """The reply to any request.

        Raises:
            WorkerError: the worker is gone.
            SettingError: what its library raised.
        """
        assert self.process.stdin is not None
        try:
            self.process.stdin.write(json.dumps(request).encode() + b"\n")
            self.process.stdin.flush()
        except BrokenPipeError:
            raise WorkerError(self._last_words()) from None
        reply = self._reply()
        if "error" in reply:
            raise SettingError(" ".join(str(reply["error"]).split()))
        return reply

    def close(self) -> None:
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)  # servers it started, too
        self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout):
            assert pipe is not None
            pipe.close()

    def _reply(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        with selectors.DefaultSelector() as selector:
            selector.register(self.process.stdout, selectors.EVENT_READ)
            if not selector.select(_SECONDS):
                raise WorkerError(f"no reply within {_SECONDS:.0f} s")
        line = self.process.stdout.readline()
        if not line:
            raise WorkerError(self._last_words())
        return dict(json.loads(line))

    def _last_words(self) -> str:
        code = self.process.wait()
        lines = [line.strip() for line in self.log.read_text(errors="replace").splitlines() if line.strip()]
        return f"its worker ended with status {code}: {lines[-1] if lines else 'it said nothing'}"
