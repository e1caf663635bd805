"""Open files do not grow with saves or restores, and retired checkpoints give their space back.

With a limit of 64 descriptors a run saves hundreds of small arrays, in one file or in many, again and
again; nothing deleted is held open, so the disk has what the folder shows.
"""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from children import run_well

SCRIPT = """
import os, resource, sys
from pathlib import Path
import numpy as np
import midstride as ms

resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
run, shape = Path(sys.argv[1]), sys.argv[2]

def state(step):
    arrays = {f"layer{n}.w": np.full(20, step, np.int32) for n in range(500)}
    if shape == "one file":
        return {"model": arrays}
    items = list(arrays.items())
    return {f"item{n:02d}": dict(items[n * 16 : n * 16 + 16]) for n in range(31)}

def look():
    found = []
    for fd in os.listdir("/proc/self/fd"):
        try:
            found.append(os.readlink(f"/proc/self/fd/{fd}"))
        except FileNotFoundError:
            pass
    return found

at_start = len(look())
counts, deleted = set(), set()
with ms.Checkpointer(run, keep=2) as ckpt:
    for step in range(int(sys.argv[3])):
        ckpt.save(step, state(step)).result()
        now = look()
        counts.add(len(now))
        deleted.update(name for name in now if name.endswith("(deleted)") and "memfd" not in name)
    for _ in range(int(sys.argv[4])):
        assert ckpt.restore().step == step
        counts.add(len(look()))
print(len(counts), max(counts), len(look()) - at_start, len(deleted))
print(len(list(run.glob("step-*"))), len(list(run.glob("step-*/*.safetensors"))))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc/self/fd")
@pytest.mark.parametrize("shape, saves, restores, files", [("one file", 150, 50, 2), ("many files", 20, 10, 62)])
def test_sixty_four_descriptors_are_enough(tmp_path: Path, shape: str, saves: int, restores: int, files: int) -> None:
    first, second = run_well(SCRIPT, tmp_path, shape, saves, restores).splitlines()
    different, most, left, deleted = map(int, first.split())
    assert different == 1, "as many after each save and each restore as after the first"
    assert most < 20
    assert left == 0, "and none when the run is closed"
    assert deleted == 0
    assert second == f"2 {files}"
