"""Committed text in the vocabulary of a draft with another tokenizer, and drafted text in the target's.

The string-level way of Timor et al., "Accelerating LLM Inference with Lossless Speculative Decoding Algorithms for
Heterogeneous Vocabularies" (arXiv 2502.05202); transformers calls it universal assisted decoding. What comes out of it
is only ever proposed, so that a text which does not survive the way there and back costs acceptance and nothing else.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import takewhile
from typing import TYPE_CHECKING

from outrider.runtime.text import REPLACEMENT, TextCodec, TextStream

if TYPE_CHECKING:
    from tokenizers import Encoding, Tokenizer

_MARK = "\ue000"  # of private use: it merges with nothing, and no vocabulary puts a space behind it
_KEPT = 2  # target tokens that a window keeps when it is cut,
_WINDOW = 8  # how many it has before it is,
_LONGEST = 64  # and how many it has at most


class Translation:
    """Follows the target's tokens of one request, and says their text in the draft's vocabulary.

    Only a window of the text is encoded anew: it begins where a target token and a draft token end together, if it can
    at a space, and is cut when it has grown long. What lies before it is settled. The target's special tokens are no
    text: the draft does not see them, and they settle what lies before them.

    Args:
        draft: a codec of its own, which is set up here to take the names of special tokens for the text they are.
    """

    def __init__(self, target: TextCodec, draft: TextCodec) -> None:
        self._target, self._draft = target, draft
        encoding = draft.tokenizer.encode("a")
        marked = zip(encoding.ids, encoding.special_tokens_mask, strict=True)
        self._prefix = [token for token, _ in takewhile(lambda entry: entry[1], marked)]  # as <bos>
        draft.tokenizer.encode_special_tokens = True
        draft.tokenizer.post_processor = None  # some move offsets behind spaces
        self._to_target, self._to_draft = _Encoder(target.tokenizer), _Encoder(draft.tokenizer)
        self.begin()

    def begin(self) -> None:
        """A new request: the tokens of the next call are others."""
        self.draft_ids = [*self._prefix]
        self.settled = len(self._prefix)  # draft ids that stay as they are
        self._seen = 0
        self._text, self._first = "", True
        self._open_window(0)
        self._stream = TextStream(self._target)

    def follow(self, tokens: Sequence[int]) -> list[int]:
        """The draft's ids of the text of ``tokens``, which go on where those of the last call ended.

        The list is valid until the next call. Bytes at the end that are no whole character yet are left out.
        """
        for position in range(self._seen, len(tokens)):
            self._push(tokens[position], position + 1)
        self._seen = len(tokens)
        rest = self._stream.rest()
        whole = rest.rstrip(REPLACEMENT)
        encoding = self._encode(self._text + whole)
        if len(tokens) - self._start > _WINDOW:
            self._cut(len(tokens), encoding)
        self._pending = len(whole) < len(rest)
        self._said = self._text + whole if self._seen > self._start else ""
        self._tail = list(tokens[self._start :])
        self._set_context()
        return self.draft_ids

    def translate(self, drafted: Sequence[int]) -> list[int] | None:
        """Target tokens that may go on behind the followed ones, as the drafted text behind them has it.

        Re-encoding may join the last committed token with what was drafted, but that token stands: then the drafted
        text is encoded by itself. None where no text can be aligned: the committed bytes are no whole character, and
        another one was drafted.

        Args:
            drafted: draft ids behind those of ``follow``; the last may be a part of a character.
        """
        text = self._draft.decode([*self._context, *drafted])[self._context_length :].rstrip(REPLACEMENT)
        if not text:
            return []
        ids = self._to_target(self._said + text, self._first).ids
        count = len(self._tail)
        if ids[:count] == self._tail:
            ids = ids[count:]
        elif self._pending:
            return None
        else:
            ids = self._to_target(text, False).ids
        return list(takewhile(lambda token: not self._target.is_special(token), ids))

    def _push(self, token: int, count: int) -> None:
        """A token, and how many there are with it."""
        if self._target.is_special(token):
            self._text += self._stream.settle().rstrip(REPLACEMENT)
            self._encode(self._text)
            self._open_window(count)
            return
        piece = self._stream.push(token)
        if piece:
            self._text += piece
            self._ends.append((len(self._text), count))

    def _open_window(self, start: int) -> None:
        """A window without text behind ``start`` tokens; what was encoded so far is settled."""
        self.settled = len(self.draft_ids)
        self._start = start
        self._first = self._first and not self._text  # it begins the text
        self._text = ""  # of which it is certain that it stays
        self._ends: list[tuple[int, int]] = []  # characters of it and tokens: where both end together

    def _encode(self, text: str) -> _Continuation:
        """Put the window's text in the place of what is not settled."""
        encoding = self._to_draft(text, self._first)
        self.draft_ids[self.settled :] = encoding.ids
        return encoding

    def _cut(self, count: int, encoding: _Continuation) -> None:
        """Settle the beginning of a window that ends with ``count`` tokens; all of it if it never parts in both."""
        ids_at = encoding.ends()
        common = [end for end in self._ends if end[0] in ids_at and end[1] <= count - _KEPT]
        if not common:
            if count - self._start > _LONGEST:
                self._open_window(count)
                self._stream.settle()
                self._first = False
            return
        at_spaces = [end for end in common if self._text[end[0] : end[0] + 1].isspace()]
        characters, self._start = (at_spaces or common)[-1]
        self.settled += ids_at[characters]
        self._text = self._text[characters:]
        self._ends = [(end - characters, tokens) for end, tokens in self._ends if tokens > self._start]
        self._first = False

    def _set_context(self) -> None:
        """The fewest draft ids behind which the text of others is theirs: decoders judge a run of bytes as one."""
        size = 1
        draft = self._draft
        while size < len(self.draft_ids) and (draft.is_byte(last := self.draft_ids[-size]) or draft.is_special(last)):
            size += 1
        self._context = self.draft_ids[-size:]
        self._context_length = len(self._draft.decode(self._context))


class _Continuation:
    """Ids of a text, without those of a mark before it."""

    def __init__(self, encoding: Encoding, skipped_ids: int, skipped_characters: int) -> None:
        self.ids: list[int] = encoding.ids[skipped_ids:]
        self._encoding = encoding
        self._skipped = skipped_ids, skipped_characters

    def ends(self) -> dict[int, int]:
        """How many ids a number of characters has, where a character and an id end together."""
        skipped_ids, skipped_characters = self._skipped
        spans = self._encoding.offsets[skipped_ids:]
        starts = [start for start, _ in spans[1:]] + [spans[-1][1]] if spans else []
        parted = enumerate(zip(spans, starts, strict=True), start=1)
        return {end - skipped_characters: count for count, ((_, end), start) in parted if start >= end}


class _Encoder:
    """Encodes texts as they stand inside of others: tokenizers may put a space at the beginning of a text."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._mark: list[int] = self(_MARK, True).ids

    def __call__(self, text: str, first: bool) -> _Continuation:
        if not first:
            encoding = self._tokenizer.encode(_MARK + text, add_special_tokens=False)
            if encoding.ids[: len(self._mark)] == self._mark:
                return _Continuation(encoding, len(self._mark), len(_MARK))
        return _Continuation(self._tokenizer.encode(text, add_special_tokens=False), 0, 0)
