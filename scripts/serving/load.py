"""Clients in a closed loop: each asks, reads its stream to the end, and asks again."""

from __future__ import annotations

import asyncio
import json
import statistics
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import httpx


@dataclass(frozen=True)
class Timed:
    """One answer: when it was asked for, seconds to the first token and from it to the last; ``tokens`` by the server's
    count.
    """

    start: float
    first: float
    rest: float
    tokens: int

    @property
    def per_token(self) -> float:
        """Seconds a token behind the first."""
        return self.rest / max(1, self.tokens - 1)


@dataclass(frozen=True)
class Load:
    """All answers of a run. All clients were at work from ``start`` to ``end``."""

    start: float
    end: float
    answers: Sequence[Timed]

    @property
    def tokens_per_second(self) -> float:
        """While all clients were at work: how the last ones end says nothing of many requests."""
        return sum(map(self._within, self.answers)) / (self.end - self.start)

    def _within(self, answer: Timed) -> float:
        """Its tokens until the end, come evenly from the first on."""
        seconds = self.end - answer.start - answer.first
        if seconds <= 0:
            return 0.0
        return 1 + (answer.tokens - 1) * min(1.0, seconds / answer.rest) if answer.rest else float(answer.tokens)

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
    answers: list[_Answer] = []

    ends: list[float] = []  # when a client found nothing left to ask

    async def work() -> None:
        while bodies:
            answers.append(await _ask(url, bodies.pop(0)))
        ends.append(time.perf_counter())

    start = time.perf_counter()
    await asyncio.gather(*(work() for _ in range(clients)))
    return Load(start, min(ends), [answer.timed() for answer in answers])


@dataclass(frozen=True)
class _Answer:
    """Bytes as they came, each piece with its time: what they say is read when nobody is timed any more, since client
    and server share the processors.
    """

    start: float
    pieces: list[tuple[float, bytes]]

    def timed(self) -> Timed:
        first, last, tokens = 0.0, self.start, 0
        for at, event in self._events():
            if any(choice.get("delta", {}).get("content") for choice in event["choices"]):
                first, last = first or at - self.start, at
            if event.get("usage"):
                tokens = event["usage"]["completion_tokens"]
        return Timed(self.start, first, last - self.start - first, tokens)

    def _events(self) -> Iterator[tuple[float, dict[str, Any]]]:
        """Each event with the time of the piece that completed it. Chunks of HTTP and events come line by line."""
        left = b""
        for at, piece in self.pieces:
            *lines, left = (left + piece).split(b"\n")
            for line in lines:
                if line.startswith(b"data: {"):
                    yield at, json.loads(line.removeprefix(b"data: "))


async def _ask(url: str, body: dict[str, Any]) -> _Answer:
    """Stream one chat request to its end.

    Raises:
        RuntimeError: the server refuses.
    """
    host, _, port = url.removeprefix("http://").partition(":")
    content = json.dumps(body | {"stream": True, "stream_options": {"include_usage": True}}).encode()
    head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\n"
    head += f"Content-Type: application/json\r\nContent-Length: {len(content)}\r\n\r\n"
    reader, writer = await asyncio.open_connection(host, int(port))
    start = time.perf_counter()
    writer.write(head.encode() + content)
    pieces = []
    while piece := await reader.read(1 << 16):
        pieces.append((time.perf_counter(), piece))
    writer.close()
    if b" 200 " not in pieces[0][1][:20]:
        raise RuntimeError(b"".join(piece for _, piece in pieces).decode(errors="replace"))
    return _Answer(start, pieces)


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
