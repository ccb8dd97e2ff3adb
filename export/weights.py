"""Where the large constants of a graph go: into a file, to where they already are, or nowhere but into a sum."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, Protocol

import ml_dtypes
import numpy as np
import onnx
from numpy.typing import NDArray

from outrider.engines.bundle import WEIGHTS
from outrider.engines.errors import OutriderError

JOURNAL = ".journal.json"
# ONNX Runtime maps external tensors: an offset that is a multiple of the page size needs no copy.
_ALIGNMENT = 4096
_MARK_BYTES = 64 << 20


class Place(NamedTuple):
    """Bytes in the weights file."""

    offset: int
    length: int


class Weights(Protocol):
    def put(self, name: str, dtype: Any, shape: Sequence[int], slabs: Iterable[NDArray[Any]]) -> Place:
        """The place of a constant; ``slabs`` along the first axis are its values (int4 packed), used where needed."""
        ...


class WeightFile:
    """Appends to a file.

    From time to time what it has is noted in a journal beside it (``mark``). When an export goes on after an
    interruption, what the journal has is not read, rounded or written again.
    """

    def __init__(self, path: Path) -> None:
        self._journal = path.with_name(JOURNAL)
        self._marked = 0
        self.places: dict[str, Place] = {}
        if self._journal.exists():
            self._marked, self.places = read_journal(self._journal)
        self._file = path.open("r+b" if self.places else "wb")
        self._file.truncate(self._marked)
        self._file.seek(self._marked)

    def put(self, name: str, dtype: Any, shape: Sequence[int], slabs: Iterable[NDArray[Any]]) -> Place:
        if name not in self.places:
            self._file.write(bytes(-self._file.tell() % _ALIGNMENT))
            offset = self._file.tell()
            for slab in slabs:
                self._file.write(_as_stored(slab, dtype, name).view(np.uint8).data)
            place = Place(offset, self._file.tell() - offset)
            assert place.length == _size(dtype, shape), f"{name}: {place.length} bytes written"
            self.places[name] = place
        return self.places[name]

    def mark(self) -> None:
        """Note what is there, where much is new. Call it when all parts of what was put are there."""
        end = self._file.tell()
        if end - self._marked < _MARK_BYTES:
            return
        self._file.flush()
        os.fsync(self._file.fileno())
        write_note(self._journal, {"end": end, "places": self.places})
        self._marked = end

    def __enter__(self) -> WeightFile:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()


def read_journal(path: Path) -> tuple[int, dict[str, Place]]:
    """The bytes of the weights beside a journal that it speaks for, and what is where in them.

    Raises:
        OSError, ValueError: it cannot be read or is damaged, or the weights are fewer.
    """
    noted = json.loads(path.read_text(encoding="utf-8"))
    try:
        end, places = int(noted["end"]), {name: Place(*place) for name, place in noted["places"].items()}
    except (TypeError, LookupError, AttributeError):
        raise ValueError("not a journal of weights") from None
    size = path.with_name(WEIGHTS).stat().st_size
    if size < end:
        raise ValueError(f"{WEIGHTS} beside it has {size} bytes of {end}")
    return end, places


@contextmanager
def written_whole(path: Path) -> Iterator[BinaryIO]:
    """A file that takes its place when it is on the disk: a crash leaves the one before or this, whole."""
    work = path.with_name(f"{path.name}.new")
    with work.open("wb") as file:
        yield file
        file.flush()
        os.fsync(file.fileno())
    work.replace(path)


def write_note(path: Path, content: object) -> None:
    """As JSON, ``written_whole``."""
    with written_whole(path) as file:
        file.write(json.dumps(content).encode())


class SharedWeights:
    """Those of a graph that is written already, for another one over some of them."""

    def __init__(self, graph: onnx.ModelProto) -> None:
        self._places: dict[str, Place] = {}
        for tensor in graph.graph.initializer:
            entries = {entry.key: entry.value for entry in tensor.external_data}
            if entries:
                self._places[tensor.name] = Place(int(entries["offset"]), int(entries["length"]))

    def put(self, name: str, dtype: Any, shape: Sequence[int], slabs: Iterable[NDArray[Any]]) -> Place:
        assert self._places[name].length == _size(dtype, shape), name
        return self._places[name]


class CountedWeights:
    """Reads and writes nothing; ``end`` is the size in bytes that a file would have."""

    def __init__(self) -> None:
        self.end = 0

    def put(self, name: str, dtype: Any, shape: Sequence[int], slabs: Iterable[NDArray[Any]]) -> Place:
        offset = -(-self.end // _ALIGNMENT) * _ALIGNMENT
        place = Place(offset, _size(dtype, shape))
        self.end = offset + place.length
        return place


def _size(dtype: Any, shape: Sequence[int]) -> int:
    """In bytes."""
    count = int(np.prod(shape, dtype=np.int64))
    return count // 2 if np.dtype(dtype) == ml_dtypes.int4 else count * np.dtype(dtype).itemsize


def _as_stored(slab: NDArray[Any], dtype: Any, name: str) -> NDArray[Any]:
    if np.dtype(dtype) == ml_dtypes.int4:
        dtype = np.uint8
    if np.dtype(dtype) != np.float16 or slab.dtype == np.float16:
        return np.ascontiguousarray(slab, dtype)
    with np.errstate(over="ignore"):
        stored = np.ascontiguousarray(slab, dtype)
    if np.isinf(stored.max(initial=0)) or np.isinf(stored.min(initial=0)):
        raise OutriderError(
            f"{name} has values up to {np.abs(slab).max():.3g}, and float16 holds 65504 at most; use another precision"
        )
    return stored
