"""What the target most likely writes behind one token or two, whatever came before: counted once, in its own text."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any
from zipfile import BadZipFile

import numpy as np

from outrider.engines.errors import OutriderError

# What numpy raises for files that are not what ``np.savez`` writes.
NOT_ARRAYS = (OSError, ValueError, KeyError, EOFError, TypeError, BadZipFile)


class NextTokens:
    """``following`` maps contexts to their likeliest token; contexts that leave too much open are not in it."""

    def __init__(self, following: dict[int, int]) -> None:
        self._following = following

    @classmethod
    def load(cls, path: Path, vocab_size: int) -> NextTokens:
        """From a file with ``contexts`` uint64 [n] and ``tokens`` uint32 [n].

        Raises:
            OutriderError: it is no such file, or names tokens that do not exist.
        """
        try:
            with np.load(path) as held:  # pickles are refused
                contexts, tokens = held["contexts"], held["tokens"]
        except NOT_ARRAYS as error:
            raise OutriderError(f"{path} is not a table of next tokens ({error}); distill the draft again") from None
        if (
            contexts.dtype != np.uint64
            or tokens.dtype != np.uint32
            or (contexts.ndim, contexts.shape) != (1, tokens.shape)
        ):
            raise OutriderError(f"{path} is not a table of next tokens; distill the draft again")
        if tokens.size and int(tokens.max()) >= vocab_size:
            raise OutriderError(f"{path} names token {tokens.max()}, and the vocabulary has {vocab_size}")
        return cls(dict(zip(contexts.tolist(), tokens.tolist(), strict=True)))

    def chain(self, tokens: Sequence[int], k: int) -> tuple[list[int], list[int]]:
        """Up to ``k`` tokens behind ``tokens``, each behind the one before, as far as the table knows; and by how many
        tokens it knows each.
        """
        found: list[int] = []
        known: list[int] = []
        first, last = (tokens[-2] if len(tokens) > 1 else None), tokens[-1]
        while len(found) < k:
            token = None if first is None else self._following.get(pair_context(first, last))
            by_pair = token is not None
            token = token if by_pair else self._following.get(last)
            if token is None:
                break
            found.append(token)
            known.append(1 + by_pair)
            first, last = last, token
        return found, known


def pair_context(first: Any, second: Any) -> Any:
    """The context of two tokens, numbers or arrays of uint64; that of one token is the token itself."""
    return (first + 1) * 2**32 + second
