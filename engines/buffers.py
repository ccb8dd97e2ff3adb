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

        # Mapped memory is only reserved until a page of it is touched, so a long cache costs what is used of it.
        # numpy's own allocations ask for huge pages, of which a few tokens would touch them all.
        size = int(np.prod(shape, dtype=np.int64)) * np.dtype(dtype).itemsize
        self.array: NDArray[Any] = np.frombuffer(mmap.mmap(-1, size), dtype).reshape(shape)
        self.on_host = device == "cpu"
        self.value = ort.OrtValue.ortvalue_from_numpy(self.array, device, 0)

    def write(self, values: Any) -> None:
        self.array[...] = values
        if not self.on_host:
            self.value.update_inplace(self.array)

    def read(self) -> NDArray[Any]:
        """The contents: a view on the host, a copy from a device."""
        return self.array if self.on_host else np.asarray(self.value.numpy())
