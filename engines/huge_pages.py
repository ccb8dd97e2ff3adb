"""Huge pages for weights: a pass streams all of them, and with 4 KiB pages part of it goes to address translation.

ONNX Runtime packs weights into ordinary memory, which Linux backs with small pages unless asked otherwise.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

Region = tuple[int, int]

_MAPS = Path("/proc/self/maps")
_SETTING = Path("/sys/kernel/mm/transparent_hugepage/enabled")
_SIZE = 2 << 20
_MADV_COLLAPSE = 25  # Linux 6.1: assemble huge pages now, in place


@contextmanager
def huge_pages() -> Iterator[None]:
    """Back with huge pages what the block allocates and keeps. A hint: where it is not heard, nothing changes."""
    before = _regions()
    yield
    if not before or not _allowed():
        return
    libc = ctypes.CDLL(None)
    for start, end in _new(_regions(), before):
        first, last = -(-start // _SIZE) * _SIZE, end // _SIZE * _SIZE
        if last > first:
            libc.madvise(ctypes.c_void_p(first), ctypes.c_size_t(last - first), _MADV_COLLAPSE)


def _allowed() -> bool:
    """Whether the system's owner lets processes ask for huge pages."""
    try:
        return "[never]" not in _SETTING.read_text()
    except OSError:
        return False


def _new(after: list[Region], before: list[Region]) -> Iterator[Region]:
    """What of ``after`` was not in ``before``: regions grow and merge."""
    for start, end in after:
        for old_start, old_end in before:  # both lists rise
            if old_end <= start or old_start >= end:
                continue
            if old_start > start:
                yield start, old_start
            start = max(start, old_end)
        if start < end:
            yield start, end


def _regions() -> list[Region]:
    """Private anonymous memory of this process as rising (start, end); empty where there is no Linux to ask."""
    found: list[Region] = []
    if sys.platform != "linux":
        return found
    with suppress(OSError):
        for line in _MAPS.read_text().splitlines():
            span, mode, _, _, inode, *name = line.split(maxsplit=5)
            if mode == "rw-p" and inode == "0" and (not name or name[0] == "[heap]"):
                start, end = span.split("-")
                found.append((int(start, 16), int(end, 16)))
    return found
