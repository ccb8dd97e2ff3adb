"""What clients get: OpenAI's answers, whole or in pieces."""

from __future__ import annotations

import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, NamedTuple

from outrider.runtime.generation import GenerationResult, StreamedToken
from outrider.runtime.stats import SourceStats
from outrider.runtime.text import REPLACEMENT, TextCodec

_FINISH = {"eos": "stop", "stop": "stop", "grammar": "stop", "length": "length"}


class Finished(NamedTuple):
    """A choice that came to its end; ``prompt`` is what its text is to begin with, "" for nothing."""

    result: GenerationResult
    tokens: Sequence[StreamedToken]
    prompt: str


@dataclass(frozen=True)
class Answer:
    """The head of all objects of one request; ``chat`` says which of the two kinds."""

    model: str
    chat: bool
    with_logprobs: bool
    with_tokens: bool
    codec: TextCodec
    created: int = field(default_factory=lambda: int(time.time()))
    number: str = field(default_factory=lambda: uuid.uuid4().hex)

    def whole(self, finished: Sequence[Finished], per_prompt: int) -> dict[str, Any]:
        choices = []
        for index, (result, tokens, prompt) in enumerate(finished):
            text = prompt + result.text
            content = (
                {"message": {"role": "assistant", "content": text, "refusal": None}} if self.chat else {"text": text}
            )
            choices.append(self._choice(index, content, tokens, 0, finish_reason(result)))
        kind = "chat.completion" if self.chat else "text_completion"
        return self._head(kind, choices) | {"usage": usage([one.result for one in finished], per_prompt)}

    def first(self, index: int, prompt: str) -> dict[str, Any] | None:
        """Before any token of a choice."""
        if self.chat:
            return self._chunk([self._choice(index, {"delta": {"role": "assistant", "content": ""}}, [], 0, None)])
        return self._chunk([self._choice(index, {"text": prompt}, [], 0, None)]) if prompt else None

    def piece(self, index: int, tokens: Sequence[StreamedToken], offset: int) -> dict[str, Any]:
        """Some tokens of a choice; ``offset`` are the characters before them."""
        text = "".join(token.text for token in tokens)
        content = {"delta": {"content": text}} if self.chat else {"text": text}
        return self._chunk([self._choice(index, content, tokens, offset, None)])

    def last(self, index: int, reason: str) -> dict[str, Any]:
        """Behind all tokens of a choice."""
        content: dict[str, Any] = {"delta": {}} if self.chat else {"text": ""}
        return self._chunk([self._choice(index, content, [], 0, reason)])

    def usage(self, results: Sequence[GenerationResult], per_prompt: int) -> dict[str, Any]:
        """Behind all choices."""
        return self._chunk([]) | {"usage": usage(results, per_prompt)}

    def _chunk(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return self._head("chat.completion.chunk" if self.chat else "text_completion", choices)

    def _head(self, kind: str, choices: list[dict[str, Any]]) -> dict[str, Any]:
        prefix = "chatcmpl" if self.chat else "cmpl"
        return {
            "id": f"{prefix}-{self.number}",
            "object": kind,
            "created": self.created,
            "model": self.model,
            "choices": choices,
        }

    def _choice(
        self, index: int, content: dict[str, Any], tokens: Sequence[StreamedToken], offset: int, reason: str | None
    ) -> dict[str, Any]:
        choice = {"index": index, **content, "logprobs": None, "finish_reason": reason}
        if self.with_logprobs and tokens:
            choice["logprobs"] = self._chat_logprobs(tokens) if self.chat else self._logprobs(tokens, offset)
        if self.with_tokens:
            choice["tokens"] = [
                {"id": token.token_id, "text": token.text, "origin": token.origin.value} for token in tokens
            ]
        return choice

    def _chat_logprobs(self, tokens: Sequence[StreamedToken]) -> dict[str, Any]:
        content = []
        for token in tokens:
            assert token.logprobs is not None
            top = [self._named(other, logprob) for other, logprob in token.logprobs.top]
            content.append(self._named(token.token_id, token.logprobs.logprob) | {"top_logprobs": top})
        return {"content": content, "refusal": None}

    def _logprobs(self, tokens: Sequence[StreamedToken], offset: int) -> dict[str, Any]:
        offsets = []
        for token in tokens:
            offsets.append(offset)
            offset += len(token.text)
        known = [token.logprobs for token in tokens if token.logprobs is not None]
        return {
            "tokens": [self.codec.alone(token.token_id) for token in tokens],
            "token_logprobs": [finite(entry.logprob) for entry in known],
            "top_logprobs": [
                {self.codec.alone(other): finite(logprob) for other, logprob in entry.top} for entry in known
            ],
            "text_offset": offsets,
        }

    def _named(self, token: int, logprob: float) -> dict[str, Any]:
        text = self.codec.alone(token)
        known = REPLACEMENT not in text  # a part of a character has bytes, but no text that tells them
        return {"token": text, "logprob": finite(logprob), "bytes": list(text.encode()) if known else None}


def finish_reason(result: GenerationResult) -> str:
    return _FINISH.get(result.finish_reason, result.finish_reason)


def finite(logprob: float) -> float:
    """JSON has no infinity: what cannot occur is as unlikely as OpenAI says it."""
    return max(logprob, -9999.0)


def usage(results: Sequence[GenerationResult], per_prompt: int) -> dict[str, Any]:
    """Tokens of a request; drafts under OpenAI's names of predicted tokens, which is what they are.

    ``rounds_by_k`` is no part of OpenAI's: where K was chosen in each round, how many rounds had each.

    Args:
        per_prompt: how many results each prompt has, one behind the other.
    """
    stats = [result.stats for result in results]
    prompt = sum(entry.num_prompt_tokens for entry in stats[::per_prompt])
    completion = sum(entry.num_output_tokens for entry in stats)
    accepted = sum(entry.num_accepted_draft_tokens for entry in stats)
    drafted = sum(entry.num_draft_tokens for entry in stats)
    chosen = SourceStats()
    for source in chain.from_iterable(entry.sources.values() for entry in stats):
        chosen.add(source)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": sum(entry.num_cached_tokens for entry in stats[::per_prompt])},
        "completion_tokens_details": {
            "accepted_prediction_tokens": accepted,
            "rejected_prediction_tokens": drafted - accepted,
        },
        "rounds_by_k": {str(k): chosen.rounds_by_k[k] for k in sorted(chosen.rounds_by_k)},
    }
