"""The C library's heap: what passes and samplers freed stays with the process until it is asked back."""

from __future__ import annotations

import ctypes
import sys


def return_free_memory() -> None:
    """Give the system what is free in the heap (about 10 ms); nothing where the C library has no such call.

    Buffers of ever other sizes leave holes that malloc keeps: a process that serves for days would look like a leak.
    """
    if sys.platform == "linux":
        trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc's own
        if trim is not None:
            trim(ctypes.c_size_t(0))
