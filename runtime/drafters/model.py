"""A draft model: K greedy steps with a cache of its own, rolled back to what was committed."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from outrider.runtime.choose import choose
from outrider.runtime.sequence import CachedModel


class ModelDrafter:
    """See ``drafters.Drafter``. It stops early behind an end-of-sequence token: no draft after it could stand."""

    def __init__(self, model: CachedModel, eos_token_ids: Collection[int]) -> None:
        self._model = model
        self._eos_token_ids = eos_token_ids
        self._cached: list[int] = []
        self._agreed = 0

    @property
    def passes(self) -> int:
        return self._model.passes

    @property
    def seconds(self) -> float:
        return self._model.seconds

    def begin(self, prompt: Sequence[int]) -> None:
        self._model.rollback(0)
        self._cached = []
        self._agreed = 0

    def propose(self, tokens: Sequence[int], k: int) -> list[int]:
        self._roll_back(tokens)
        drafts: list[int] = []
        # What the cache lacks: the last token, and after a fully accepted round the last draft before it.
        pending = list(tokens[self._model.length :])
        while len(drafts) < k:
            draft = int(choose(self._model.extend(pending, 1))[0])
            self._cached += pending
            drafts.append(draft)
            if draft in self._eos_token_ids:
                break
            pending = [draft]
        return drafts

    def _roll_back(self, tokens: Sequence[int]) -> None:
        """Keep the cached tokens that were committed; at least the last token is always fed again."""
        keep = self._agreed
        while keep < min(len(self._cached), len(tokens) - 1) and self._cached[keep] == tokens[keep]:
            keep += 1
        del self._cached[keep:]
        self._agreed = keep
        self._model.rollback(keep)
