"""The only place where a token is chosen: for plain decoding, for every verify row, and for the draft."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray


def choose(logits: NDArray[np.float32]) -> NDArray[np.int64]:
    """Greedy choice: float32 ``[rows, V]`` -> int64 ``[rows]``; of equal logits the smallest id wins."""
    chosen: NDArray[np.int64] = logits.argmax(axis=-1)
    return chosen
