"""The only place where a token is chosen: for plain decoding, for every verify row, and for the draft."""

from __future__ import annotations

import math
from dataclasses import dataclass
from time import perf_counter

import numpy as np
from numpy.typing import NDArray

from outrider.engines.errors import OutriderError
from outrider.runtime.sampling.filters import Distribution, draw, filtered, largest
from outrider.runtime.sampling.history import History
from outrider.runtime.sampling.noise import Stream, stream_key, uniform
from outrider.runtime.sampling.options import SamplingOptions
from outrider.runtime.sampling.processors import Processors

Logits = NDArray[np.float32]
Row = Logits | np.int64  # float32 [V], or the token that a graph with heads chose from them


@dataclass(frozen=True)
class TokenLogprobs:
    """Natural log-probability of a token, and the ``(token id, log-probability)`` of the most likely ones."""

    logprob: float
    top: tuple[tuple[int, float], ...]


class Chooser:
    """Chooses the token behind ``history``, from a row of logits.

    What is chosen depends on the row, the history, the options and the seed: not on how many rows there were, nor on
    where drafts came from. Sampling is the Gumbel-max trick with noise keyed by (seed, position, token id).

    Args:
        seed: of 64 bits.
        vocab_size: V.

    ``seconds`` counts the time spent here.
    """

    def __init__(self, options: SamplingOptions, history: History, seed: int, vocab_size: int) -> None:
        self.options = options
        self.history = history
        self.seed = seed
        self.seconds = 0.0
        self._processors = Processors(options, history.end_token_ids, vocab_size)
        # Rows are worked on in arrays of our own: at one place in memory, whatever row of a pass they come from.
        self._row: Logits = np.empty(vocab_size, np.float32)
        self._shifted: Logits = np.empty(vocab_size, np.float32)

    @property
    def processing(self) -> bool:
        """Whether anything changes logits before the filters."""
        return self._processors.active

    def choose(self, row: Row) -> int:
        """The token for a row of float32 logits ``[V]``; of equally good ones the smallest id.

        Raises:
            OutriderError: the logits are no numbers, or no token is allowed.
        """
        if isinstance(row, np.int64):
            return int(row)
        start = perf_counter()
        if self.options.greedy:
            token, _ = self._best(self._processed(row))
        else:
            token = self._draw(self._distribution(row), Stream.TARGET, 0)
        self.seconds += perf_counter() - start
        return token

    def distribution(self, logits: Row) -> Distribution:
        """What ``choose`` draws from; one token when greedy."""
        assert not isinstance(logits, np.int64)  # rules that ask for it decide on the host
        start = perf_counter()
        distribution = self._distribution(logits)
        self.seconds += perf_counter() - start
        return distribution

    def draw(self, distribution: Distribution, stream: Stream = Stream.TARGET, round_number: int = 0) -> int:
        """A token of another distribution at this position, by its weights."""
        start = perf_counter()
        token = self._draw(distribution, stream, round_number)
        self.seconds += perf_counter() - start
        return token

    def uniform(self, stream: Stream, round_number: int) -> float:
        """A number in (0, 1) for this position."""
        return uniform(stream_key(self.seed, len(self.history), stream, round_number))

    def logprobs(self, logits: Row, token: int) -> TokenLogprobs | None:
        """Of ``token`` and the most likely ones at this row, as the options ask; None if they do not."""
        if self.options.logprobs is None or isinstance(logits, np.int64):
            return None
        start = perf_counter()
        if self.options.logprobs_mode == "raw":
            found = _logprobs(logits, token, self.options.logprobs)
        elif self.options.greedy:
            found = _logprobs(self._processed(logits), token, self.options.logprobs)
        else:
            found = _logprobs_of(self._distribution(logits), token, self.options.logprobs)
        self.seconds += perf_counter() - start
        return found

    def _processed(self, logits: Logits) -> Logits:
        if not self._processors.active:
            return logits
        np.copyto(self._row, logits)
        return self._processors.apply(self._row, self.history)

    def _best(self, logits: Logits) -> tuple[int, float]:
        token = int(logits.argmax())  # the position of a NaN, if there is one
        best = float(logits[token])
        if not math.isfinite(best):
            position = len(self.history)
            if best == -math.inf:
                raise OutriderError(f"no token is allowed at position {position}; loosen the masks of this request")
            raise OutriderError(f"the logits at position {position} hold {best}; check the model or the processors")
        return token, best

    def _distribution(self, logits: Logits) -> Distribution:
        logits = self._processed(logits)
        token, best = self._best(logits)
        options = self.options
        if options.greedy:
            return Distribution.one_hot(token)
        assert options.temperature is not None
        return filtered(
            logits,
            best,
            options.temperature,
            top_k=options.top_k,
            top_p=options.top_p,
            min_p=options.min_p,
            typical_p=options.typical_p,
            out=self._shifted,
        )

    def _draw(self, distribution: Distribution, stream: Stream, round_number: int) -> int:
        return draw(distribution, stream_key(self.seed, len(self.history), stream, round_number))


def _logprobs(logits: Logits, token: int, count: int) -> TokenLogprobs:
    best = np.float32(logits[int(logits.argmax())])
    shifted = logits - best
    normaliser = math.log(float(np.exp(shifted).sum()))
    top: list[tuple[int, float]] = []
    if count:
        ids = largest(shifted, count)
        ids = ids[np.argsort(-shifted[ids], kind="stable")[:count]]
        ids = ids[shifted[ids] > -np.inf]  # masked tokens have no probability
        top = [(int(index), float(shifted[index]) - normaliser) for index in ids]
    return TokenLogprobs(float(shifted[token]) - normaliser, tuple(top))


def _logprobs_of(distribution: Distribution, token: int, count: int) -> TokenLogprobs:
    probabilities = distribution.probabilities
    order = np.argsort(-probabilities, kind="stable")[:count]
    top = [(int(distribution.ids[index]), math.log(probabilities[index])) for index in order]
    probability = distribution.probability(token)
    return TokenLogprobs(math.log(probability) if probability else -math.inf, tuple(top))
