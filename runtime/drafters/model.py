"""A draft model: K steps with a cache of its own, rolled back to what was committed."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from outrider.engines.errors import OutriderError
from outrider.runtime.accept import Draft
from outrider.runtime.drafters import Draw
from outrider.runtime.sampling.history import History
from outrider.runtime.sequence import CachedModel


class DraftModel:
    """What drafters with a model have in common; ``_agreed`` cached tokens are known to be those of the text."""

    def __init__(self, model: CachedModel) -> None:
        self._model = model
        self.begin()

    @property
    def passes(self) -> int:
        return self._model.passes

    @property
    def seconds(self) -> float:
        return self._model.seconds

    def begin(self) -> None:
        self._agreed = 0


def no_numbers() -> OutriderError:
    return OutriderError("the draft model gives no numbers; export it again, or use --k 0")


class ModelDrafter(DraftModel):
    """See ``drafters.Drafter``. It stops early where nothing could stand: behind an end, and past its own context."""

    def propose(self, history: History, k: int, draw: Draw) -> Sequence[Draft]:
        start = len(history)
        self._model.keep(history.tokens, self._agreed)
        drafts: list[Draft] = []
        while len(drafts) < k and len(history) <= self._model.max_length and not history.ended():
            # What the cache lacks: the last token, and after a fully accepted round the last draft before it.
            logits = self._model.extend(history.tokens[self._model.length :], 1)[0]
            try:
                draft = draw(logits)
                history.push(draft.token)
            except Exception as error:
                if not np.isfinite(logits).all():
                    raise no_numbers() from error
                break  # masks or a processor fail behind a draft: where the text gets there, the target's choice fails
            drafts.append(draft)
        history.rollback(start)
        self._agreed = min(start, self._model.length)
        return drafts
