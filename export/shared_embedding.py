"""Drafts that look tokens up in their target's embedding, through a projection where they are narrower.

Such a folder's config says ``"shared_embedding": true``; ``embedding_projection.weight [width, target's width]`` is
multiplied into the target's rows at export. The engine gets a table of the draft's own width: smaller than the rows
and the projection would be together, and no product more at each step.
"""

from __future__ import annotations

import hashlib
import json
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from outrider.engines.errors import OutriderError
from outrider.export.checkpoint import Checkpoint, Quantized, TokenizerFiles, read_all
from outrider.export.pair import vocabulary

SHARED = "shared_embedding"
VOCABULARY = "shared_vocabulary"
PROJECTION = "embedding_projection.weight"
_EMBEDDING = "model.embed_tokens.weight"  # of a draft of another family than its target


class SharedEmbedding:
    """See ``checkpoint.Checkpoint``: ``draft`` with the rows of ``target``'s tensor ``embedding``."""

    def __init__(self, draft: Checkpoint, target: Checkpoint, embedding: str) -> None:
        self.path = draft.path
        self.config = draft.config
        self.draft = draft
        self.target = target
        self.embedding = embedding

    @property
    def _names(self) -> tuple[str, str]:
        return _EMBEDDING, self._embedding

    @property
    def _embedding(self) -> str:
        return f"{self.embedding}.weight"

    @cached_property
    def _projection(self) -> NDArray[np.float32] | None:
        return None if self.draft.shape(PROJECTION) is None else read_all(self.draft, PROJECTION)

    def shape(self, name: str) -> tuple[int, ...] | None:
        if name not in self._names:
            return self.draft.shape(name)
        shape, projection = self.target.shape(self._embedding), self.draft.shape(PROJECTION)
        assert shape is not None
        if projection is None:
            return shape
        if projection[1:] != shape[1:]:
            raise OutriderError(
                f"{self.path}: {PROJECTION} has shape {list(projection)}, and the target's embedding is {shape[1]} "
                "wide; it is another target's draft"
            )
        return (shape[0], projection[0])

    def unread(self, names: set[str]) -> list[str]:
        return self.draft.unread(names | {PROJECTION})

    def read(self, name: str, start: int, stop: int) -> NDArray[np.float32]:
        if name not in self._names:
            return self.draft.read(name, start, stop)
        rows = self.target.read(self._embedding, start, stop)
        return rows if self._projection is None else rows @ self._projection.T

    def quantized(self, name: str) -> Quantized | None:
        if name not in self._names:
            return self.draft.quantized(name)
        return self.target.quantized(self._embedding) if self._projection is None else None

    def tokenizer(self) -> TokenizerFiles:
        """The target's: the draft has none of its own, but knows which it was made for."""
        files = self.target.tokenizer()
        if self.config.get(VOCABULARY) != vocabulary_sha256(vocabulary(files, str(self.target.path))):
            raise OutriderError(f"{self.path} was distilled from a target with other tokens than {self.target.path}")
        return files


def vocabulary_sha256(vocab: dict[str, int]) -> str:
    return hashlib.sha256(json.dumps(sorted(vocab.items())).encode()).hexdigest()
