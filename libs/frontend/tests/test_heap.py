"""A start-up's objects are walked no more, and what is free in the C heap goes back to the system."""

from __future__ import annotations

import gc
import platform
import subprocess
import sys

import pytest

from openinfer.frontend import heap

HOLD = """
import ctypes, re, sys
from openinfer.frontend import heap

def held() -> int:
    with open("/proc/self/status") as status:
        return int(re.search(r"VmRSS:\\s+(\\d+)", status.read())[1]) // 1024

libc = ctypes.CDLL(None)
libc.malloc.restype, libc.free.argtypes = ctypes.c_void_p, [ctypes.c_void_p]
blocks = [libc.malloc(4000) for _ in range(25_000)]
for block in blocks:
    ctypes.memset(block, 1, 4000)
full = held()
for block in blocks[:-1]:  # the last lies at the end of the heap: without help nothing goes back
    libc.free(block)
freed = held()
if sys.argv[1] == "trim":
    heap.trim()
print(full, freed, held())
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only glibc has malloc_trim")
@pytest.mark.parametrize("how", ["trim", "leave"])
def test_trim_gives_back(how: str) -> None:
    done = subprocess.run([sys.executable, "-c", HOLD, how], capture_output=True, text=True, check=True)
    full, freed, after = map(int, done.stdout.split())
    assert full - freed < 30
    assert (freed - after > 60) == (how == "trim")


def test_a_start_up_is_walked_by_no_collection() -> None:
    before = gc.get_freeze_count()
    try:
        with heap.starting():
            assert not gc.isenabled()
            kept = [[] for _ in range(1000)]  # type: ignore[var-annotated]
            kept.append(kept)
        assert gc.isenabled()
        assert gc.get_freeze_count() > before + len(kept)
        with pytest.raises(OSError, match="no weights"), heap.starting():
            raise OSError("no weights")
        assert gc.isenabled()
    finally:
        gc.unfreeze()
