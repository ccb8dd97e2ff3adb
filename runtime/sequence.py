"""A model and the cache of one sequence: append tokens, get logits, roll back by forgetting a length."""

from __future__ import annotations

from collections.abc import Sequence
from time import perf_counter

import numpy as np
from numpy.typing import NDArray

from outrider.engines.engine import PREFILL_CHUNK, Engine, Plan
from outrider.runtime.choose import Row


class CachedModel:
    """An engine with the tokens that its cache holds.

    ``min_rows`` is the fewest rows of a pass that give the bits of every larger pass: shorter ones are padded. With
    ``exact`` False one-row passes run at their fastest instead, whatever their bits.
    ``passes`` and ``seconds`` count the engine's work, so that the rest of a round is the host's. On a device that is
    the time of submitting and of waiting.
    """

    def __init__(self, engine: Engine, min_rows: int, exact: bool = True) -> None:
        self.engine = engine
        self.min_rows = min_rows if exact else 1
        self.exact = exact
        self.tokens: list[int] = []  # one list for good: others may hold it
        self.passes = 0
        self.seconds = 0.0
        self._lengths = np.zeros(1, np.int32)

    @property
    def length(self) -> int:
        """Tokens in the cache."""
        return len(self.tokens)

    @property
    def max_length(self) -> int:
        """Tokens that fit: behind them the cache has room for the padding of the widest pass."""
        return self.engine.info.capacity - PREFILL_CHUNK

    def extend(self, tokens: Sequence[int], logit_rows: int) -> Sequence[Row]:
        """Append ``tokens``; rows of logits after the last ``logit_rows`` of them, valid until the next call."""
        assert logit_rows <= PREFILL_CHUNK, logit_rows
        for start in range(0, len(tokens), PREFILL_CHUNK):
            rows = self._pass(tokens[start : start + PREFILL_CHUNK], logit_rows)
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

    def _pass(self, tokens: Sequence[int], logit_rows: int) -> Sequence[Row]:
        count, wanted = len(tokens), min(len(tokens), logit_rows)
        plan = self.engine.plan(max(count, self.min_rows), max(wanted, self.min_rows), self.exact)
        self._lengths[0] = self.length
        ids: NDArray[np.int64] = np.array(tokens, np.int64)[None]
        rows = self._run(plan, ids, wanted)
        self.passes += 1
        self.tokens += tokens
        return rows

    def _run(self, plan: Plan, ids: NDArray[np.int64], wanted: int) -> Sequence[Row]:
        """Rows of the last ``wanted`` of ``ids [1, n]``."""
        start = perf_counter()
        rows: NDArray[np.float32] = plan.run(ids, self._lengths)[0, -wanted:]
        self.seconds += perf_counter() - start
        return rows  # type: ignore[return-value]  # numpy's arrays are sequences in all but name
