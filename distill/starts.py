"""What the target writes about: turns of a user that it makes up itself, or the user's own prompts.

A chat model continues an open user turn with a question of its own, and then answers it: text of its own domain, from
nothing (Magpie, arXiv 2406.08464).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from outrider.runtime.text import TextCodec

_MARK = "OUTRIDER"
# Of an answer, in turn. Greedy is what users decode most, and the rest shows the ways around it.
_TEMPERATURES = (0.0, 0.0, 0.5, 0.8)
TURN_TEMPERATURE = 1.0
HELD_OUT = 16  # one prompt and one self-written text in so many


@dataclass(frozen=True)
class Opening:
    """Token ids around a user's turn: every sequence begins with ``before``, ``after`` leads to the answer.

    ``after`` is empty for a model without a chat template: its sequences are one text each.
    """

    before: tuple[int, ...]
    after: tuple[int, ...]


@dataclass(frozen=True)
class Start:
    """How a sequence begins: ``forced`` are its tokens behind the opening, ``temperature`` that of the answer.

    Without ``forced`` the target writes the user's turn, too.
    """

    forced: tuple[int, ...]
    temperature: float


def opening_of(codec: TextCodec, eos_token_ids: Sequence[int]) -> Opening:
    """From the chat template; for a model without one, what its tokenizer puts before a text."""

    def ids(text: str) -> tuple[int, ...]:
        return tuple(codec.tokenizer.encode(text, add_special_tokens=False).ids)

    if codec.has_template:
        before, mark, after = codec.render([{"role": "user", "content": _MARK}]).partition(_MARK)
        if mark and before and after:
            return Opening(ids(before), ids(after))
    first = tuple(codec.tokenizer.encode("").ids) or tuple(eos_token_ids[:1])
    return Opening(first or (0,), ())


class Starts:
    """The start of each sequence, by number: with prompts, every other one of them in turn; the rest is self-written.

    Of both some are held out: they are written, but measured on instead of trained on.
    """

    def __init__(self, codec: TextCodec, opening: Opening, prompts: Sequence[str]) -> None:
        self._prompts = [tuple(codec.tokenizer.encode(prompt, add_special_tokens=False).ids) for prompt in prompts]
        self._after = opening.after

    def held_out(self, number: int) -> bool:
        half, odd = divmod(number, 2)
        if self._prompts and not odd:
            half %= len(self._prompts)
        return half % HELD_OUT == 0

    def __getitem__(self, number: int) -> Start:
        half, odd = divmod(number, 2)
        if not self._prompts:
            return Start((), _TEMPERATURES[number % len(_TEMPERATURES)])
        if odd:
            return Start((), _TEMPERATURES[half % len(_TEMPERATURES)])
        again, index = divmod(half, len(self._prompts))
        return Start(self._prompts[index] + self._after, _TEMPERATURES[1:][again % 3])
