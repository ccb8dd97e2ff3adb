"""What the loop asks of an engine: a plan for a number of rows, and logits from it. One protocol for every backend."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from outrider.engines.bundle import ModelInfo

PREFILL_CHUNK = 256  # rows of a prefill pass; a longer prompt takes several


def row_counts(tiers: Sequence[int]) -> list[int]:
    """The numbers of rows of a bundle's fixed plans: a step, its padded form, each verify pass, a prefill chunk."""
    return sorted({1, 2, *(k + 1 for k in tiers), PREFILL_CHUNK})


class Plan(Protocol):
    """One execution shape with everything bound: ``rows`` tokens a sequence in, ``logit_rows`` rows of logits out."""

    rows: int
    logit_rows: int

    def run(self, input_ids: NDArray[np.int64], cache_lengths: NDArray[np.int32]) -> NDArray[np.float32]:
        """Append tokens to the cache and return logits of the last of them.

        Args:
            input_ids: ``[B, n]``, n <= ``rows``; missing rows are padded, written behind the valid ones and ignored.
            cache_lengths: ``[B]``, tokens already in the cache. A smaller length than before is a rollback.

        Returns:
            float32 ``[B, min(n, logit_rows), vocab_size]``, row i the distribution after the i-th of the last tokens.
            A view that the next run overwrites.
        """
        ...


class Engine(Protocol):
    """A graph that runs, with the caches of ``batch`` sequences and its outputs bound once.

    ``device`` names what decides the bits: processor, provider, threads and engine version.
    """

    info: ModelInfo
    batch: int
    device: str

    def plan(self, rows: int, logit_rows: int, exact: bool = True) -> Plan:
        """The smallest plan that takes ``rows`` tokens and gives ``logit_rows`` rows of logits; made once and kept.

        ``exact`` gives a one-row pass the bits of a wider one where the graph can, at the price of a spare row in
        attention; without it, it is as fast as it can be.
        """
        ...

    def describe(self) -> dict[str, Any]:
        """Every option that shapes speed or results, for ``outrider inspect``."""
        ...
