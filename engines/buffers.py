"""Memory that lives as long as its engine and is bound once: on the host it is written in place, on a device copied."""

from __future__ import annotations

import mmap
from typing import Any

import numpy as np
from numpy.typing import NDArray


class Buffer:
    """An ``OrtValue`` with a fixed address on ``device`` ("cpu" or "cuda").

    On the CPU ``array`` aliases the value's memory, so that a write costs an assignment and a read costs nothing.
    """

    def __init__(self, shape: tuple[int, ...], dtype: Any, device: str) -> None:
        import onnxruntime as ort

        size = int(np.prod(shape, dtype=np.int64)) * np.dtype(dtype).itemsize
        self.array = _reserve(size, dtype).reshape(shape)
        self.on_host = device == "cpu"
        self.value = ort.OrtValue.ortvalue_from_numpy(self.array, device, 0)

    def write(self, values: Any) -> None:
        self.array[...] = values
        if not self.on_host:
            self.value.update_inplace(self.array)

    def read(self) -> NDArray[Any]:
        """The contents: a view on the host, a copy from a device."""
        return self.array if self.on_host else np.asarray(self.value.numpy())


def _reserve(size: int, dtype: Any) -> NDArray[Any]:
    """Zeroed memory that costs nothing until it is touched, page by page: a long cache costs what is used of it.

    Private, so that a forked process gets its own; small pages, since a few tokens would touch every huge one.
    """
    if not hasattr(mmap, "MAP_PRIVATE"):
        return np.frombuffer(mmap.mmap(-1, size), dtype)
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_NOHUGEPAGE"):
        memory.madvise(mmap.MADV_NOHUGEPAGE)
    return np.frombuffer(memory, dtype)
