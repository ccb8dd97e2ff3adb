"""A draft model: K steps with a cache of its own, rolled back to what was committed."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from outrider.engines.errors import OutriderError
from outrider.runtime.accept import Draft
from outrider.runtime.drafters import Draw
from outrider.runtime.sampling.history import History
from outrider.runtime.sequence import CachedModel


class ModelDrafter:
    """See ``drafters.Drafter``. It stops early where nothing could stand: behind an end, and past its own context."""

    def __init__(self, model: CachedModel) -> None:
        self._model = model
        self._agreed = 0  # cached tokens that are known to be those of the history

    @property
    def passes(self) -> int:
        return self._model.passes

    @property
    def seconds(self) -> float:
        return self._model.seconds

    def begin(self) -> None:
        self._agreed = 0

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
                    raise OutriderError("the draft model gives no numbers; export it again, or use --k 0") from error
                break  # masks or a processor fail behind a draft: where the text gets there, the target's choice fails
            drafts.append(draft)
        history.rollback(start)
        self._agreed = min(start, self._model.length)
        return drafts
