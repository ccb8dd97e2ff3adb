"""Text to tokens and back: tokenizer, chat template, and streaming that never shows half a character."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

from outrider.engines.bundle import TOKENIZER, Bundle
from outrider.engines.errors import OutriderError

Message = dict[str, str]
ROLES = ("system", "developer", "user", "assistant", "tool")

REPLACEMENT = "\ufffd"


class TextCodec:
    """A tokenizer of a bundle, by default its target's, and its chat template."""

    def __init__(self, bundle: Bundle, tokenizer: str = TOKENIZER) -> None:
        from tokenizers import Tokenizer

        self.tokenizer = Tokenizer.from_file(str(bundle.path(tokenizer)))
        self._template = bundle.chat_template
        self._special_tokens = bundle.manifest.special_tokens
        added = self.tokenizer.get_added_tokens_decoder()
        self._special_ids = frozenset(index for index, token in added.items() if token.special)
        self._byte_ids = frozenset(self.tokenizer.token_to_id(f"<0x{byte:02X}>") for byte in range(256)) - {None}
        self._alone: dict[int, str] = {}

    @property
    def has_template(self) -> bool:
        return self._template is not None

    def turn(self, text: str) -> str | list[Message]:
        """A prompt of one text: a user's message where the bundle has a chat template, else the text as it is."""
        return [{"role": "user", "content": text}] if self.has_template else text

    def encode(self, prompt: str | Sequence[Message]) -> list[int]:
        """Token ids of a text, or of a conversation through the chat template.

        Raises:
            OutriderError: the prompt is empty or not text, or the bundle has no chat template for messages.
        """
        if isinstance(prompt, bytes) or not isinstance(prompt, Sequence):
            raise OutriderError(f"the prompt is {prompt!r}; give a text, or a list of messages")
        plain = isinstance(prompt, str)
        text = prompt if isinstance(prompt, str) else self.render(prompt)
        check_utf8(text, "the prompt")
        # A batch of one: unlike ``encode``, it lets other threads run meanwhile.
        ids = self.tokenizer.encode_batch([text], add_special_tokens=plain)[0].ids
        if not ids:
            raise OutriderError("the prompt is empty; give at least one token of text")
        return list(ids)

    def render(self, messages: Sequence[Message]) -> str:
        """The conversation as text, up to where the assistant's answer begins."""
        if self._template is None:
            raise OutriderError("this bundle has no chat template; pass the prompt as a text instead of messages")
        _check_messages(messages)
        try:
            template = _sandbox().from_string(self._template)
            given = {"messages": list(messages), "tools": None, "documents": None, "add_generation_prompt": True}
            return str(template.render(**given, **self._special_tokens))
        except Exception as error:  # a template is a program of the checkpoint's maker, and may fail in any way
            raise OutriderError(f"the chat template refuses these messages: {error}") from None

    def word_ids(self, word: str) -> list[tuple[int, ...]]:
        """The token sequences of a word at the start of a text and inside of one, behind a space."""
        if not word.strip():
            raise OutriderError(f"the bad word {word!r} is empty; leave it out")
        check_utf8(word, "a bad word")
        texts = (word, f" {word}")
        return sorted({tuple(self.tokenizer.encode(text, add_special_tokens=False).ids) for text in texts})

    def decode(self, ids: Sequence[int]) -> str:
        text: str = self.tokenizer.decode(ids, skip_special_tokens=True)
        return text

    def is_special(self, token: int) -> bool:
        """Whether ``decode`` leaves the token out."""
        return token in self._special_ids

    def is_byte(self, token: int) -> bool:
        """Whether the token is a byte by name, which SentencePiece decoders judge only together with its neighbours."""
        return token in self._byte_ids

    def alone(self, token: int) -> str:
        """The text of a token by itself, which is asked for again and again."""
        text = self._alone.get(token)
        if text is None:
            text = self._alone[token] = self.decode([token])
        return text


class TextStream:
    """Text of a growing token sequence, in pieces that together equal the decoded whole.

    Only the tokens since the last but one piece are decoded again. (``tokenizers.decoders.DecodeStream`` raises where
    a SentencePiece decoder takes back a byte that was shown: "\\n" followed by half an emoji.)
    """

    def __init__(self, codec: TextCodec) -> None:
        self._codec = codec
        self._window: list[int] = []
        self._known = 0  # tokens at the start of the window whose text was shown
        self._known_text = ""

    def push(self, token: int) -> str:
        """The text that is certain now; "" while a character is not complete."""
        if self._codec.is_special(token):
            return ""
        self._window.append(token)
        text = self._codec.decode(self._window)
        if text.endswith(REPLACEMENT) or self._codec.is_byte(token) or text == self._known_text:
            return ""
        piece = text[len(self._known_text) :]
        del self._window[: self._known]
        self._known = len(self._window)
        self._known_text = self._codec.alone(token) if self._known == 1 else self._codec.decode(self._window)
        return piece

    def rest(self) -> str:
        """What is not certain yet, as it would be at the end: bytes that are no whole character."""
        return self._codec.decode(self._window)[len(self._known_text) :]

    def settle(self) -> str:
        """The rest, as if it were certain: other text than it would have had with what follows."""
        rest = self.rest()
        self._known, self._known_text = len(self._window), self._known_text + rest
        return rest


class StoppingStream:
    """A ``TextStream`` that ends before the first stop string.

    Text that may be the beginning of one is held back until it is certain, across any number of tokens. ``stopped``
    says that one was found; the stream gives no more text then.
    """

    def __init__(self, codec: TextCodec, stop_strings: Sequence[str] = ()) -> None:
        self._stream = TextStream(codec)
        self._stop_strings = tuple(stop_strings)
        self._held = ""
        self._unwatched = ""  # text of unwatched tokens that was not certain with the last of them
        self.stopped = False

    def push(self, token: int, watch: bool = True) -> str:
        """The text that is certain now. Without ``watch`` this token's text cannot be part of a stop string."""
        piece = self._stream.push(token)
        if not self._stop_strings:
            return piece
        if not watch:
            self._unwatched = self._stream.rest()
            return piece
        return self._release(piece)

    def finish(self) -> str:
        """The rest, held back or not yet whole."""
        if self.stopped:
            return ""
        piece = self._release(self._stream.rest())
        held, self._held = self._held, ""
        return piece + held

    def _release(self, piece: str) -> str:
        if self._unwatched and piece:
            pairs = enumerate(zip(self._unwatched, piece, strict=False))
            size = next((at for at, (one, other) in pairs if one != other), min(len(self._unwatched), len(piece)))
            self._unwatched = ""
            return piece[:size] + self._release(piece[size:])
        if not self._stop_strings:
            return piece
        text = self._held + piece
        found = [position for stop in self._stop_strings if (position := text.find(stop)) >= 0]
        if found:
            self.stopped = True
            self._held = ""
            return text[: min(found)]
        kept = max(_overlap(text, stop) for stop in self._stop_strings)
        self._held = text[len(text) - kept :]
        return text[: len(text) - kept]


def _overlap(text: str, stop: str) -> int:
    """The length of the longest end of ``text`` that ``stop`` begins with, short of the whole."""
    longest = min(len(text), len(stop) - 1)
    return next((size for size in range(longest, 0, -1) if stop.startswith(text[-size:])), 0)


def check_utf8(text: str, what: str) -> None:
    """Raises OutriderError naming ``what`` when bytes that are no text came through in it."""
    try:
        text.encode()
    except UnicodeEncodeError:
        raise OutriderError(f"{what} is not UTF-8 text; convert it first") from None


def _check_messages(messages: Sequence[Message]) -> None:
    """A template drops or misplaces what it does not know, without a word."""
    if not messages:
        raise OutriderError("the prompt is empty; give at least one message")
    for number, message in enumerate(messages, start=1):
        if not isinstance(message, Mapping) or not {"role", "content"} <= message.keys():
            raise OutriderError(f"message {number} is {message!r}; it must have a role and a content")
        if message["role"] not in ROLES:
            raise OutriderError(f"message {number} has the role {message['role']!r}; use one of {', '.join(ROLES)}")
        if not isinstance(message["content"], str):
            raise OutriderError(f"the content of message {number} is {message['content']!r}; it must be a text")


def _sandbox() -> Any:
    """What transformers offers to chat templates."""
    from jinja2 import TemplateError
    from jinja2.ext import Extension, loopcontrols
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class GenerationBlock(Extension):
        """``{% generation %}`` marks the assistant's words for training; here they are plain text."""

        tags = {"generation"}  # noqa: RUF012

        def parse(self, parser: Any) -> Any:
            next(parser.stream)
            return parser.parse_statements(("name:endgeneration",), drop_needle=True)

    def raise_exception(message: str) -> None:
        raise TemplateError(message)

    def to_json(value: Any, ensure_ascii: bool = False, **options: Any) -> str:
        return json.dumps(value, ensure_ascii=ensure_ascii, **options)

    extensions = [GenerationBlock, loopcontrols]
    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=extensions)
    environment.globals["raise_exception"] = raise_exception
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    environment.filters["tojson"] = to_json
    return environment
