"""Text to tokens and back: tokenizer, chat template, and streaming that never shows half a character."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from outrider.engines.bundle import TOKENIZER, Bundle
from outrider.engines.errors import OutriderError

Message = dict[str, str]


class TextCodec:
    """The tokenizer and chat template of a bundle."""

    def __init__(self, bundle: Bundle) -> None:
        from tokenizers import Tokenizer

        self.tokenizer = Tokenizer.from_file(str(bundle.path(TOKENIZER)))
        self._template = bundle.chat_template
        self._special_tokens = bundle.manifest.special_tokens

    def encode(self, prompt: str | Sequence[Message]) -> list[int]:
        """Token ids of a text, or of a conversation through the chat template.

        Raises:
            OutriderError: the prompt is empty, or the bundle has no chat template for messages.
        """
        if isinstance(prompt, str):
            ids = self.tokenizer.encode(prompt).ids
        else:
            ids = self.tokenizer.encode(self.render(prompt), add_special_tokens=False).ids
        if not ids:
            raise OutriderError("the prompt is empty; give at least one token of text")
        return list(ids)

    def render(self, messages: Sequence[Message]) -> str:
        """The conversation as text, up to where the assistant's answer begins."""
        if self._template is None:
            raise OutriderError("this bundle has no chat template; pass the prompt as a text instead of messages")
        if not messages:
            raise OutriderError("the prompt is empty; give at least one message")
        from jinja2 import TemplateError

        try:
            template = _sandbox().from_string(self._template)
            return template.render(messages=list(messages), add_generation_prompt=True, **self._special_tokens)
        except TemplateError as error:
            raise OutriderError(f"the chat template refuses these messages: {error}") from None

    def decode(self, ids: Sequence[int]) -> str:
        return str(self.tokenizer.decode(list(ids), skip_special_tokens=True))


class TextStream:
    """Text of a growing token sequence, in pieces that together equal the decoded whole."""

    def __init__(self, codec: TextCodec) -> None:
        from tokenizers.decoders import DecodeStream

        self._codec = codec
        self._stream = DecodeStream(skip_special_tokens=True)
        self._shown = 0

    def push(self, token: int) -> str:
        """The text that is certain now; "" while a character is not complete."""
        piece = self._stream.step(self._codec.tokenizer, token) or ""
        self._shown += len(piece)
        return piece

    def finish(self, ids: Sequence[int]) -> str:
        """The rest: bytes that never became a whole character."""
        return self._codec.decode(ids)[self._shown :]


def _sandbox() -> Any:
    from jinja2.ext import loopcontrols
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    def raise_exception(message: str) -> None:
        from jinja2 import TemplateError

        raise TemplateError(message)

    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols])
    environment.globals["raise_exception"] = raise_exception
    return environment
