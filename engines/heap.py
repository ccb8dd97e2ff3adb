"""The C library's heap: what passes and samplers freed stays with the process until it is asked back.

Buffers of ever other sizes leave holes that malloc keeps, in a heap for each thread: a process that serves for days
would look like a leak. Both calls are glibc's own, and do nothing where there is another C library.
"""

from __future__ import annotations

import ctypes
import sys
from typing import Any

_M_ARENA_MAX = -8


def share_one_heap() -> None:
    """Have threads share the heap of the first, whose holes are then filled by all of them.

    To be called before other threads have made heaps of their own: those stay.
    """
    if mallopt := _glibc("mallopt"):
        mallopt(_M_ARENA_MAX, 1)


def return_free_memory() -> None:
    """Give the system what is free in the heap (about 10 ms)."""
    if trim := _glibc("malloc_trim"):
        trim(ctypes.c_size_t(0))


def _glibc(name: str) -> Any:
    return getattr(ctypes.CDLL(None), name, None) if sys.platform == "linux" else None
