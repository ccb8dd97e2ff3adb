"""``layers:0-3,26-29``: a draft of some of the target's layers (self-speculative decoding, arXiv 2309.08168)."""

from __future__ import annotations

import re

from outrider.engines.errors import OutriderError

PREFIX = "layers:"
_RANGE = re.compile(r"(\d+)(?:-(\d+))?")


def parse_layers(draft: str, num_layers: int, option: str = "--draft") -> tuple[int, ...]:
    """The layers that ``draft`` names, first 0.

    Raises:
        OutriderError: not a rising list of layers and ranges, not in the target, or all of it.
    """
    layers: list[int] = []
    for part in draft.removeprefix(PREFIX).split(","):
        match = _RANGE.fullmatch(part.strip())
        if match is None:
            raise OutriderError(f"{option} {draft}: {part!r} is not a layer or a range; write it as layers:0-3,26-29")
        first, last = int(match[1]), int(match[2] or match[1])
        if last < first:
            raise OutriderError(f"{option} {draft}: the range {part.strip()} runs backwards")
        if last >= num_layers:
            raise OutriderError(f"{option} {draft}: the target has layers 0 to {num_layers - 1}")
        layers += range(first, last + 1)
    if layers != sorted(set(layers)):
        raise OutriderError(f"{option} {draft}: layers must rise, each named once")
    if len(layers) == num_layers:
        raise OutriderError(f"{option} {draft} is the whole target; leave some layers out")
    return tuple(layers)
