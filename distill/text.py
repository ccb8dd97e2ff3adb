"""The text that the target wrote, on disk: shards that appear whole, so that an interruption loses little."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from outrider.distill.writer import Written
from outrider.engines.errors import OutriderError
from outrider.engines.next_tokens import NOT_ARRAYS
from outrider.export.weights import write_note, written_whole

_SHARD_TOKENS, _SHARD_SECONDS = 32768, 60.0  # whichever comes first ends a shard
_RECIPE = "text.json"
_HEAD = 24  # tokens of an answer that make two the same


class WrittenText:
    """A folder of sequences, which are the same whatever order they ended in, and in how many runs.

    What counts are the sequences below the first number that has not ended, without those that begin as an earlier
    one does. ``tokens`` is the number of theirs, ``ended`` are the numbers of all that did, empty ones too.

    Args:
        recipe: what the text depends on: a folder of another one is not gone on with.

    Raises:
        OutriderError: the folder holds text of another recipe, or is damaged.
    """

    def __init__(self, folder: Path, recipe: dict[str, Any]) -> None:
        self.folder = folder
        self.ended: set[int] = set()
        self.tokens = 0
        self._next = 0  # the first number that has not ended
        self._ahead: dict[int, tuple[int, bytes]] = {}  # tokens and beginning of those behind it
        self._counted: dict[int, int] = {}  # tokens of those that count, by number
        self._heads: set[bytes] = set()
        self._held_seconds = 0.0
        self._since = time.monotonic()
        self._pending: list[Written] = []
        folder.mkdir(parents=True, exist_ok=True)
        _check_recipe(folder / _RECIPE, recipe)
        for shard in self._shards():
            arrays = _read(shard)
            self._held_seconds += float(arrays["seconds"])
            for one in _sequences(arrays):
                self._count(one)

    @property
    def seconds(self) -> float:
        """That the text took, earlier runs included."""
        return self._held_seconds + time.monotonic() - self._since

    def add(self, written: Written) -> None:
        self._count(written)
        self._pending.append(written)
        old = time.monotonic() - self._since > _SHARD_SECONDS
        if old or sum(len(one.ids) for one in self._pending) >= _SHARD_TOKENS:
            self.flush()

    def flush(self) -> None:
        """Write what is not on disk yet."""
        if not self._pending:
            return
        pending = self._pending
        small = np.uint16 if max(one.top_ids.max(initial=0) for one in pending) < 65536 else np.uint32
        arrays = {
            "numbers": np.array([one.number for one in pending]),
            "answers": np.array([one.answer for one in pending]),
            "lengths": np.array([len(one.ids) for one in pending]),
            "seconds": np.array(time.monotonic() - self._since),
            "ids": np.concatenate([one.ids for one in pending]),
            "top_ids": np.concatenate([one.top_ids for one in pending]).astype(small),
            "top_logits": np.concatenate([one.top_logits for one in pending]),
        }
        last = max((int(shard.stem) for shard in self._shards()), default=-1)
        with written_whole(self.folder / f"{last + 1:05}.npz") as file:
            np.savez(file, **arrays)  # type: ignore[arg-type]  # older stubs know no arrays by name
        self._held_seconds, self._since = self.seconds, time.monotonic()
        self._pending = []

    def sequences(self, tokens: int | None = None) -> Iterator[Written]:
        """What is on disk and counts, by number; with ``tokens`` no more of it than has so many."""
        wanted: set[int] = set()
        total = 0
        for number, size in self._counted.items():
            if tokens is not None and total >= tokens:
                break
            wanted.add(number)
            total += size
        found = [one for shard in self._shards() for one in _sequences(_read(shard)) if one.number in wanted]
        yield from sorted(found, key=lambda one: one.number)

    def _count(self, one: Written) -> None:
        self.ended.add(one.number)
        self._ahead[one.number] = len(one.ids), _head(one)
        while self._next in self._ahead:
            size, head = self._ahead.pop(self._next)
            if size and head not in self._heads:
                self._heads.add(head)
                self._counted[self._next] = size
                self.tokens += size
            self._next += 1

    def _shards(self) -> list[Path]:
        return sorted(self.folder.glob("[0-9]*.npz"))


def _check_recipe(path: Path, recipe: dict[str, Any]) -> None:
    if not path.is_file():
        write_note(path, recipe)
        return
    try:
        held = json.loads(path.read_text(encoding="utf-8"))
    except ValueError:
        held = {}
    other = [name for name in recipe if not isinstance(held, dict) or held.get(name) != recipe[name]]
    if other:
        raise OutriderError(
            f"{path.parent} holds text of another {other[0]}; give the same again, or choose another --out"
        )


def _read(shard: Path) -> dict[str, NDArray[Any]]:
    try:
        with np.load(shard) as held:
            arrays = {name: held[name] for name in held.files}
            size = int(arrays["lengths"].sum())
            if {len(arrays[name]) for name in ("ids", "top_ids", "top_logits")} != {size} or "seconds" not in arrays:
                raise ValueError("its arrays do not belong together")
            return arrays
    except NOT_ARRAYS as error:
        raise OutriderError(f"{shard} is damaged ({error}); remove it: what it held is written again") from None


def _sequences(arrays: dict[str, NDArray[Any]]) -> Iterator[Written]:
    ends = np.cumsum(arrays["lengths"])
    for index, end in enumerate(ends):
        part = slice(end - arrays["lengths"][index], end)
        values = (arrays[name][part] for name in ("ids", "top_ids", "top_logits"))
        yield Written(int(arrays["numbers"][index]), int(arrays["answers"][index]), *values)


def _head(one: Written) -> bytes:
    return one.ids[: one.answer + _HEAD].tobytes()
