"""A draft model with a tokenizer of its own: it drafts text, and the text is proposed in the target's tokens."""

from __future__ import annotations

from collections.abc import Sequence
from math import isfinite

import numpy as np

from outrider.runtime.accept import Draft
from outrider.runtime.drafters import Draw
from outrider.runtime.drafters.model import DraftModel, no_numbers
from outrider.runtime.sampling.history import History
from outrider.runtime.sequence import SequenceModel
from outrider.runtime.text import TextCodec
from outrider.runtime.translate import Translation

_STEPS = 2  # draft steps a target token wanted, at most


class TranslatedDrafter(DraftModel):
    """See ``drafters.Drafter``; exact acceptance only.

    Drafts are the likeliest tokens, also where the target samples: its noise belongs to tokens that the draft has not.
    """

    def __init__(self, model: SequenceModel, target: TextCodec, draft: TextCodec) -> None:
        self._codec = draft
        self._translation = Translation(target, draft)
        super().__init__(model)

    def lacking(self, history: History) -> int:
        """In tokens of the target."""
        return len(history) - self._followed

    def begin(self) -> None:
        super().begin()
        self._translation.begin()
        self._followed = 0  # the target's tokens
        self._drafted = self._translated = 1  # tokens of this request in either vocabulary

    def propose(self, history: History, k: int, draw: Draw) -> Sequence[Draft]:
        model, translation = self._model, self._translation
        ids = translation.follow(history.tokens)
        self._followed = len(history)
        if not ids:  # no text yet, and a tokenizer without a first token
            return []
        model.keep(ids, self._agreed)
        room = min(_STEPS * k, model.max_length + 1 - len(ids))
        drafted: list[int] = []
        proposed: list[int] = []
        goes_on = True
        while goes_on and len(proposed) < k and len(drafted) < room:
            # As many steps as the text is likely to need: translating costs more than a word in cold caches.
            steps = round((k - len(proposed)) * self._drafted / self._translated)
            goes_on = self._draft(ids, drafted, min(max(1, steps), room - len(drafted)))
            translated = translation.translate(drafted)
            if translated is None:
                break
            proposed = translated
        self._drafted += len(drafted)
        self._translated += len(proposed)
        self._agreed = min(translation.settled, model.length)
        return [Draft(token) for token in proposed[:k]]

    def _draft(self, ids: list[int], drafted: list[int], steps: int) -> bool:
        """Add up to ``steps`` tokens; False at a special one, which is no text."""
        model = self._model
        for _ in range(steps):
            row = model.extend(drafted[-1:] or ids[model.length :], 1)[0]
            assert not isinstance(row, np.int64)  # the host chooses for this draft
            token = int(row.argmax())
            if not isfinite(row[token]):
                raise no_numbers()
            if self._codec.is_special(token):
                return False
            drafted.append(token)
        return True
