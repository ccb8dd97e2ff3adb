"""Grammars by llguidance: which tokens may come next, moved token by token and rolled back."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from outrider.engines.errors import OutriderError


class GrammarCompiler:
    """The tokens of a bundle as llguidance sees them; made once (0.3 s), serves any number of requests.

    Args:
        tokenizer: the content of a ``tokenizer.json``.

    Raises:
        OutriderError: llguidance is not installed.
    """

    def __init__(self, tokenizer: str, vocab_size: int, eos_token_ids: tuple[int, ...]) -> None:
        try:
            import llguidance
        except ImportError:
            raise OutriderError(
                "grammars need llguidance; run `pip install llguidance` (or install outrider[grammar])"
            ) from None
        self._matcher = llguidance.LLMatcher
        self._vocab_size = vocab_size
        self._tokenizer = llguidance.LLTokenizer(tokenizer, n_vocab=vocab_size, eos_token=list(eos_token_ids) or None)
        # It marks these where a text may end; which tokens end a request is the request's business.
        self._eos_token_ids = np.array(self._tokenizer.eos_tokens, np.int64)

    def compile(
        self,
        *,
        json_schema: str | Mapping[str, Any] | bool | None = None,
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
        start = partial(self._matcher, self._tokenizer, grammar, log_level=0)
        state = GrammarState(start, self._vocab_size, self._eos_token_ids)
        if state.error:
            raise OutriderError(f"the {kind} grammar does not compile: {state.error}")
        try:
            possible = state.may_end or state.allowed().any()
        except OutriderError as error:
            raise OutriderError(f"the {kind} grammar allows no token: {error}") from None
        if not possible:
            raise OutriderError(f"the {kind} grammar allows no token; no text of this vocabulary fits it")
        return state


def _schema_text(schema: str | Mapping[str, Any] | bool) -> str:
    """The schema as JSON that was parsed here: llguidance passes over what follows an object."""

    def plain(value: object) -> object:
        if isinstance(value, Mapping):
            return dict(value)
        raise TypeError(f"{type(value).__name__} has no form in JSON")

    try:
        parsed = json.loads(schema) if isinstance(schema, str) else schema
        text = json.dumps(parsed, default=plain)
    except (ValueError, TypeError, RecursionError) as error:
        raise OutriderError(f"json_schema is not JSON: {error}; the command takes a file as @FILE") from None
    if not isinstance(parsed, (Mapping, bool)):
        raise OutriderError(f"json_schema is {text}; it must be a JSON object, true or false")
    return text


class GrammarState:
    """Where a text stands in its grammar.

    llguidance limits the work of a matcher, and what drafts made it look at counts: where it gives up, a new one is led
    through the tokens that stand, so that no draft can end a request.

    Args:
        start: makes a matcher that has seen no token.
    """

    def __init__(self, start: Callable[[], Any], vocab_size: int, eos_token_ids: NDArray[np.int64]) -> None:
        self._start = start
        self._matcher = start()
        self._tokens: list[int] = []
        self._vocab_size = vocab_size
        self._eos_token_ids = eos_token_ids

    @property
    def error(self) -> str:
        """Why llguidance gave up, in its own words and without the dump of its state; empty while it goes on."""
        return str(self._matcher.get_error()).partition("<state>")[0].strip()

    @property
    def may_end(self) -> bool:
        """Whether the text so far is whole."""
        return bool(self._matcher.is_accepting())

    @property
    def complete(self) -> bool:
        """Whether the text is whole and nothing can be added to it."""
        return bool(self._matcher.is_stopped()) and not self._matcher.is_error()

    def allowed(self) -> NDArray[np.bool_]:
        """bool ``[V]``: the tokens of text that may come next. Tokens that end a request are not among them.

        Raises:
            OutriderError: llguidance gives up.
        """
        if self.complete:
            return np.zeros(self._vocab_size, bool)
        bits = self._matcher.compute_bitmask()
        if self._matcher.is_error():
            self._restart()
            bits = self._matcher.compute_bitmask()
            if self._matcher.is_error():
                raise OutriderError(f"the grammar stopped: {self.error}")
        mask = np.unpackbits(np.frombuffer(bits, np.uint8), count=self._vocab_size, bitorder="little")
        allowed: NDArray[np.bool_] = mask.view(bool)
        allowed[self._eos_token_ids] = False
        return allowed

    def push(self, token: int) -> None:
        """Move on by a token that ``allowed`` names; where that fails, the state stays as it was.

        Raises:
            OutriderError: llguidance refuses the token, or gives up.
        """
        if not self._matcher.consume_token(token):
            self._restart()
            if not self._matcher.consume_token(token):
                message = self.error
                self._restart()
                raise OutriderError(f"the grammar stopped at token {token}: {message}")
        self._tokens.append(token)

    def rollback(self, count: int) -> None:
        """Take the last ``count`` tokens back."""
        if count:
            del self._tokens[-count:]
            if not self._matcher.rollback(count):
                self._restart()

    def _restart(self) -> None:
        self._matcher = self._start()
        if self._tokens and not self._matcher.consume_tokens(self._tokens):
            raise OutriderError(f"the grammar stopped: {self.error}")
