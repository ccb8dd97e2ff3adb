"""Do counts follow a law?"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray


def chi_square_p(observed: NDArray[np.int64], expected: NDArray[np.float64]) -> float:
    """Probability of counts as far from the expected ones, or farther; cells that expect less than 5 are one cell.

    A count where none can be makes it 0.
    """
    counts, means = np.ravel(observed).astype(float), np.ravel(expected)
    if counts[means == 0].any():
        return 0.0
    small = means < 5
    counts = np.append(counts[~small], counts[small].sum())
    means = np.append(means[~small], means[small].sum())
    counts, means = counts[means > 0], means[means > 0]
    statistic = float(((counts - means) ** 2 / means).sum())
    halves = torch.tensor([(len(means) - 1) / 2, statistic / 2], dtype=torch.float64)
    return float(torch.special.gammaincc(halves[0], halves[1]))
