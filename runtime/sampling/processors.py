"""What changes logits before the filters, in the order of transformers. Each works in place on one float32 ``[V]`` row.

Every function is given the tokens before the row it works on, and none after.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import numpy as np
from numpy.typing import NDArray

from outrider.engines.errors import OutriderError
from outrider.runtime.sampling.history import History, TokenCounts
from outrider.runtime.sampling.options import SamplingOptions

Logits = NDArray[np.float32]
_MASKED = np.float32(-1e30)  # some mask with the lowest number instead of -inf; a division by the temperature overflows


class Processors:
    """The processors that a request asks for; ``active`` is False when there are none."""

    def __init__(self, options: SamplingOptions, end_token_ids: Collection[int], vocab_size: int) -> None:
        self._options = options
        self._ends = np.array(sorted(end_token_ids), np.int64)
        self._bias_ids = np.array(list(options.logit_bias), np.int64)
        self._bias = np.array(list(options.logit_bias.values()), np.float32)
        self._forbidden = np.array([words[0] for words in options.bad_words_ids if len(words) == 1], np.int64)
        self._bad_words = [tuple(words) for words in options.bad_words_ids if len(words) > 1]
        self._outside: NDArray[np.bool_] | None = None
        if options.allowed_token_ids is not None:
            self._outside = np.ones(vocab_size, bool)
            self._outside[list(options.allowed_token_ids)] = False
            self._outside[self._ends] = False
        self.active = bool(
            options.penalizing
            or options.logit_bias
            or len(options.bad_words_ids)
            or options.allowed_token_ids is not None
            or options.min_new_tokens
            or len(options.processors)
            or options.grammar
        )

    def apply(self, logits: Logits, history: History) -> Logits:
        """The processed row: ``logits`` itself, or what a custom processor made of it.

        Raises:
            OutriderError: a custom processor returns something else than ``[V]`` logits.
        """
        options = self._options
        logits[self._bias_ids] += self._bias
        if options.penalizing:
            self._penalize(logits, history)
        logits[self._forbidden] = -np.inf
        mask_bad_words(logits, history.tokens, self._bad_words)
        if self._outside is not None:
            logits[self._outside] = -np.inf
        if history.output_length < options.min_new_tokens:
            logits[self._ends] = -np.inf
        if history.grammar is not None:
            allowed = history.grammar.allowed()
            allowed[self._ends] = history.grammar.may_end
            logits[~allowed] = -np.inf
        for processor in options.processors:
            logits = _custom(processor(tuple(history.tokens), logits), logits, processor)
        return logits

    def _penalize(self, logits: Logits, history: History) -> None:
        options, everywhere, in_output = self._options, history.all_counts, history.output_counts
        assert everywhere is not None and in_output is not None
        repeated = in_output if options.penalize_prompt is False else everywhere
        counted = everywhere if options.penalize_prompt else in_output
        penalize_repetition(logits, repeated, options.repetition_penalty)
        penalize_counts(logits, counted, options.presence_penalty, options.frequency_penalty)


def penalize_repetition(logits: Logits, occurred: TokenCounts, penalty: float) -> None:
    """Divide positive logits of tokens that occurred, multiply negative ones (Keskar et al., arXiv 1909.05858)."""
    if penalty != 1:
        ids, by = occurred.ids, np.float32(penalty)
        scores = logits[ids]
        logits[ids] = np.where(scores < 0, scores * by, scores / by)


def penalize_counts(logits: Logits, occurred: TokenCounts, presence: float, frequency: float) -> None:
    """Subtract ``presence`` once and ``frequency`` for each occurrence (OpenAI's API reference)."""
    if presence or frequency:
        logits[occurred.ids] -= (presence + frequency * occurred.counts).astype(np.float32)


def mask_bad_words(logits: Logits, tokens: Sequence[int], words: Sequence[tuple[int, ...]]) -> None:
    """-inf for the last token of each sequence whose beginning the text ends with."""
    for word in words:
        start = len(tokens) - len(word) + 1
        if start >= 0 and tuple(tokens[start:]) == word[:-1]:
            logits[word[-1]] = -np.inf


def _custom(result: object, given: Logits, processor: object) -> Logits:
    name = getattr(processor, "__name__", type(processor).__name__)
    if result is None:
        raise OutriderError(f"processor {name} returned nothing; it must return the logits")
    try:
        logits: Logits = np.array(result, np.float32)
    except (TypeError, ValueError):
        raise OutriderError(f"processor {name} returned {type(result).__name__} instead of logits") from None
    if logits.shape != given.shape:
        raise OutriderError(f"processor {name} returned logits of shape {logits.shape} instead of {given.shape}")
    logits[logits < _MASKED] = -np.inf
    return logits
