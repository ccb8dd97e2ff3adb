"""What a distillation came to."""

from __future__ import annotations

from dataclasses import dataclass

from outrider.distill.measure import Measured
from outrider.distill.train import Agreement


@dataclass(frozen=True)
class DistillReport:
    """``coverage`` is the reduced head's share of the target's probability; ``tokens_per_second`` that of writing,
    0 where the text was there already.
    """

    tokens: int
    tokens_per_second: float
    steps: int
    parameters: int
    coverage: float
    agreement: Agreement
    table_entries: int
    measured: Measured
