"""Clients in a closed loop: each asks, reads its stream to the end, and asks again."""

from __future__ import annotations

import asyncio
import json
import statistics
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from typing import Any

import httpx

_TIMEOUT = httpx.Timeout(600.0)


@dataclass(frozen=True)
class Timed:
    """One answer: seconds to the first token, and from it to the last; ``tokens`` by the server's count."""

    first: float
    rest: float
    tokens: int
    ids: tuple[int, ...]

    @property
    def per_token(self) -> float:
        """Seconds a token behind the first."""
        return self.rest / max(1, self.tokens - 1)


@dataclass(frozen=True)
class Load:
    """All answers of a run."""

    seconds: float
    answers: Sequence[Timed]

    @property
    def tokens_per_second(self) -> float:
        return sum(answer.tokens for answer in self.answers) / self.seconds

    def per_token(self, share: float) -> float:
        """A quantile of ``Timed.per_token``."""
        return quantile([answer.per_token for answer in self.answers], share)


def quantile(values: Sequence[float], share: float) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


def run_load(url: str, bodies: Sequence[dict[str, Any]], clients: int) -> Load:
    """``bodies`` are chat requests, taken in order by whichever client is free."""
    return asyncio.run(_run(url, list(bodies), clients))


async def _run(url: str, bodies: list[dict[str, Any]], clients: int) -> Load:
    answers: list[Timed] = []
    async with httpx.AsyncClient(base_url=url, timeout=_TIMEOUT) as client:

        async def work() -> None:
            while bodies:
                answers.append(await ask(client, bodies.pop(0)))

        start = time.perf_counter()
        await asyncio.gather(*(work() for _ in range(clients)))
        return Load(time.perf_counter() - start, answers)


async def ask(client: httpx.AsyncClient, body: dict[str, Any]) -> Timed:
    """Stream one chat request to its end."""
    start = time.perf_counter()
    first, last, tokens = 0.0, start, 0
    ids: list[int] = []
    async for chunk in chunks(client, body | {"stream": True, "stream_options": {"include_usage": True}}):
        for choice in chunk["choices"]:
            if choice.get("delta", {}).get("content"):
                last = time.perf_counter()
                first = first or last - start
            ids += [token["id"] for token in choice.get("tokens", ())]
        if chunk.get("usage"):
            tokens = chunk["usage"]["completion_tokens"]
    return Timed(first, last - start - first, tokens, tuple(ids))


async def chunks(client: httpx.AsyncClient, body: dict[str, Any]) -> AsyncIterator[dict[str, Any]]:
    """The events of a stream.

    Raises:
        httpx.HTTPStatusError: the server refuses.
    """
    async with client.stream("POST", "/v1/chat/completions", json=body) as response:
        if response.is_error:
            await response.aread()
        response.raise_for_status()
        async for line in response.aiter_lines():
            if line.startswith("data: ") and line != "data: [DONE]":
                yield json.loads(line.removeprefix("data: "))


def median_ratio(mine: Sequence[float], theirs: Sequence[float]) -> float:
    return statistics.median(a / b for a, b in zip(mine, theirs, strict=True))
