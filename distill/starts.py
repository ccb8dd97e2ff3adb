"""What the target writes about: turns of a user that it makes up itself, or the user's own prompts.

A chat model continues an open user turn with a question of its own, and then answers it: text of its own domain, from
nothing (Magpie, arXiv 2406.08464).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from outrider.engines.errors import OutriderError
from outrider.runtime.bench import Prompt
from outrider.runtime.text import TextCodec, check_utf8

_MARK = "OUTRIDER"
# Of an answer, in turn. Greedy is what users decode most, and the rest shows the ways around it.
_TEMPERATURES = (0.0, 0.0, 0.5, 0.8)
TURN_TEMPERATURE = 1.0
_HELD_OUT_PROMPTS, _HELD_OUT_TEXTS = 16, 17  # one in so many; the second goes through all temperatures
_ROOM = 32  # tokens of an answer to a prompt


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

    Args:
        prompts: those that leave no room for an answer are left out, and counted in ``too_long``.
        max_length: tokens of a sequence, the opening included.

    Raises:
        OutriderError: a prompt that is no text, or none that leaves room.
    """

    def __init__(self, codec: TextCodec, opening: Opening, prompts: Sequence[Prompt], max_length: int) -> None:
        self._after = opening.after
        self._prompts: list[tuple[int, ...]] = []
        self.held_out_prompts: list[Prompt] = []
        self.too_long = 0
        longest = max_length - len(opening.before) - len(opening.after) - _ROOM
        for prompt in prompts:
            check_utf8(prompt.text, f"prompt {prompt.id}")
            ids = tuple(codec.tokenizer.encode(prompt.text, add_special_tokens=False).ids)
            if len(ids) > longest:
                self.too_long += 1
                continue
            if len(self._prompts) % _HELD_OUT_PROMPTS == 0:
                self.held_out_prompts.append(prompt)
            self._prompts.append(ids)
        if prompts and not self._prompts:
            raise OutriderError(f"no prompt has {longest} tokens or fewer; give shorter ones, or a larger --max-length")

    def held_out(self, number: int) -> bool:
        half, odd = divmod(number, 2)
        if self._prompts and not odd:
            return half % len(self._prompts) % _HELD_OUT_PROMPTS == 0
        return number % _HELD_OUT_TEXTS == 0

    def __getitem__(self, number: int) -> Start:
        half, odd = divmod(number, 2)
        if not self._prompts:
            return Start((), _TEMPERATURES[number % len(_TEMPERATURES)])
        if odd:
            return Start((), _TEMPERATURES[half % len(_TEMPERATURES)])
        again, index = divmod(half, len(self._prompts))
        return Start(self._prompts[index] + self._after, _TEMPERATURES[1:][again % 3])
