"""What a distillation came to."""

from __future__ import annotations

from dataclasses import dataclass

from outrider.distill.measure import Measured
from outrider.distill.train import Agreement


@dataclass(frozen=True)
class DistillReport:
    """``tokens_per_second`` is that of writing, 0 where the text was there; ``chat`` whether the target has a chat
    template; ``seconds`` those of training; ``coverage`` the reduced head's share of the target's probability.
    """

    tokens: int
    tokens_per_second: float
    chat: bool
    prompts_too_long: int
    steps: int
    seconds: float
    parameters: int
    coverage: float
    agreement: Agreement
    table_entries: int
    measured: Measured
