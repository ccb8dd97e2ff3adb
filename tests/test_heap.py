"""Memory that was freed goes back to the system, wherever it lay, and from whichever thread it came."""

from __future__ import annotations

import subprocess
import sys

import pytest

HOLES = """
import threading
from pathlib import Path
import numpy as np
from outrider.engines.heap import return_free_memory, share_one_heap

def resident():
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmRSS"))
    return int(line.split()[1]) >> 10

share_one_heap()
kept = []
def leave_holes():
    pieces = [np.ones(40_000, np.uint8) for _ in range(2000)]
    kept.append(pieces[::50])  # between those that are freed
for _ in range(4):
    thread = threading.Thread(target=leave_holes)
    thread.start()
    thread.join()
before = resident()
return_free_memory()
print(before - resident())
"""


@pytest.mark.skipif(sys.platform != "linux", reason="the calls are glibc's")
def test_holes_are_given_back() -> None:
    found = subprocess.run([sys.executable, "-c", HOLES], capture_output=True, text=True, check=True)
    assert int(found.stdout) > 50  # MB of the 80 that each thread allocated
