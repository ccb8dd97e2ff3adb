"""What a request asks for: everything that decides its text."""

from __future__ import annotations

import difflib
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from outrider.engines.errors import OutriderError
from outrider.runtime.text import check_utf8

# Below it a division by the temperature would leave float32's range; the best token has all of the probability.
GREEDY_BELOW = 1e-5

_LARGEST = 1e30  # of what is added to a logit: less than float32 holds, also after a division by the temperature

Processor = Callable[[Sequence[int], NDArray[np.float32]], NDArray[np.float32]]


@dataclass(frozen=True)
class SamplingOptions:
    """Options of a request, under the names of ``transformers.GenerationConfig`` where it has them, else of vLLM.

    The order is that of transformers: bias, penalties, masks, ``processors``, then temperature, top-k, top-p, min-p,
    typical-p.

    Attributes:
        max_new_tokens: at least 0; less are generated at an end, or where the context is full.
        min_new_tokens: until so many stand, no token ends the request and no stop string is looked for.
        temperature: None or below 1e-5 is greedy, 1 the model's own distribution.
        top_k: the k most likely tokens; 0 for all.
        top_p: the fewest most likely tokens with this mass; in (0, 1].
        min_p: tokens at least this times as likely as the best; in [0, 1].
        typical_p: tokens of most typical information with this mass; in (0, 1].
        seed: of 64 bits; the same seed gives the same text whatever drafts. None takes a fresh one.
        repetition_penalty: above 1 makes tokens that occurred, in the prompt too, less likely (Keskar et al. 2019).
        presence_penalty: subtracted from the logit of each token of the output.
        frequency_penalty: subtracted as many times as the token occurs in the output.
        penalize_prompt: True has all three penalties count the prompt, False none; None as said above.
        logit_bias: token id -> what is added to its logit.
        bad_words_ids: token sequences that must not occur.
        allowed_token_ids: the only tokens that may occur, ends aside; None for all.
        eos_token_id: tokens that end the request, in place of the bundle's.
        ignore_eos: generate on behind an end of sequence.
        stop_token_ids: further tokens that end the request.
        stop_strings: texts that end the request; the text ends before them.
        json_schema, regex, lark: a grammar that the text must follow (one of them, needs ``outrider[grammar]``).
        processors: pure functions of (tokens so far, float32 logits ``[V]`` to read or change during the call) ->
            logits ``[V]``; they are asked about drafts too, also about such as do not stand.
        logprobs: log-probabilities of each token and of the n most likely ones; None for none.
        logprobs_mode: ``raw``, of the model's own distribution, or ``processed``, of the one that is drawn from
            (when greedy: behind penalties, bias and masks).

    Raises:
        OutriderError: a value of the wrong kind or out of its range, or one that another makes void.
    """

    max_new_tokens: int = 128
    min_new_tokens: int = 0
    temperature: float | None = None
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    typical_p: float = 1.0
    seed: int | None = None
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    penalize_prompt: bool | None = None
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    bad_words_ids: Sequence[Sequence[int]] = ()
    allowed_token_ids: Collection[int] | None = None
    eos_token_id: int | Sequence[int] | None = None
    ignore_eos: bool = False
    stop_token_ids: Sequence[int] = ()
    stop_strings: Sequence[str] = ()
    json_schema: str | Mapping[str, Any] | bool | None = None
    regex: str | None = None
    lark: str | None = None
    processors: Sequence[Processor] = ()
    logprobs: int | None = None
    logprobs_mode: str = "raw"

    def __post_init__(self) -> None:
        _check_numbers(self)
        _check_tokens(self)
        _check_texts(self)
        if self.temperature is None:
            for name in ("top_k", "top_p", "min_p", "typical_p", "seed"):
                if getattr(self, name) != _DEFAULTS[name]:
                    raise OutriderError(f"{name} needs a temperature, decoding is greedy without; add temperature 1.0")

    @classmethod
    def parse(cls, options: Mapping[str, Any]) -> SamplingOptions:
        """From names and values.

        Raises:
            OutriderError: an unknown name, or a value that the class refuses.
        """
        return cls().replace(options)

    def replace(self, changes: Mapping[str, Any]) -> SamplingOptions:
        """These options, changed by names and values; raises as ``parse``."""
        for name in changes:
            if name not in _DEFAULTS:
                near = difflib.get_close_matches(name, _DEFAULTS, 1)
                hint = f"did you mean {near[0]}?" if near else f"there are {', '.join(_DEFAULTS)}"
                raise OutriderError(f"unknown option {name!r}; {hint}")
        return replace(self, **changes) if changes else self

    @property
    def greedy(self) -> bool:
        return self.temperature is None or self.temperature < GREEDY_BELOW

    @property
    def grammar(self) -> dict[str, Any]:
        """The grammar by its kind, or nothing."""
        kinds = ("json_schema", "regex", "lark")
        return {kind: getattr(self, kind) for kind in kinds if getattr(self, kind) is not None}

    @property
    def penalizing(self) -> bool:
        return (self.repetition_penalty, self.presence_penalty, self.frequency_penalty) != (1, 0, 0)

    def eos_token_ids(self, of_bundle: Sequence[int]) -> tuple[int, ...]:
        """The tokens that end the request with ``eos``: those asked for, else the bundle's; none if ignored."""
        if self.ignore_eos:
            return ()
        if self.eos_token_id is None:
            return tuple(of_bundle)
        given = self.eos_token_id
        return (given,) if isinstance(given, (int, np.integer)) else tuple(given)

    def check_vocabulary(self, vocab_size: int) -> None:
        """Raises OutriderError naming the first token id that does not exist."""
        named: dict[str, Collection[int]] = {
            "logit_bias": self.logit_bias,
            "bad_words_ids": [token for sequence in self.bad_words_ids for token in sequence],
            "allowed_token_ids": () if self.allowed_token_ids is None else self.allowed_token_ids,
            "eos_token_id": self.eos_token_ids(()),
            "stop_token_ids": self.stop_token_ids,
        }
        for name, ids in named.items():
            for token in ids:
                if not 0 <= token < vocab_size:
                    raise OutriderError(f"{name}: token id {token} does not exist; ids are 0 to {vocab_size - 1}")
        if self.logprobs is not None and self.logprobs > vocab_size:
            raise OutriderError(f"logprobs {self.logprobs} is more than the {vocab_size} tokens that there are")


_DEFAULTS = {entry.name: entry.default for entry in fields(SamplingOptions)}


def is_int(value: Any) -> bool:
    """Whether it is a whole number, numpy's included; True and False are none."""
    return isinstance(value, (int, np.integer)) and not isinstance(value, bool)


def _is_number(value: Any) -> bool:
    known = isinstance(value, (int, float, np.integer, np.floating)) and not isinstance(value, bool)
    try:
        return known and math.isfinite(value)
    except OverflowError:  # a whole number that no float holds
        return False


def _check_numbers(options: SamplingOptions) -> None:
    whole = ("whole number", is_int)
    number = ("number", _is_number)
    rules: list[tuple[str, tuple[str, Callable[[Any], bool]], Callable[[Any], bool], str]] = [
        ("max_new_tokens", whole, lambda value: value >= 0, "use 0 or more"),
        ("min_new_tokens", whole, lambda value: value >= 0, "use 0 or more"),
        ("temperature", number, lambda value: value >= 0, "use 0 (greedy) or more"),
        ("top_k", whole, lambda value: value >= 0, "use 0 (all tokens) or more"),
        ("top_p", number, lambda value: 0 < value <= 1, "use more than 0 and at most 1"),
        ("min_p", number, lambda value: 0 <= value <= 1, "use 0 to 1"),
        ("typical_p", number, lambda value: 0 < value <= 1, "use more than 0 and at most 1"),
        ("seed", whole, lambda value: 0 <= value < 2**64, "use 0 to 2**64 - 1"),
        ("repetition_penalty", number, lambda value: 1 / _LARGEST <= value <= _LARGEST, "use more than 0 (1 for none)"),
        ("presence_penalty", number, lambda value: abs(value) <= _LARGEST, "use what a logit can hold"),
        ("frequency_penalty", number, lambda value: abs(value) <= _LARGEST, "use what a logit can hold"),
        ("logprobs", whole, lambda value: value >= 0, "use 0 (the chosen token only) or more"),
    ]
    for name, (kind, is_kind), within, hint in rules:
        value = getattr(options, name)
        if value is None and _DEFAULTS[name] is None:
            continue
        if not is_kind(value):
            raise OutriderError(f"{name} is {value!r}; it must be a {kind}")
        if not within(value):
            raise OutriderError(f"{name} {value} is out of range; {hint}")
    for name in ("ignore_eos", "penalize_prompt"):
        if not isinstance(getattr(options, name), (bool, np.bool_, type(_DEFAULTS[name]))):
            raise OutriderError(f"{name} is {getattr(options, name)!r}; it must be true or false")
    if options.min_new_tokens > options.max_new_tokens:
        raise OutriderError(
            f"min_new_tokens {options.min_new_tokens} is more than max_new_tokens {options.max_new_tokens}"
        )


def _check_tokens(options: SamplingOptions) -> None:
    bias = options.logit_bias
    if not isinstance(bias, Mapping) or not all(is_int(key) and _is_number(bias[key]) for key in bias):
        raise OutriderError(f"logit_bias is {bias!r}; it must map token ids to numbers")
    for token, value in bias.items():
        if not abs(value) <= _LARGEST:
            raise OutriderError(f"logit_bias {value} of token {token} is out of range; use what a logit can hold")
    lists: dict[str, Any] = {"stop_token_ids": options.stop_token_ids}
    if options.eos_token_id is not None:
        given = options.eos_token_id
        lists["eos_token_id"] = [given] if is_int(given) else given
    if options.allowed_token_ids is not None:
        lists["allowed_token_ids"] = options.allowed_token_ids
    for name, ids in lists.items():
        if not _is_list(ids) or not all(map(is_int, ids)):
            raise OutriderError(f"{name} is {ids!r}; it must be a list of token ids")
    if options.allowed_token_ids is not None and not len(options.allowed_token_ids):
        raise OutriderError("allowed_token_ids is empty; name at least one token, or leave it out to allow all")
    words = options.bad_words_ids
    if not _is_list(words) or not all(_is_sequence(word) and len(word) and all(map(is_int, word)) for word in words):
        raise OutriderError(f"bad_words_ids is {words!r}; it must be a list of token sequences, none of them empty")


def _check_texts(options: SamplingOptions) -> None:
    stops = options.stop_strings
    if not _is_list(stops) or not all(isinstance(text, str) for text in stops):
        raise OutriderError(f"stop_strings is {stops!r}; it must be a list of texts")
    for text in stops:
        check_utf8(text, "a stop string")
    if "" in stops:
        raise OutriderError("stop_strings holds an empty text, which would stop every answer; leave it out")
    if options.logprobs_mode not in ("raw", "processed"):
        raise OutriderError(f"unknown logprobs_mode {options.logprobs_mode!r}; choose raw or processed")
    if len(options.grammar) > 1:
        raise OutriderError(f"{' and '.join(options.grammar)} are both given; a request follows one grammar")
    for kind, text in options.grammar.items():
        if not isinstance(text, str) and not (kind == "json_schema" and isinstance(text, (Mapping, bool))):
            raise OutriderError(f"{kind} is {text!r}; it must be a text")
        if isinstance(text, str):
            check_utf8(text, kind)
    if not _is_list(options.processors) or not all(map(callable, options.processors)):
        raise OutriderError(f"processors is {options.processors!r}; it must be a list of functions")


def _is_sequence(value: Any) -> bool:
    return _is_list(value) and hasattr(value, "__getitem__")


def _is_list(value: Any) -> bool:
    return isinstance(value, Collection) and not isinstance(value, (str, bytes, Mapping))
