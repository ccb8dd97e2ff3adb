"""One HTTP request in the batch: its jobs, what comes of them, and their end if nobody waits for it any more."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal, NamedTuple

from starlette.concurrency import run_in_threadpool

from outrider.runtime.batch import Job
from outrider.runtime.generation import StreamedToken
from outrider.runtime.sampling.options import SamplingOptions
from outrider.runtime.service import Service
from outrider.serve.answers import Finished


class Update(NamedTuple):
    """New tokens of a choice; with ``done`` its last."""

    choice: int
    tokens: list[StreamedToken]
    done: bool


@dataclass
class Running:
    """Choices of one request, by index; ``prompts`` are what the text of each is to begin with.

    ``outcome`` is None when all have come to their ends; until then, and where nobody waited for that, ``abort``.
    """

    service: Service
    prompts: list[str] = field(default_factory=list)
    jobs: list[Job] = field(default_factory=list)
    tokens: list[list[StreamedToken]] = field(default_factory=list)
    started: float = field(default_factory=time.perf_counter)
    first: float | None = None  # seconds to the first token of any choice
    outcome: Literal["abort", "error"] | None = "abort"
    _updates: asyncio.Queue[Update] = field(default_factory=asyncio.Queue)

    async def submit(self, prompt: Any, options: SamplingOptions, **speculation: Any) -> None:
        """Add a choice. Tokenizing and compiling a grammar take time, which is not the event loop's.

        Raises:
            OutriderError: see ``Service.submit``.
        """
        loop, index = asyncio.get_running_loop(), len(self.tokens)
        self.tokens.append([])

        def listen(job: Job, tokens: list[StreamedToken]) -> None:
            with suppress(RuntimeError):  # the loop is closed: the process ends
                loop.call_soon_threadsafe(self._updates.put_nowait, Update(index, tokens, job.done))

        submit = partial(self.service.submit, prompt, options, listen, **speculation)
        self.jobs.append(await run_in_threadpool(submit))

    async def updates(self, timeout: float) -> AsyncIterator[Update]:
        """As they come, until all choices are done.

        Raises:
            Exception: what ended one of them.
            asyncio.TimeoutError: so many seconds after the start they are not done.
        """
        left = len(self.jobs)
        while left:
            remaining = self.started + timeout - time.perf_counter()
            update = await asyncio.wait_for(self._updates.get(), max(0.0, remaining))
            if update.tokens and self.first is None:
                self.first = time.perf_counter() - self.started
            self.tokens[update.choice] += update.tokens
            if update.done:
                left -= 1
                failure = self.jobs[update.choice].failure
                if failure is not None:
                    raise failure
            yield update

    def finished(self) -> Sequence[Finished]:
        """All choices, when all are done."""
        parts = zip(map(self.service.result, self.jobs), self.tokens, self.prompts, strict=True)
        return [Finished(*part) for part in parts]

    def leave(self) -> None:
        """End what still runs: each job frees its lane at the next round."""
        for job in self.jobs:
            if not job.done:
                self.service.cancel(job)
