"""Grammars by llguidance: which tokens may come next, moved token by token and rolled back."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from outrider.engines.errors import OutriderError


class GrammarCompiler:
    """The tokens of a bundle as llguidance sees them; made once (0.3 s), serves any number of requests.

    Args:
        tokenizer: a ``tokenizer.json``.

    Raises:
        OutriderError: llguidance is not installed.
    """

    def __init__(self, tokenizer: Path, vocab_size: int, eos_token_ids: tuple[int, ...]) -> None:
        try:
            import llguidance
        except ImportError:
            raise OutriderError("grammars need llguidance; run `pip install 'outrider[grammar]'`") from None
        self._matcher = llguidance.LLMatcher
        self._vocab_size = vocab_size
        self._tokenizer = llguidance.LLTokenizer(
            tokenizer.read_text(encoding="utf-8"), n_vocab=vocab_size, eos_token=list(eos_token_ids) or None
        )
        # It marks these where a text may end; which tokens end a request is the request's business.
        self._eos_token_ids = np.array(self._tokenizer.eos_tokens, np.int64)

    def compile(
        self,
        *,
        json_schema: str | Mapping[str, Any] | None = None,
        regex: str | None = None,
        lark: str | None = None,
    ) -> GrammarState:
        """The state before the first token, of the one grammar that is given.

        Raises:
            OutriderError: it does not compile (with llguidance's own message), or no text fits it.
        """
        if json_schema is not None:
            kind, grammar = "json_schema", self._matcher.grammar_from_json_schema(_schema_text(json_schema))
        elif regex is not None:
            kind, grammar = "regex", self._matcher.grammar_from_regex(regex)
        else:
            assert lark is not None
            kind, grammar = "lark", self._matcher.grammar_from_lark(lark)
        matcher = self._matcher(self._tokenizer, grammar, log_level=0)
        if matcher.is_error():
            raise OutriderError(f"the {kind} grammar does not compile: {_message(matcher)}")
        state = GrammarState(matcher, self._vocab_size, self._eos_token_ids)
        if not state.may_end and not state.allowed().any():
            raise OutriderError(f"the {kind} grammar allows no token; no text of this vocabulary fits it")
        return state


def _message(matcher: Any) -> str:
    """llguidance's own words, without the dump of its state behind them."""
    return str(matcher.get_error()).partition("<state>")[0].strip()


def _schema_text(schema: str | Mapping[str, Any]) -> str:
    """The schema as JSON that was parsed here: llguidance passes over what follows an object."""

    def plain(value: object) -> object:
        if isinstance(value, Mapping):
            return dict(value)
        raise TypeError(f"{type(value).__name__} has no form in JSON")

    try:
        parsed = json.loads(schema) if isinstance(schema, str) else dict(schema)
        text = json.dumps(parsed, default=plain)
    except (ValueError, TypeError, RecursionError) as error:
        raise OutriderError(f"json_schema is not JSON: {error}") from None
    if not isinstance(parsed, (dict, bool)):
        raise OutriderError(f"json_schema is {text}; it must be a JSON object")
    return text


class GrammarState:
    """Where a text stands in its grammar."""

    def __init__(self, matcher: Any, vocab_size: int, eos_token_ids: NDArray[np.int64]) -> None:
        self._matcher = matcher
        self._vocab_size = vocab_size
        self._eos_token_ids = eos_token_ids

    @property
    def may_end(self) -> bool:
        """Whether the text so far is whole."""
        return bool(self._matcher.is_accepting())

    @property
    def complete(self) -> bool:
        """Whether the text is whole and nothing can be added to it."""
        return bool(self._matcher.is_stopped())

    def allowed(self) -> NDArray[np.bool_]:
        """bool ``[V]``: the tokens of text that may come next. Tokens that end a request are not among them."""
        if self.complete:
            return np.zeros(self._vocab_size, bool)
        bits = np.frombuffer(self._matcher.compute_bitmask(), np.uint8)
        allowed = np.unpackbits(bits, count=self._vocab_size, bitorder="little").view(bool)
        allowed[self._eos_token_ids] = False
        return allowed

    def push(self, token: int) -> None:
        """Move on by a token that ``allowed`` names."""
        if not self._matcher.consume_token(token):
            raise OutriderError(f"the grammar stopped at token {token}: {_message(self._matcher)}")

    def rollback(self, count: int) -> None:
        """Take the last ``count`` tokens back."""
        if count and not self._matcher.rollback(count):
            raise OutriderError(f"the grammar cannot go back {count} tokens: {_message(self._matcher)}")
