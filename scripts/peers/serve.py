"""A worker's side of the talk with ``bench_peers.py``: one JSON object a line, requests in, replies out.

Workers run under the interpreters of their peers, so that this file and theirs import nothing of Outrider's.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from typing import Any

Decode = Callable[[list[int], int, dict[str, Any]], dict[str, Any]]
Answer = Callable[[dict[str, Any]], dict[str, Any]]


def serve(load: Callable[[dict[str, Any]], tuple[str, Decode]]) -> None:
    """Load what the first argument (JSON) names, say its version, then decode request after request.

    ``load`` gives the version and ``decode(prompt ids, max_new_tokens, setting)``, greedy and past any end of sequence,
    whose reply holds the new ``ids`` and ``seconds`` for the last ``tokens`` of them: without the prefill and what came
    out of it. ``passes`` are the target's, ``proposed`` and ``accepted`` draft tokens; None where a peer does not tell.
    """

    def loaded(config: dict[str, Any]) -> tuple[str, Answer]:
        version, decode = load(config)
        return version, lambda request: decode(request["ids"], request["max_new_tokens"], request["setting"])

    answer(loaded)


def answer(load: Callable[[dict[str, Any]], tuple[str, Answer]]) -> None:
    """Load what the first argument (JSON) names, say its version, then answer request after request."""
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print is no reply
    version, reply_to = load(json.loads(sys.argv[1]))
    reply: dict[str, Any] = {"version": version}
    while True:
        print(json.dumps(reply), file=replies, flush=True)
        line = sys.stdin.readline()
        if not line:
            return
        try:
            reply = reply_to(json.loads(line))
        except Exception as error:  # whatever a library raises ends this setting, not the peer
            reply = {"error": f"{type(error).__name__}: {error}"}
