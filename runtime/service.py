"""A batch that runs in a thread of its own: requests come from any thread, tokens go to whoever asked."""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Sequence
from time import monotonic
from typing import Any

from outrider.engines.errors import OutriderError
from outrider.engines.heap import return_free_memory
from outrider.runtime.batch import Batch, Job
from outrider.runtime.generation import GenerationResult, StreamedToken
from outrider.runtime.sampling.options import SamplingOptions
from outrider.runtime.text import Message

_LOG = logging.getLogger(__name__)
_HEAP_SECONDS = 10.0  # between two looks at the heap

# Called in the batch's thread with a job's new tokens, and whether it is done; it must not wait for anything.
Listener = Callable[[Job, list[StreamedToken]], None]


class QueueFullError(OutriderError):
    """So many requests wait that another is not taken."""


class StoppedError(OutriderError):
    """The service takes no more requests, and those that ran are cut off."""


class Service:
    """Runs ``batch`` until ``close``.

    Args:
        max_waiting: requests that may wait for a lane.
    """

    def __init__(self, batch: Batch, max_waiting: int) -> None:
        self.batch = batch
        self.max_waiting = max_waiting
        self.failure: BaseException | None = None  # what stopped the thread, if it was not ``close``
        self._listeners: dict[Job, Listener] = {}  # of all that are not done
        self._inbox: deque[Job] = deque()
        self._wake = threading.Condition()
        self._closing = False
        self._thread = threading.Thread(target=self._run, name="outrider-batch", daemon=True)
        self._thread.start()

    def submit(
        self,
        prompt: str | Sequence[Message] | Sequence[int],
        options: SamplingOptions,
        listener: Listener,
        **speculation: Any,
    ) -> Job:
        """Queue a request; see ``Batch.new_job``. What is wrong with it is said here, in the caller's thread.

        Raises:
            QueueFullError: too many wait.
            OutriderError: as ``Pipeline.stream`` does; or the service is closed.
        """
        self._check_room()  # before the work that a request is
        job = self.batch.new_job(prompt, options, **speculation)
        with self._wake:
            self._check_room()
            self._listeners[job] = listener
            self._inbox.append(job)
            self._wake.notify()
        return job

    def _check_room(self) -> None:
        if self.stopped:
            raise StoppedError(f"the service has stopped: {self.failure or 'it is shutting down'}")
        if len(self._listeners) >= self.capacity:
            raise QueueFullError(f"{self.waiting} requests are waiting; try again later")

    def cancel(self, job: Job) -> None:
        """End a job behind what it has streamed; its listener hears that it is done."""
        with self._wake:
            job.cancelled = True
            self._wake.notify()

    def result(self, job: Job) -> GenerationResult:
        """See ``Batch.result``."""
        return self.batch.result(job)

    @property
    def capacity(self) -> int:
        """Requests that may run or wait at once."""
        return len(self.batch.lanes) + self.max_waiting

    @property
    def stopped(self) -> bool:
        """Whether no more requests are taken."""
        return self._closing or self.failure is not None

    @property
    def waiting(self) -> int:
        """Requests without a lane."""
        return len(self._inbox) + len(self.batch.queue)

    def close(self) -> None:
        """Stop between two rounds; jobs that are not done fail."""
        with self._wake:
            self._closing = True
            self._wake.notify()
        self._thread.join()

    def _run(self) -> None:
        try:
            return_free_memory()  # what loading and measuring have left
            due = monotonic() + _HEAP_SECONDS
            while self._take():
                for job in self.batch.step():
                    self._tell(job)
                if monotonic() >= due:
                    return_free_memory()
                    due = monotonic() + _HEAP_SECONDS
        except BaseException as error:  # a fault of ours: say so to all, rather than leave them waiting
            _LOG.exception("the batch stopped")
            self.failure = error
        with self._wake:
            self._closing = True
            self.batch.queue += self._inbox
            self._inbox.clear()
        why = StoppedError(f"the service has stopped: {self.failure or 'it was shut down'}")
        self.batch.abandon()
        for job in list(self._listeners):  # also what the step that failed had taken up, or brought to its end
            if not job.done:
                job.failure, job.done = why, True
            self._tell(job)

    def _take(self) -> bool:
        """Wait for something to do, and queue what came in; False when closing."""
        with self._wake:
            while not (self._inbox or self.batch.busy or self._closing):
                self._wake.wait()
            while self._inbox:
                self.batch.queue.append(self._inbox.popleft())
            return not self._closing

    def _tell(self, job: Job) -> None:
        listener = self._listeners[job]
        if job.done:
            del self._listeners[job]
        try:
            listener(job, job.new_tokens())
        except Exception:  # one listener's fault must not stop the others
            _LOG.exception("a listener failed")
            job.cancelled = True
