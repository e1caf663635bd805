"""Memory does not grow with the number of saves: not with new arrays every time, not with the same ones.

The most that a run takes beside its state is the staging memory, as much as one snapshot, and what
the interpreter needs.
"""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from children import run_well

SCRIPT = """
import resource, sys
from pathlib import Path
import numpy as np
import midstride as ms

MIB = 2**20
STATE = 2 * MIB

def resident():
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()

def peak():
    (line,) = [line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM")]
    return int(line.split()[1]) * 1024

def fresh(step):
    return {"model": {f"w{n}": np.full(STATE // 16, step, np.int32) for n in range(4)}}

same = fresh(0)
with ms.Checkpointer(sys.argv[1], keep=1) as ckpt:
    before = resident()
    for make in (fresh, lambda step: same):
        for number in range(200):
            step = ckpt.statistics().saves_begun
            state = make(step)
            state["model"]["w0"][0] = step
            ckpt.save(step, state).result()
            if number == 19:
                early = resident()
        print(early, resident(), flush=True)
    print(before, peak(), ckpt.statistics().staging_bytes, STATE)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc/self/statm")
def test_four_hundred_saves(tmp_path: Path) -> None:
    *rounds, last = run_well(SCRIPT, tmp_path).splitlines()
    assert len(rounds) == 2
    for line in rounds:
        early, late = map(int, line.split())
        assert late <= 1.2 * early
    before, peak, staging, state = map(int, last.split())
    assert staging <= state + 2**20
    # The state that is made anew each time, the staging memory, and a fixed sum for threads and buffers.
    assert peak - before <= state + staging + 16 * 2**20
