"""Written text as batches: sequences packed into rows of one length, none of which sees its neighbours."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from outrider.distill.writer import Written
from outrider.export.spec import DecoderSpec


class Batch(NamedTuple):
    """``ids`` int64 [B, T]; ``positions`` int64 [B, T], the place of each in its sequence;
    ``seen`` bool [B, T, T], which position sees which.

    Labels are those of answers only: ``places`` int64 [N], positions in the flat [B * T], with the rows of the reduced
    head that the target found likely behind them, ``rows`` int64 [N, k], and their probabilities ``law`` float32
    [N, k]; what the head has no row for has row 0 and probability 0. ``choices`` int64 [N] is the row of the
    likeliest token, -1 where the head has none.
    """

    ids: Tensor
    positions: Tensor
    seen: Tensor
    places: Tensor
    rows: Tensor
    law: Tensor
    choices: Tensor


Packed = list[list[Written]]  # the sequences of each row of a batch


class Batches:
    """Args:
    opening: tokens before each sequence.
    spec: of the draft, with its reduced head.
    row_length, rows: T and B.
    """

    def __init__(
        self,
        written: Sequence[Written],
        opening: Sequence[int],
        spec: DecoderSpec,
        row_length: int,
        rows: int,
    ) -> None:
        self._written = written
        self._opening = np.array(opening, np.int64)
        assert spec.draft_vocab is not None
        self._row_of = np.full(spec.vocab_size, -1, np.int64)
        self._row_of[spec.draft_vocab] = np.arange(spec.head_size)
        self._row_length = row_length
        self._rows = rows

    def __len__(self) -> int:
        """Sequences."""
        return len(self._written)

    def packed(self, order: Iterable[int]) -> Iterator[Packed]:
        """Sequences in this order, row by row of each batch; the last rows may be less full."""
        packed: Packed = []
        used = self._row_length
        for number in order:
            size = len(self._opening) + len(self._written[number].ids)
            if used + size > self._row_length:
                if len(packed) == self._rows:
                    yield packed
                    packed = []
                packed.append([])
                used = 0
            packed[-1].append(self._written[number])
            used += size
        yield packed

    def batch(self, packed: Packed) -> Batch:
        first, length = len(self._opening), self._row_length
        ids = np.zeros((len(packed), length), np.int64)
        segments = np.zeros((len(packed), length), np.int64)
        positions = np.zeros((len(packed), length), np.int64)
        places, top_ids, laws = [], [], []
        for row, sequences in enumerate(packed):
            start = 0
            for segment, one in enumerate(sequences, start=1):
                stop = start + first + len(one.ids)
                ids[row, start : start + first] = self._opening
                ids[row, start + first : stop] = one.ids
                segments[row, start:stop] = segment
                positions[row, start:stop] = np.arange(stop - start)
                # The last token before an answer is the first whose successor is the answer's.
                skipped = max(one.answer - 1, 0)
                places.append(np.arange(start + first + skipped, stop) + row * length)
                likely, law = one.laws(skipped)
                top_ids.append(likely)
                laws.append(law)
                start = stop
        rows = self._row_of[np.concatenate(top_ids)]
        law = np.where(rows >= 0, np.concatenate(laws), 0)
        parts = torch.from_numpy(segments)
        seen = (parts[:, :, None] == parts[:, None, :]) & torch.ones(length, length, dtype=torch.bool).tril()
        return Batch(
            torch.from_numpy(ids),
            torch.from_numpy(positions),
            seen,
            torch.from_numpy(np.concatenate(places)),
            torch.from_numpy(np.maximum(rows, 0)),
            torch.from_numpy(law.astype(np.float32)),
            torch.from_numpy(rows[:, 0].copy()),
        )
