"""One sequence of a batch: its part of the engines' caches, its drafters, and the request that runs in it.

A request is decoded by the very loop that decodes a single one (``decode.py``). It runs in a coroutine: where the loop
asks its model for a pass, the coroutine stops until the batch has run one for all that wait.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from time import perf_counter
from typing import Any, NamedTuple

import numpy as np
from greenlet import GreenletExit, getcurrent, greenlet
from numpy.typing import NDArray

from outrider.engines.errors import OutriderError
from outrider.engines.packed import Segment, SequencesEngine
from outrider.runtime.choose import Row
from outrider.runtime.drafters.roster import Roster
from outrider.runtime.sequence import SequenceModel


class PassRequest(NamedTuple):
    """What a lane waits for: a pass of the model ``role``."""

    role: str
    segment: Segment


class LaneModel(SequenceModel):
    """A model over one sequence of a packed engine; a pass is the batch's business."""

    def __init__(self, engine: SequencesEngine, role: str, sequence: int, chunk: int) -> None:
        super().__init__(engine.info, chunk)
        self.role = role
        self._sequence = sequence

    def _pass(self, tokens: Sequence[int], wanted: int) -> Sequence[Row]:
        start = perf_counter()
        request = PassRequest(self.role, Segment(self._sequence, self.length, tokens, wanted))
        rows: NDArray[np.float32] = getcurrent().parent.switch(request)
        self.seconds += perf_counter() - start
        return rows  # type: ignore[return-value]  # numpy's arrays are sequences in all but name


class Lane:
    """``pending`` is the pass that the lane waits for, None where it has nothing to do.

    ``failure`` is what ended the last run, None where it came to its end.
    """

    def __init__(self, number: int, target: LaneModel, draft: LaneModel | None, roster: Roster) -> None:
        self.number = number
        self.target = target
        self.draft = draft
        self.roster = roster
        self.pending: PassRequest | None = None
        self.failure: BaseException | None = None
        self._coroutine: Any = None

    @property
    def models(self) -> dict[str, LaneModel]:
        """By role."""
        return {model.role: model for model in (self.target, self.draft) if model is not None}

    def start(self, run: Callable[[], None]) -> None:
        """Run until the first pass is wanted."""
        assert self.pending is None, self.number
        self.failure = None
        self._coroutine = greenlet(run)
        self._go_on(self._coroutine.switch)

    def resume(self, rows: NDArray[np.float32]) -> None:
        """Go on with the rows of the pass, until the next one is wanted."""
        self._go_on(lambda: self._coroutine.switch(rows))

    def fail(self, error: OutriderError) -> None:
        """Have the pass that is waited for fail."""
        mine = type(error)(*error.args)  # several lanes must not share one traceback
        self._go_on(lambda: self._coroutine.throw(mine))

    def stop(self) -> None:
        """End the run; what the caches hold stays good."""
        if self.pending is not None:
            self._go_on(lambda: self._coroutine.throw(GreenletExit))

    def _go_on(self, switch: Callable[[], Any]) -> None:
        self.pending = None
        try:
            found = switch()
        except (KeyboardInterrupt, SystemExit) as error:
            self.failure = error
            raise
        except BaseException as error:  # also a panic in a library that is no Exception
            self.failure = error
            found = None
        self.pending = found if isinstance(found, PassRequest) else None
