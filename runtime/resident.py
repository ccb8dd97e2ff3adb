"""Rounds that stay on the device that computes the logits: its graph chooses, and only token ids come to the host.

Choices are those of ``Chooser.choose``: where rounding on the device could have changed one, its row of logits is
brought to the host and chosen from there. What the graph cannot decide (processors, grammars, filters that sort,
log-probabilities, other acceptance rules) takes the ordinary way: a copy of the logits a pass.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from time import perf_counter

import numpy as np
from numpy.typing import NDArray

from outrider.engines.engine import NO_CUTOFF, HeadInputs, Plan
from outrider.engines.round import DeviceRound
from outrider.runtime.accept import AcceptanceRule, Draft, ExactRule, agreement
from outrider.runtime.choose import Chooser, Logits, Row
from outrider.runtime.drafters import Draw, ModelSource
from outrider.runtime.sampling.filters import LARGEST_TEMPERATURE
from outrider.runtime.sampling.history import History
from outrider.runtime.sampling.noise import log_uniforms, stream_key
from outrider.runtime.sequence import CachedModel


def can_stay(chooser: Chooser, rule: AcceptanceRule) -> bool:
    """Whether a graph's heads decide what this request asks for."""
    options = chooser.options
    sorts = options.top_k or options.top_p < 1 or options.typical_p < 1
    plain = not chooser.processing and options.logprobs is None
    return plain and isinstance(rule, ExactRule) and (options.greedy or not sorts)


class ResidentLaw:
    """A request's law, as the heads of a device have it: temperature, cutoff, and noise by position."""

    def __init__(self, heads: HeadInputs, chooser: Chooser) -> None:
        self._heads = heads
        self._seed = chooser.seed
        self.greedy = chooser.options.greedy
        self._vocabulary = np.arange(heads.noise.shape[-1])
        if self.greedy:
            heads.set_law(1, NO_CUTOFF)
            heads.clear_noise()
        else:
            options = chooser.options
            assert options.temperature is not None
            cutoff = math.log(options.min_p) if options.min_p else NO_CUTOFF
            heads.set_law(min(options.temperature, LARGEST_TEMPERATURE), cutoff)

    def prepare(self, start: int, stop: int) -> None:
        """Noise of the tokens at positions ``start`` to ``stop`` - 1, unless the device has it."""
        if not self.greedy:
            for position in range(start, stop):
                self._heads.set_noise(position, stream_key(self._seed, position), self._gumbel)

    def rows(self, choices: Sequence[int], near: Sequence[int], logits: Callable[[int], Logits]) -> list[Row]:
        """Choices that stand; ``logits(i)`` where the host must choose, or say what is wrong with them."""
        return [
            np.int64(choice) if number == 1 or (self.greedy and number >= 0) else logits(index).copy()
            for index, (choice, number) in enumerate(zip(choices, near, strict=True))
        ]

    def _gumbel(self, key: int) -> NDArray[np.float32]:
        """-log(-log(u)): added to logits, the largest sum wins where log(u) / weight does (``filters.draw``)."""
        noise = log_uniforms(key, self._vocabulary)
        np.negative(noise, out=noise)
        np.log(noise, out=noise)
        np.negative(noise, out=noise)
        return noise.astype(np.float32)


class ResidentModel(CachedModel):
    """A model whose graph chooses, over the same cache as ``model``: the rows of ``extend`` are token ids.

    A row is its logits where the host must choose.
    """

    def __init__(self, model: CachedModel, law: ResidentLaw) -> None:
        super().__init__(model.engine, model.min_rows, model.exact)
        self.tokens = model.tokens  # one list for both: either finds the cache as the other left it
        self._law = law

    def _run(self, plan: Plan, ids: NDArray[np.int64], wanted: int) -> list[Row]:
        behind = self.length + ids.shape[1] + 1
        self._law.prepare(behind - wanted, behind)
        with self.timed():
            plan.submit(ids, self._lengths)
        self._law.prepare(behind, behind + wanted)  # while the device works: likely needed by the next pass
        with self.timed():
            choices, near = plan.choices()
        unwanted = choices.shape[1] - wanted
        return self._law.rows(
            choices[0, unwanted:].tolist(), near[0, unwanted:].tolist(), lambda row: plan.logits(unwanted + row)
        )

    @contextmanager
    def timed(self) -> Iterator[None]:
        """Count the time of the block as the engine's."""
        start = perf_counter()
        yield
        self.seconds += perf_counter() - start


class ResidentPair(ModelSource):
    """A drafter whose proposals come with the target's verdict: a whole round in one launch, read in one copy.

    ``propose`` runs the round, and ``target.extend``, asked for that very pass, has its rows already.

    Args:
        rounds: a round over the engines of the two models that drafts at least so many tokens.
        tiers: the numbers of tokens that there are rounds for.
    """

    def __init__(
        self,
        target: CachedModel,
        draft: CachedModel,
        law: ResidentLaw,
        rounds: Callable[[int], DeviceRound],
        tiers: Sequence[int],
    ) -> None:
        self.tiers = tiers
        self.target = _VerifiedModel(target, law)
        self._draft = ResidentModel(draft, law)
        self._law = law
        self._rounds = rounds
        self._agreed = 0
        # What a round goes on from by itself.
        self._device_state: tuple[DeviceRound, int, list[int]] | None = None
        self._steps = 0

    @property
    def passes(self) -> int:
        return self._steps + self._draft.passes

    @property
    def seconds(self) -> float:
        """Of the draft's prefill; its steps are part of the round, whose time is the target's."""
        return self._draft.seconds

    def begin(self) -> None:
        self._agreed = 0
        self._device_state = None

    def lacking(self, history: History) -> int:
        self._draft.keep(history.tokens, self._agreed)
        self._agreed = self._draft.length
        return len(history) - self._draft.length

    def propose(self, history: History, k: int, draw: Draw) -> Sequence[Draft]:
        tokens, length, draft = history.tokens, len(history), self._draft
        room = draft.max_length + 1 - length  # what is drafted past its own context is worth nothing
        if length < 2 or room < 1:
            return []
        device_round = self._rounds(k)
        size = device_round.k
        draft.keep(tokens, self._agreed)
        if draft.length < length - 2:
            draft.extend(tokens[draft.length : length - 2], 1)
        self._law.prepare(length, length + size + 1)
        if self._device_state != (device_round, length, tokens[-2:]):
            device_round.set_state(tokens[-2:], length)
        target = self.target
        with target.timed():
            device_round.launch()
        # While the device works: where the text stands then is not known, but its next positions are.
        self._law.prepare(length + size + 1, length + 2 * size + 2)
        with target.timed():
            result = device_round.read()
        self._steps += size
        draft.tokens[length - 2 :] = [*tokens[-2:], *result.drafts[:-1]]
        self._agreed = length
        accepted = agreement(result.drafts, result.choices)
        tail = [tokens[-1], *result.choices[: accepted + 1]][-2:]
        self._device_state = (device_round, length + accepted + 1, tail)
        rows = self._law.rows(result.choices, result.near, device_round.logits)
        target.verified = (length - 1, [tokens[-1], *result.drafts], rows)
        drafts = result.drafts[: min(k, room)]
        ends = (i for i, token in enumerate(drafts, start=1) if token in history.end_token_ids)
        return [Draft(token) for token in drafts[: next(ends, k)]]  # behind an end, nothing could stand


class _VerifiedModel(ResidentModel):
    """``verified`` is a pass that has run: the cache length before it, its tokens, and its rows."""

    verified: tuple[int, list[int], list[Row]] | None = None

    def extend(self, tokens: Sequence[int], logit_rows: int) -> Sequence[Row]:
        verified, self.verified = self.verified, None
        if verified is None or verified[0] != self.length or list(tokens) != verified[1][: len(tokens)]:
            return super().extend(tokens, logit_rows)
        self.tokens += tokens
        self.passes += 1
        return verified[2][: len(tokens)]
