"""What clients send: OpenAI's requests, and of them the options that decide the text.

Fields of OpenAI that are not served are refused by name, never dropped; further ones have the names that vLLM gives
them where it has them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, StrictBool, StrictFloat, StrictInt, StrictStr, model_validator
from pydantic_core import PydanticCustomError

from outrider.runtime.sampling.options import SamplingOptions
from outrider.runtime.text import Message
from outrider.serve.errors import invalid

Number = StrictInt | StrictFloat
TokenId = Annotated[StrictStr, Field(pattern=r"^[0-9]{1,9}$")]
Text = Annotated[StrictStr, Field(min_length=1)]
Tokens = Annotated[list[StrictInt], Field(min_length=1)]
_DEFAULT_TOKENS = 16  # of a completion, as OpenAI has it
_MOST_STOPS = 32  # each is looked for behind each token


def _conflict(field: str, message: str) -> PydanticCustomError:
    """A field does not go with another."""
    return PydanticCustomError("conflict", "{message}", {"param": field, "message": message})


class _Body(BaseModel):
    model_config = ConfigDict(extra="forbid")

    @model_validator(mode="before")
    @classmethod
    def _without_nulls(cls, given: Any) -> Any:
        """Null is as good as left out: clients send back what they got, and name what they do not use."""
        return {name: value for name, value in given.items() if value is not None} if isinstance(given, dict) else given


class TextPart(_Body):
    type: Literal["text"]
    text: StrictStr


class ChatMessage(_Body):
    role: Literal["system", "developer", "user", "assistant"]
    content: StrictStr | list[TextPart]
    name: StrictStr | None = None

    def plain(self) -> Message:
        """As the template takes it."""
        parts = self.content if isinstance(self.content, list) else [TextPart(type="text", text=self.content)]
        message = {"role": self.role, "content": "".join(part.text for part in parts)}
        return message if self.name is None else message | {"name": self.name}


class JsonSchema(_Body):
    name: StrictStr
    description: StrictStr | None = None
    schema_: dict[str, Any] | StrictBool = Field(alias="schema")
    strict: StrictBool | None = None


class ResponseFormat(_Body):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None

    @model_validator(mode="after")
    def _whole(self) -> ResponseFormat:
        if self.type == "json_schema" and self.json_schema is None:
            raise _conflict("json_schema", "type json_schema needs a json_schema with name and schema")
        if self.type != "json_schema" and self.json_schema is not None:
            raise _conflict("json_schema", "json_schema goes with type json_schema, and with no other")
        return self


class StreamOptions(_Body):
    include_usage: StrictBool = False


class _Generation(_Body):
    """What both kinds of requests have. The fields from ``top_k`` on are no part of OpenAI's."""

    model: StrictStr | None = None
    stream: StrictBool = False
    stream_options: StreamOptions | None = None
    temperature: Annotated[Number, Field(ge=0, le=2)] | None = None
    top_p: Annotated[Number, Field(gt=0, le=1)] | None = None
    n: Annotated[StrictInt, Field(ge=1, le=16)] | None = None
    stop: Text | Annotated[list[Text], Field(max_length=_MOST_STOPS)] | None = None
    seed: Annotated[StrictInt, Field(ge=-(2**63), lt=2**63)] | None = None
    presence_penalty: Annotated[Number, Field(ge=-2, le=2)] | None = None
    frequency_penalty: Annotated[Number, Field(ge=-2, le=2)] | None = None
    logit_bias: dict[TokenId, Annotated[Number, Field(ge=-100, le=100)]] | None = None
    user: StrictStr | None = None
    response_format: ResponseFormat | None = None
    top_k: Annotated[StrictInt, Field(ge=0)] | None = None
    min_p: Annotated[Number, Field(ge=0, le=1)] | None = None
    typical_p: Annotated[Number, Field(gt=0, le=1)] | None = None
    repetition_penalty: Annotated[Number, Field(gt=0)] | None = None
    min_tokens: Annotated[StrictInt, Field(ge=0)] | None = None
    stop_token_ids: list[StrictInt] | None = None
    ignore_eos: StrictBool | None = None
    num_draft_tokens: Annotated[StrictInt, Field(ge=0)] | None = Field(
        None, description="K; 0 is plain decoding, none has it chosen in each round."
    )
    drafter: Literal["model", "ngram", "cascade", "none"] | None = None
    return_tokens: StrictBool = Field(False, description="Add each token's id, text and origin to its choice.")

    @model_validator(mode="after")
    def _streamed(self) -> _Generation:
        if self.stream_options is not None and not self.stream:
            raise _conflict("stream_options", "stream_options goes with stream: true")
        return self

    def _options(self, max_new_tokens: int, logprobs: int | None) -> dict[str, Any]:
        """Options by name, those that were given; OpenAI's default temperature is 1."""
        if (self.min_tokens or 0) > max_new_tokens:
            message = f"min_tokens {self.min_tokens} is more than the {max_new_tokens} tokens that there can be"
            raise invalid(message, param="min_tokens")
        temperature = 1.0 if self.temperature is None else float(self.temperature)
        options: dict[str, Any] = {
            "temperature": temperature,
            "top_p": self.top_p,
            "top_k": self.top_k,
            "min_p": self.min_p,
            "typical_p": self.typical_p,
            "seed": None if self.seed is None else self.seed % 2**64,
            "presence_penalty": self.presence_penalty,
            "frequency_penalty": self.frequency_penalty,
            "repetition_penalty": self.repetition_penalty,
            "logit_bias": self.logit_bias and {int(token): bias for token, bias in self.logit_bias.items()},
            "stop_strings": [self.stop] if isinstance(self.stop, str) else self.stop,
            "stop_token_ids": self.stop_token_ids,
            "ignore_eos": self.ignore_eos,
            "min_new_tokens": self.min_tokens,
            "max_new_tokens": max_new_tokens,
            "logprobs": logprobs,
            "json_schema": _schema(self.response_format),
        }
        return {name: value for name, value in options.items() if value is not None}

    def nth_options(self, index: int, of: Mapping[str, Any]) -> SamplingOptions:
        """Of the n-th choice: each has a seed of its own."""
        seed = of.get("seed")
        return SamplingOptions.parse({**of, "seed": (seed + index) % 2**64} if seed is not None else of)


class ChatRequest(_Generation):
    messages: Annotated[list[ChatMessage], Field(min_length=1)]
    max_tokens: Annotated[StrictInt, Field(ge=1)] | None = None
    max_completion_tokens: Annotated[StrictInt, Field(ge=1)] | None = None
    logprobs: StrictBool | None = None
    top_logprobs: Annotated[StrictInt, Field(ge=0, le=20)] | None = None

    @model_validator(mode="after")
    def _consistent(self) -> ChatRequest:
        if self.top_logprobs is not None and not self.logprobs:
            raise _conflict("top_logprobs", "top_logprobs goes with logprobs: true")
        if self.max_tokens is not None and self.max_completion_tokens is not None:
            raise _conflict("max_tokens", "give max_completion_tokens or max_tokens, not both")
        return self

    def prompts(self) -> list[list[Message]]:
        return [[message.plain() for message in self.messages]]

    def options(self, room: int) -> dict[str, Any]:
        """Options by name; without a limit, as many tokens as fit."""
        asked = self.max_completion_tokens or self.max_tokens or room
        return self._options(asked, (self.top_logprobs or 0) if self.logprobs else None)


class CompletionRequest(_Generation):
    prompt: StrictStr | Tokens | Annotated[list[StrictStr] | list[Tokens], Field(min_length=1)]
    max_tokens: Annotated[StrictInt, Field(ge=0)] | None = None
    logprobs: Annotated[StrictInt, Field(ge=0, le=20)] | None = None
    echo: StrictBool | None = None

    @model_validator(mode="after")
    def _consistent(self) -> CompletionRequest:
        if self.echo and self.logprobs is not None:
            raise _conflict("echo", "log-probabilities of the prompt are not served; leave echo or logprobs out")
        return self

    def prompts(self) -> list[str | list[int]]:
        """OpenAI takes one prompt or several."""
        if isinstance(self.prompt, str):
            return [self.prompt]
        if isinstance(self.prompt[0], int):
            return [self.prompt]
        return [*self.prompt]

    def options(self, room: int) -> dict[str, Any]:
        """Options by name."""
        return self._options(_DEFAULT_TOKENS if self.max_tokens is None else self.max_tokens, self.logprobs)


def _schema(given: ResponseFormat | None) -> Any:
    if given is None or given.type == "text":
        return None
    return {"type": "object"} if given.json_schema is None else given.json_schema.schema_
