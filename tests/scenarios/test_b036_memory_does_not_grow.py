"""Memory does not grow with the number of saves: not with new arrays every time, not with the same ones.

The most that a run takes beside its state is the staging memory, as much as one snapshot, and what
the interpreter needs. The long form does it with other allocators too.
"""

from __future__ import annotations

import ctypes.util
import sys
from pathlib import Path

import pytest
from children import run_well
from helpers import short_or_long

SCRIPT = """
import resource, sys
from pathlib import Path
import numpy as np
import midstride as ms

kind, arrays, allocator = sys.argv[2], int(sys.argv[3]), sys.argv[5]
STATE = int(sys.argv[4]) * 2**20
if kind == "torch":
    import torch
assert allocator == "glibc" or allocator in Path("/proc/self/maps").read_text(), "it was not preloaded"

def resident():
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()

def peak():
    (line,) = [line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM")]
    return int(line.split()[1]) * 1024

def filled(step):
    count = STATE // 4 // arrays
    return np.full(count, step, np.int32) if kind == "numpy" else torch.full((count,), step, dtype=torch.int32)

with ms.Checkpointer(sys.argv[1], keep=1) as ckpt:
    before = resident()
    for same in (False, True):
        state = None
        for number in range(200):
            step = ckpt.statistics().saves_begun
            if state is None or not same:
                state = None  # the old one goes before the new one comes
                state = {"model": {f"w{n}": filled(step) for n in range(arrays)}}
            state["model"]["w0"][0] = step
            ckpt.save(step, state).result()
            if number == 19:
                early = resident()
        print(early, resident(), flush=True)
    print(before, peak(), ckpt.statistics().staging_bytes, STATE)
"""


def library(name: str) -> str | None:
    """An allocator's library, where this machine has it."""
    found = sorted(
        str(path)
        for folder in ("/usr/lib", "/usr/lib64", "/usr/local/lib", "/opt")
        for pattern in (f"lib{name}.so*", f"*/lib{name}.so*")
        for path in Path(folder).glob(pattern)
    )
    return ctypes.util.find_library(name) or next(iter(found), None)


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc/self/statm")
@pytest.mark.parametrize(
    "kind, arrays, mebibytes, allocator, spare",
    short_or_long(
        short=[("numpy", 4, 2, "glibc", 16)],
        # Holes in glibc's heap between the aligned blocks of PyTorch take some 10 MiB, without a save too.
        long=[
            (kind, 64, 64, allocator, spare)
            for kind, spare in (("numpy", 16), ("torch", 32))
            for allocator in ("glibc", "jemalloc", "mimalloc")
        ],
    ),
)
def test_four_hundred_saves(tmp_path: Path, kind: str, arrays: int, mebibytes: int, allocator: str, spare: int) -> None:
    preload = None if allocator == "glibc" else library(allocator)
    if preload is None and allocator != "glibc":
        pytest.skip(f"no library of {allocator} on this machine")
    env = {"LD_PRELOAD": preload} if preload is not None else {}
    *rounds, last = run_well(SCRIPT, tmp_path, kind, arrays, mebibytes, allocator, env=env).splitlines()
    assert len(rounds) == 2
    for line in rounds:
        early, late = map(int, line.split())
        assert late <= 1.2 * early
    before, peak, staging, state = map(int, last.split())
    assert staging <= state + 2**20
    # The state that is made anew each time, the staging memory, and a fixed sum for threads and buffers.
    assert peak - before <= state + staging + spare * 2**20
