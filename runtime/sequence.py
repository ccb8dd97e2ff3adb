"""A model and the cache of one sequence: append tokens, get logits, roll back by forgetting a length."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from time import perf_counter

import numpy as np
from numpy.typing import NDArray

from outrider.engines.bundle import ModelInfo
from outrider.engines.engine import PREFILL_CHUNK, Engine, Plan, padded_rows
from outrider.runtime.choose import Row


class SequenceModel(ABC):
    """A model with the tokens that its cache holds of one sequence.

    ``passes`` and ``seconds`` count the engine's work, so that the rest of a round is the host's. On a device that is
    the time of submitting and of waiting, in a batch that of waiting for the others.

    Args:
        chunk: the most rows of a pass; longer texts take several.
    """

    def __init__(self, info: ModelInfo, chunk: int = PREFILL_CHUNK) -> None:
        self.info = info
        self.chunk = chunk
        self.tokens: list[int] = []  # one list for good: others may hold it
        self.passes = 0
        self.seconds = 0.0

    @property
    def length(self) -> int:
        """Tokens in the cache."""
        return len(self.tokens)

    @property
    def max_length(self) -> int:
        """Tokens that fit: behind them the cache has room for the padding of the widest pass."""
        return self.info.capacity - PREFILL_CHUNK

    def extend(self, tokens: Sequence[int], logit_rows: int) -> Sequence[Row]:
        """Append ``tokens``; rows of logits after the last ``logit_rows`` of them, valid until the next call."""
        assert logit_rows <= self.chunk, logit_rows
        for start in range(0, len(tokens), self.chunk):
            part = tokens[start : start + self.chunk]
            rows = self._pass(part, min(len(part), logit_rows))
            self.passes += 1
            self.tokens += part
        return rows

    def rollback(self, length: int) -> None:
        """Forget all but the first ``length`` tokens: what lies behind them is overwritten, nothing is copied."""
        assert 0 <= length <= self.length, (length, self.length)
        del self.tokens[length:]

    def keep(self, tokens: Sequence[int], agreed: int = 0) -> None:
        """Forget what differs from ``tokens``, and at least their last one, so that there is one to append.

        Args:
            agreed: how many tokens are known to be equal, and need not be compared.
        """
        end = min(self.length, len(tokens) - 1)
        kept = min(agreed, end)
        while kept < end and self.tokens[kept] == tokens[kept]:
            kept += 1
        self.rollback(kept)

    @abstractmethod
    def _pass(self, tokens: Sequence[int], wanted: int) -> Sequence[Row]:
        """Rows of the last ``wanted`` of at most ``chunk`` tokens behind those in the cache; counts its seconds."""
        ...


class CachedModel(SequenceModel):
    """An engine of one sequence.

    ``min_rows`` is the fewest rows of a pass that give the bits of every larger pass: others are padded. With
    ``exact`` False one-row passes run at their fastest instead, whatever their bits.
    """

    def __init__(self, engine: Engine, min_rows: int, exact: bool = True) -> None:
        super().__init__(engine.info)
        self.engine = engine
        self.min_rows = min_rows if exact else 1
        self.exact = exact
        self._lengths = np.zeros(1, np.int32)

    def _pass(self, tokens: Sequence[int], wanted: int) -> Sequence[Row]:
        rows, logit_rows = (padded_rows(count, self.min_rows) for count in (len(tokens), wanted))
        plan = self.engine.plan(rows, logit_rows, self.exact)
        self._lengths[0] = self.length
        ids: NDArray[np.int64] = np.array(tokens, np.int64)[None]
        return self._run(plan, ids, wanted)

    def _run(self, plan: Plan, ids: NDArray[np.int64], wanted: int) -> Sequence[Row]:
        """Rows of the last ``wanted`` of ``ids [1, n]``."""
        start = perf_counter()
        rows: NDArray[np.float32] = plan.run(ids, self._lengths)[0, -wanted:]
        self.seconds += perf_counter() - start
        return rows  # type: ignore[return-value]  # numpy's arrays are sequences in all but name
