"""Open files do not grow with saves or restores, and retired checkpoints give their space back.

With a limit of 64 descriptors a run saves hundreds of small arrays, in one file or in many, again and
again; nothing deleted is held open or mapped, so the disk has what the folder shows. The long form
also asks a file system that nothing else uses.
"""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from children import run_script
from helpers import short_or_long

SCRIPT = """
import ctypes, os, resource, sys
from pathlib import Path

run, shape, disk = Path(sys.argv[1]), sys.argv[2], sys.argv[5]
if disk == "own":  # an empty file system that this process alone sees
    user, group = os.getuid(), os.getgid()
    libc = ctypes.CDLL(None)
    if libc.unshare(0x10020000):  # CLONE_NEWUSER | CLONE_NEWNS
        sys.exit(77)
    Path("/proc/self/setgroups").write_text("deny")
    Path("/proc/self/uid_map").write_text(f"{user} {user} 1")
    Path("/proc/self/gid_map").write_text(f"{group} {group} 1")
    if libc.mount(b"tmpfs", os.fsencode(run), b"tmpfs", 0, b"size=256m"):
        sys.exit(77)

import numpy as np
import midstride as ms

resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))

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

def mapped():
    return [line.split(maxsplit=5)[-1] for line in Path("/proc/self/maps").read_text().splitlines()]

def space():
    # What du sees, what df sees, and what the files of the two checkpoints need in whole blocks.
    du = sum(path.lstat().st_blocks * 512 for path in (run, *run.rglob("*")))
    disk = os.statvfs(run)
    df = (disk.f_blocks - disk.f_bfree) * disk.f_frsize
    return du, df, sum(-(-path.stat().st_size // 4096) * 4096 for path in run.glob("step-*/*"))

at_start = len(look())
counts, deleted = set(), set()
with ms.Checkpointer(run, keep=2) as ckpt:
    for step in range(int(sys.argv[3])):
        ckpt.save(step, state(step))
        ckpt.wait()  # for the retirement too
        now = look()
        counts.add(len(now))
        deleted.update(name for name in now + mapped() if name.endswith("(deleted)") and "memfd" not in name)
    for _ in range(int(sys.argv[4])):
        assert ckpt.restore().step == step
        counts.add(len(look()))
    print(*space())
print(len(counts), max(counts), len(look()) - at_start, len(deleted))
print(len(list(run.glob("step-*"))), len(list(run.glob("step-*/*.safetensors"))))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc/self/fd")
@pytest.mark.parametrize(
    "shape, saves, restores, disk, files",
    short_or_long(
        short=[("one file", 150, 50, "shared", 2), ("many files", 20, 10, "shared", 62)],
        long=[
            (shape, 300, 100, disk, files)
            for shape, files in (("one file", 2), ("many files", 62))
            for disk in ("shared", "own")
        ],
    ),
)
def test_sixty_four_descriptors_are_enough(
    tmp_path: Path, shape: str, saves: int, restores: int, disk: str, files: int
) -> None:
    ended = run_script(SCRIPT, tmp_path, shape, saves, restores, disk)
    if ended.returncode == 77:
        pytest.skip("no file system of its own to be had: the system refuses a mount namespace")
    assert ended.returncode == 0, ended.stderr
    space, first, second = ended.stdout.splitlines()
    different, most, left, deleted = map(int, first.split())
    assert different == 1, "as many after each save and each restore as after the first"
    assert most < 20
    assert left == 0, "and none when the run is closed"
    assert deleted == 0
    assert second == f"2 {files}"
    du, df, kept = map(int, space.split())
    assert du <= kept + 2**16, "two checkpoints, three folders, the marker and the lock"
    if disk == "own":
        assert df == du
