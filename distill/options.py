"""What a distillation is asked for."""

from __future__ import annotations

from dataclasses import dataclass
from math import isfinite

from outrider.engines.errors import OutriderError
from outrider.export.layers import PREFIX

_SHORTEST = 2.0  # minutes: less leaves no time for one evaluation


@dataclass(frozen=True)
class DistillOptions:
    """``tokens`` of text and ``steps`` of training are what ``minutes`` allow unless they are given: with both, the
    same seed gives the same draft on the same machine, bit for bit. ``kind`` is ``tiny`` or ``layers:0,1,28,29``, and
    ``max_length`` that of a sequence in tokens.
    """

    kind: str = "tiny"
    minutes: float = 90.0
    tokens: int | None = None
    steps: int | None = None
    max_length: int = 288
    seed: int = 0

    def __post_init__(self) -> None:
        if self.kind != "tiny" and not self.kind.startswith(PREFIX):
            raise OutriderError(
                f"--kind {self.kind} is unknown; use tiny, or layers:0,1,28,29 for some of the target's"
            )
        if not isfinite(self.minutes) or (self.minutes < _SHORTEST and None in (self.tokens, self.steps)):
            raise OutriderError(
                f"--minutes {self.minutes:g} leaves no time for one evaluation; give {_SHORTEST:g} or more"
            )
        for name, value in (("tokens", self.tokens), ("steps", self.steps)):
            if value is not None and value < 1:
                raise OutriderError(f"--{name} {value} must be 1 or more")
