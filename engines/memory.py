"""Memory that engines run on: buffers that live as long as their engine, bound once, at fixed addresses.

A write or a copy is in order with the passes around it; a read waits for what came before it.
"""

from __future__ import annotations

import mmap
from collections.abc import Callable
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

# dtype as the manifest names it -> (numpy's dtype of the same size, ONNX's TensorProto.DataType)
_ELEMENTS: dict[str, tuple[type, int]] = {
    "float32": (np.float32, 1),
    "uint8": (np.uint8, 2),
    "int32": (np.int32, 6),
    "int64": (np.int64, 7),
    "float16": (np.float16, 10),
    "bfloat16": (np.uint16, 16),  # numpy has none: nobody here computes with it
}
ALIGNMENT = 256  # bytes: TensorRT takes no other addresses

Launch = Callable[[], None]


class Buffer(Protocol):
    """A tensor at a fixed address. ``element`` is ONNX's number of its dtype."""

    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    element: int
    pointer: int

    def write(self, values: Any) -> None:
        """Fill it from the host."""
        ...

    def read(self) -> NDArray[Any]:
        """The contents on the host; the next read or pass may overwrite them."""
        ...

    def section(self, offset: int, shape: tuple[int, ...], dtype: str) -> Buffer:
        """A part that begins ``offset`` bytes in; to be bound, it must begin at a multiple of ``ALIGNMENT``."""
        ...


class Memory(Protocol):
    """Where buffers live. ``kind`` is ONNX Runtime's name of the device: ``cpu`` or ``cuda``."""

    kind: str

    def buffer(self, shape: tuple[int, ...], dtype: str) -> Buffer:
        """Zeroed memory."""
        ...

    def copy(self, source: Buffer, start: int, target: Buffer, at: int) -> None:
        """Copy the element with number ``start`` of ``source`` to number ``at`` of ``target``, of the same dtype."""
        ...

    def recorded(self, work: Launch) -> Launch:
        """``work`` made cheaper to repeat: it always does the same to the same buffers."""
        ...


class HostBuffer:
    """See ``Buffer``. ``array`` is the memory itself: a write is an assignment and a read costs nothing."""

    def __init__(self, array: NDArray[Any], element: int) -> None:
        self.array = array
        self.element = element
        self.shape = array.shape
        self.dtype = array.dtype
        self.pointer = array.ctypes.data

    def write(self, values: Any) -> None:
        self.array[...] = values

    def read(self) -> NDArray[Any]:
        return self.array

    def section(self, offset: int, shape: tuple[int, ...], dtype: str) -> HostBuffer:
        numpy_dtype, element = element_of(dtype)
        flat = self.array.reshape(-1).view(np.uint8)[offset : offset + size_of(shape, dtype)]
        return HostBuffer(flat.view(numpy_dtype).reshape(shape), element)


class HostMemory:
    """See ``Memory``."""

    kind = "cpu"

    def buffer(self, shape: tuple[int, ...], dtype: str) -> HostBuffer:
        numpy_dtype, element = element_of(dtype)
        return HostBuffer(_reserve(size_of(shape, dtype), numpy_dtype).reshape(shape), element)

    def copy(self, source: Buffer, start: int, target: Buffer, at: int) -> None:
        target.read().reshape(-1)[at] = source.read().reshape(-1)[start]

    def recorded(self, work: Launch) -> Launch:
        return work


def size_of(shape: tuple[int, ...], dtype: str) -> int:
    """Bytes of a tensor."""
    return int(np.prod(shape, dtype=np.int64)) * element_of(dtype)[0].itemsize


def element_of(dtype: str) -> tuple[np.dtype[Any], int]:
    """numpy's dtype of the same size, and ONNX's number, of a dtype by name."""
    numpy_dtype, element = _ELEMENTS[dtype]
    return np.dtype(numpy_dtype), element


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
