"""The text that the target wrote, on disk: shards that appear whole, so that an interruption loses one at most."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from outrider.distill.writer import Written
from outrider.engines.errors import OutriderError

_SHARD_TOKENS = 32768
_RECIPE = "text.json"
_HEAD = 24  # tokens of an answer that make two the same


class WrittenText:
    """A folder of sequences. ``recipe`` is what they depend on: a folder of another one is not gone on with.

    Raises:
        OutriderError: the folder holds another target's text, or that of another seed or other prompts.
    """

    def __init__(self, folder: Path, recipe: dict[str, Any]) -> None:
        self.folder = folder
        self.numbers: set[int] = set()  # of all sequences that were begun and came to an end
        self.tokens = 0
        self._held_seconds = 0.0
        self._since = time.monotonic()
        self._pending: list[Written] = []
        self._pending_tokens = 0
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / _RECIPE
        if path.is_file():
            if json.loads(path.read_text()) != recipe:
                raise OutriderError(f"{folder} holds text of another target, seed or prompts; choose another --out")
        else:
            path.write_text(json.dumps(recipe))
        for shard in self._shards():
            with np.load(shard) as held:
                self.numbers.update(held["numbers"].tolist())
                self.tokens += int(held["lengths"].sum())
                self._held_seconds += float(held["seconds"])

    @property
    def seconds(self) -> float:
        """That the text took, earlier runs included as far as their shards go."""
        return self._held_seconds + time.monotonic() - self._since

    def add(self, written: Written) -> None:
        self.numbers.add(written.number)
        self._pending.append(written)
        self._pending_tokens += len(written.ids)
        self.tokens += len(written.ids)
        if self._pending_tokens >= _SHARD_TOKENS:
            self.flush()

    def flush(self) -> None:
        """Write what is not on disk yet."""
        if not self._pending:
            return
        small = np.uint16 if max(int(one.top_ids.max()) for one in self._pending) < 65536 else np.uint32
        arrays = {
            "numbers": np.array([one.number for one in self._pending]),
            "answers": np.array([one.answer for one in self._pending]),
            "lengths": np.array([len(one.ids) for one in self._pending]),
            "seconds": np.array(time.monotonic() - self._since),
            "ids": np.concatenate([one.ids for one in self._pending]),
            "top_ids": np.concatenate([one.top_ids for one in self._pending]).astype(small),
            "top_logits": np.concatenate([one.top_logits for one in self._pending]),
        }
        work = self.folder / ".shard.npz"
        np.savez(work, allow_pickle=False, **arrays)
        work.rename(self.folder / f"{len(self._shards()):05}.npz")
        self._held_seconds, self._since = self.seconds, time.monotonic()
        self._pending, self._pending_tokens = [], 0

    def __iter__(self) -> Iterator[Written]:
        """Sequences on disk by number, in whatever order they ended, and of equal beginnings the first."""
        found = []
        for shard in self._shards():
            with np.load(shard) as held:
                arrays = {name: held[name] for name in held.files}
            ends = np.cumsum(arrays["lengths"])
            for index, end in enumerate(ends):
                part = slice(end - arrays["lengths"][index], end)
                found.append(
                    Written(
                        int(arrays["numbers"][index]),
                        int(arrays["answers"][index]),
                        arrays["ids"][part],
                        arrays["top_ids"][part],
                        arrays["top_logits"][part],
                    )
                )
        heads: set[bytes] = set()
        for one in sorted(found, key=lambda one: one.number):
            head = one.ids[: one.answer + _HEAD].tobytes()
            if head not in heads:
                heads.add(head)
                yield one

    def _shards(self) -> list[Path]:
        return sorted(self.folder.glob("[0-9]*.npz"))
