"""Huge pages for weights: a pass streams all of them, and with 4 KiB pages part of it goes to address translation.

ONNX Runtime packs weights into ordinary memory, which Linux backs with small pages unless asked otherwise.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

_MAPS = Path("/proc/self/maps")
_SIZE = 2 << 20
_MADV_COLLAPSE = 25  # Linux 6.1: assemble huge pages now, in place


@contextmanager
def huge_pages() -> Iterator[None]:
    """Back with huge pages what the block allocates and keeps. A hint: where the system refuses it, nothing changes."""
    before = _regions()
    yield
    if not before:
        return
    libc = ctypes.CDLL(None)
    for start, end in _regions().items():
        first, last = -(-max(start, before.get(start, 0)) // _SIZE) * _SIZE, end // _SIZE * _SIZE
        if last > first:
            libc.madvise(ctypes.c_void_p(first), ctypes.c_size_t(last - first), _MADV_COLLAPSE)


def _regions() -> dict[int, int]:
    """start -> end of the private anonymous memory of this process; empty where there is no Linux to ask."""
    found: dict[int, int] = {}
    if sys.platform != "linux":
        return found
    with suppress(OSError):
        for line in _MAPS.read_text().splitlines():
            span, mode, _, _, inode, *name = line.split(maxsplit=5)
            if mode == "rw-p" and inode == "0" and (not name or name[0] == "[heap]"):
                start, end = span.split("-")
                found[int(start, 16)] = int(end, 16)
    return found
