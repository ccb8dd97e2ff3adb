"""The target writes many sequences at a time: one row of each a pass, a new one where one ends.

A sequence is the target's own text for its number: rows do not depend on their neighbours, and what is drawn depends
on the seed, the number and the position only.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray

from outrider.distill.starts import TURN_TEMPERATURE, Opening, Start, Starts
from outrider.engines.engine import Engine
from outrider.engines.errors import OutriderError
from outrider.runtime.sampling.noise import log_uniforms, stream_key

TOP_K = 32
_SHORTEST_TURN, _LONGEST_TURN = 3, 160  # tokens of a user's turn worth an answer
_SHORTEST_ANSWER = 4
_LEAST_ROOM = 32
_FREE_START = 16  # tokens of a plain text that are drawn at random, so that no two are the same
_LOOP, _LONGEST_PERIOD = 48, 16  # so many tokens that repeat this few end a sequence


@dataclass(frozen=True)
class Written:
    """A sequence behind the opening: ``ids`` int32 [n], and what the target found likely behind each of them:
    ``top_ids`` int32 [n, TOP_K] and their logits, float16, falling. Its answer begins at ``answer``.
    """

    number: int
    answer: int
    ids: NDArray[np.int32]
    top_ids: NDArray[np.int32] | NDArray[np.uint16]
    top_logits: NDArray[np.float16]

    def laws(self, first: int) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
        """Likely ids behind the tokens from ``first`` on, and their probabilities, [n - first, TOP_K] each."""
        law = np.exp(self.top_logits[first:].astype(np.float32))
        return self.top_ids[first:].astype(np.int64), law / law.sum(axis=1, keepdims=True)


@dataclass
class _Lane:
    """One of the sequences that are being written; ``fed`` of its ``tokens`` are in the cache."""

    number: int
    seed: int
    start: Start
    tokens: list[int]
    fed: int = 0
    answer: int | None = None  # where it begins
    top_ids: list[NDArray[np.int32]] = field(default_factory=list)
    top_logits: list[NDArray[np.float16]] = field(default_factory=list)

    @property
    def temperature(self) -> float:
        plain = self.answer == 0 and len(self.tokens) < _FREE_START
        return TURN_TEMPERATURE if self.answer is None or plain else self.start.temperature


class Writer:
    """Args:
    engine: of the target, with one sequence of the batch a lane.
    end_token_ids: what ends an answer.
    max_length: tokens of a sequence, the opening included.

    Raises:
        OutriderError: the opening leaves no room.
    """

    def __init__(
        self,
        engine: Engine,
        opening: Opening,
        starts: Starts,
        end_token_ids: frozenset[int],
        max_length: int,
        seed: int,
    ) -> None:
        self._engine = engine
        self._opening = opening
        self._starts = starts
        self._ends = end_token_ids
        self._turn_ends = end_token_ids | frozenset(opening.after[:1])
        self._room = max_length - len(opening.before)
        if self._room < _LEAST_ROOM:
            raise OutriderError(
                f"the target opens a text with {len(opening.before)} tokens, and --max-length {max_length} leaves no "
                "room behind them; give a larger one"
            )
        self._seed = seed

    def write(self, numbers: Iterator[int]) -> Iterator[Written]:
        """Sequences in the order in which they end; one that came to nothing is empty."""
        count = self._engine.batch
        first = len(self._opening.before)
        top_ids, top_logits = self._open()
        step = self._engine.plan(1, 1, exact=False)  # one row each, always: as good a choice as any
        lanes = [self._begin(next(numbers), top_ids, top_logits) for _ in range(count)]
        ids = np.zeros((count, 1), np.int64)
        lengths = np.zeros(count, np.int32)
        while True:
            for index, lane in enumerate(lanes):
                ids[index, 0] = lane.tokens[lane.fed]
                lengths[index] = first + lane.fed
            all_ids, all_logits = _top(step.run(ids, lengths)[:, 0])
            for index, lane in enumerate(lanes):
                lane.top_ids.append(all_ids[index])
                lane.top_logits.append(all_logits[index])
                lane.fed += 1
                if lane.fed < len(lane.tokens) or self._goes_on(lane, all_ids[index], all_logits[index]):
                    continue
                lanes[index] = self._begin(next(numbers), top_ids, top_logits)
                yield self._written(lane)

    def _open(self) -> tuple[NDArray[np.int32], NDArray[np.float16]]:
        """Fill the start of every lane's cache, where it stays; what is likely behind it."""
        before = self._opening.before
        count = self._engine.batch
        plan = self._engine.plan(max(len(before), 2), 1)
        rows = plan.run(np.tile(np.array(before, np.int64), (count, 1)), np.zeros(count, np.int32))
        top_ids, top_logits = _top(rows[:, 0])
        return top_ids[0], top_logits[0]

    def _begin(self, number: int, top_ids: NDArray[np.int32], top_logits: NDArray[np.float16]) -> _Lane:
        start = self._starts[number]
        lane = _Lane(number, stream_key(self._seed, number), start, list(start.forced))
        if start.forced or not self._opening.after:
            lane.answer = len(start.forced)
        if not lane.tokens:
            lane.tokens.append(self._draw(lane, top_ids, top_logits))
        return lane

    def _draw(self, lane: _Lane, top_ids: NDArray[np.int32], top_logits: NDArray[np.float16]) -> int:
        """A token of the likeliest by Gumbel-max, as the runtime draws."""
        if lane.temperature == 0:
            return int(top_ids[0])
        noise = -np.log(-log_uniforms(stream_key(lane.seed, len(lane.tokens)), top_ids.astype(np.int64)))
        return int(top_ids[np.argmax(top_logits / lane.temperature + noise)])

    def _goes_on(self, lane: _Lane, top_ids: NDArray[np.int32], top_logits: NDArray[np.float16]) -> bool:
        """Add the next token, or find that the sequence is at its end."""
        token = self._draw(lane, top_ids, top_logits)
        if lane.answer is None and token in self._turn_ends:
            after = self._opening.after
            lane.tokens += [token, *after[token == after[0] :]]
            lane.answer = len(lane.tokens)
        elif token in self._ends:
            return False
        else:
            lane.tokens.append(token)
        if lane.answer is None and len(lane.tokens) > _LONGEST_TURN:
            return False
        return len(lane.tokens) < self._room and not loops(lane.tokens)

    def _written(self, lane: _Lane) -> Written:
        answer, size = lane.answer, lane.fed
        if answer is None or size - answer < _SHORTEST_ANSWER or self._hardly_asked(lane, answer):
            answer = size = 0
        ids = np.array(lane.tokens[:size], np.int32)
        return Written(lane.number, answer, ids, np.stack(lane.top_ids)[:size], np.stack(lane.top_logits)[:size])

    def _hardly_asked(self, lane: _Lane, answer: int) -> bool:
        """Whether the target made up a turn of almost nothing."""
        return not lane.start.forced and 0 < answer < len(self._opening.after) + _SHORTEST_TURN


def _top(rows: NDArray[np.float32]) -> tuple[NDArray[np.int32], NDArray[np.float16]]:
    """The TOP_K likeliest ids of each row [B, V], and their logits less the best, which float16 holds well."""
    found = torch.topk(torch.from_numpy(rows), min(TOP_K, rows.shape[1]), dim=-1)
    values = found.values - found.values[:, :1]
    return found.indices.to(torch.int32).numpy(), values.to(torch.float16).numpy()


def loops(tokens: list[int]) -> bool:
    """Whether the last ``_LOOP`` tokens repeat a few; looked at every few tokens."""
    if len(tokens) < _LOOP or len(tokens) % 8:
        return False
    tail = tokens[-_LOOP:]
    return any(tail[period:] == tail[:-period] for period in range(1, _LONGEST_PERIOD + 1))
