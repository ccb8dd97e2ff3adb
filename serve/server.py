"""The server's process: what signals do."""

from __future__ import annotations

import logging
import socket
import sys
from types import FrameType

import uvicorn
from fastapi import FastAPI

_SWITCH_SECONDS = 2e-4


class _Server(uvicorn.Server):
    """At the first signal it ends when all requests are answered, at any further one at once."""

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        self.force_exit = self.should_exit
        if self.force_exit:  # what is cut off then would be logged as faults
            logging.getLogger("uvicorn.error").disabled = True
        self.should_exit = True


def run(app: FastAPI, listening: socket.socket, patience: int) -> bool:
    """Serve until a signal comes; whether all requests were answered then.

    Args:
        patience: seconds that the last requests have.
    """
    # The batch's thread gives the interpreter away in each pass and waits so long to get it back.
    sys.setswitchinterval(_SWITCH_SECONDS)
    config = uvicorn.Config(
        app, log_config=None, log_level="warning", access_log=False, timeout_graceful_shutdown=patience
    )
    server = _Server(config)
    server.run(sockets=[listening])
    return not server.force_exit
