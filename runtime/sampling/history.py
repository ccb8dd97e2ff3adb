"""The tokens of a request, and what moves with them: how often each occurred, and the state of the grammar."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import numpy as np
from numpy.typing import NDArray

from outrider.runtime.sampling.grammar import GrammarState


class TokenCounts:
    """How often each token occurs in a sequence that grows and shrinks at its end, in constant time a token.

    The tokens it begins with stay. A token that is taken back for the last time is always the one that was new last, so
    that no slot is ever empty in between.
    """

    def __init__(self, tokens: Sequence[int] = ()) -> None:
        self._ids: NDArray[np.int64]
        self._ids, counts = np.unique(np.array(tokens, np.int64), return_counts=True)
        self._counts: NDArray[np.int64] = counts.astype(np.int64)
        self._slots = {token: slot for slot, token in enumerate(self._ids.tolist())}

    @property
    def ids(self) -> NDArray[np.int64]:
        """int64 ``[n]``, each token once."""
        return self._ids[: len(self._slots)]

    @property
    def counts(self) -> NDArray[np.int64]:
        """int64 ``[n]``, how often each of ``ids`` occurs."""
        return self._counts[: len(self._slots)]

    def push(self, token: int) -> None:
        slot = self._slots.setdefault(token, len(self._slots))
        if slot == len(self._ids):
            room = np.zeros(len(self._ids) + 64, np.int64)
            self._ids, self._counts = np.concatenate([self._ids, room]), np.concatenate([self._counts, room])
        self._ids[slot] = token
        self._counts[slot] += 1

    def pop(self, token: int) -> None:
        slot = self._slots[token]
        self._counts[slot] -= 1
        if self._counts[slot] == 0:
            del self._slots[token]


class History:
    """Prompt and output. Drafts are pushed while they are drawn or judged, and rolled back; only a commit stays.

    Args:
        prompt: at least one token.
        end_token_ids: tokens that end the request; the grammar does not see them.
        grammar: its state after no token, or None.
        counting: whether token counts are wanted.
    """

    def __init__(
        self,
        prompt: Sequence[int],
        end_token_ids: Collection[int] = (),
        grammar: GrammarState | None = None,
        counting: bool = False,
    ) -> None:
        self.tokens = list(prompt)
        self.prompt_length = len(self.tokens)
        self.end_token_ids = frozenset(end_token_ids)
        self.grammar = grammar
        self.all_counts = TokenCounts(self.tokens) if counting else None
        self.output_counts = TokenCounts() if counting else None
        self._counts = [counts for counts in (self.all_counts, self.output_counts) if counts is not None]

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def output_length(self) -> int:
        return len(self.tokens) - self.prompt_length

    def push(self, token: int) -> None:
        if self.grammar is not None and token not in self.end_token_ids:
            self.grammar.push(token)  # first: it may refuse
        self.tokens.append(token)
        for counts in self._counts:
            counts.push(token)

    def rollback(self, length: int) -> None:
        """Forget all but the first ``length`` tokens; the prompt stays."""
        assert self.prompt_length <= length <= len(self.tokens), (length, len(self.tokens))
        forgotten = self.tokens[length:]
        del self.tokens[length:]
        for counts in self._counts:
            for token in reversed(forgotten):
                counts.pop(token)
        if self.grammar is not None:
            self.grammar.rollback(sum(token not in self.end_token_ids for token in forgotten))

    def ended(self) -> bool:
        """Whether nothing can follow the last token: it ends the request, or completes the grammar."""
        last_ends = self.output_length > 0 and self.tokens[-1] in self.end_token_ids
        return last_ends or (self.grammar is not None and self.grammar.complete)
