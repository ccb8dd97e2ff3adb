"""Thousands of short requests with all that can happen to one: is memory flat, no lane lost, every text right?"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import httpx
from serving.load import chunks
from serving.servers import Server

from outrider.runtime import Pipeline, SamplingOptions

_CLIENTS = 12
_CHECKED = 0.02  # of the requests are compared with their single runs
_LEFT = 0.1  # of the requests are left by the client before their end
_WARM = 0.1  # of the requests go by before memory is looked at


@dataclass
class Soak:
    """What came of it; ``memory`` in bytes behind each request, but for the first tenth of them."""

    requests: int
    left: int
    checked: int
    wrong: int
    memory: list[int]

    @property
    def held(self) -> tuple[int, int]:
        """Bytes that were held at the start and at the end: the least of many readings, since the heap has holes that
        the server gives back now and then.
        """
        each = len(self.memory) // 9
        return min(self.memory[:each]), min(self.memory[-each:])


def soak(server: Server, pipeline: Pipeline, prompts: Sequence[str], requests: int, seed: int = 0) -> Soak:
    return asyncio.run(_soak(server, pipeline, prompts, requests, random.Random(seed)))


async def _soak(server: Server, pipeline: Pipeline, prompts: Sequence[str], requests: int, rng: random.Random) -> Soak:
    found = Soak(requests, 0, 0, 0, [])
    samples: list[tuple[dict[str, Any], list[int]]] = []
    done = 0

    async with httpx.AsyncClient(base_url=server.url, timeout=600.0) as client:

        async def work(count: int) -> None:
            nonlocal done
            for _ in range(count):
                body = _body(rng, prompts)
                leave = rng.randrange(1, 6) if rng.random() < _LEFT else None
                ids = await _ask(client, body, leave)
                done += 1
                if leave is not None:
                    found.left += 1
                elif rng.random() < _CHECKED:
                    samples.append((body, ids))
                if done >= _WARM * requests:
                    found.memory.append(server.resident_bytes())

        each = requests // _CLIENTS
        await asyncio.gather(*(work(each) for _ in range(_CLIENTS)))
    for body, ids in samples:
        options = {name: body[name] for name in ("temperature", "seed", "ignore_eos")}
        if body["temperature"] == 0:
            options = {"ignore_eos": body["ignore_eos"]}
        single = SamplingOptions(max_new_tokens=body["max_tokens"], stop_strings=body["stop"], **options)
        expected = pipeline.generate(body["messages"], single, k=0).token_ids
        found.checked += 1
        found.wrong += ids != expected
    return found


def _body(rng: random.Random, prompts: Sequence[str]) -> dict[str, Any]:
    text = " ".join(rng.choice(prompts).split()[: rng.randrange(1, 12)])
    return {
        "messages": [{"role": "user", "content": text}],
        "max_tokens": rng.randrange(1, 10),
        "temperature": rng.choice([0, 0.8, 1.2]),
        "seed": rng.randrange(1 << 32),
        "stop": rng.choice([[], [], ["."], ["the", "a"]]),
        "ignore_eos": rng.random() < 0.5,
        "return_tokens": True,
        **rng.choice([{}, {}, {"num_draft_tokens": 0}, {"num_draft_tokens": 2}]),
    }


async def _ask(client: httpx.AsyncClient, body: dict[str, Any], leave: int | None) -> list[int]:
    """The token ids of an answer; with ``leave`` the connection is closed behind so many events."""
    ids: list[int] = []
    events = chunks(client, body | {"stream": True})
    number = 0
    async for chunk in events:
        number += 1
        for choice in chunk["choices"]:
            ids += [token["id"] for token in choice.get("tokens", ())]
        if number == leave:
            await events.aclose()
            break
    return ids
