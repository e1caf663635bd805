"""Files and folders have the modes that the umask gives, and a refusal to read is called one.

A second user reads what the first one's umask lets them read; what it does not is ``PermissionDenied``,
never "no checkpoint" and never a quiet step back to an older one.
"""

from __future__ import annotations

import os
import shutil
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from children import run_well

_SAVE = """
    import sys
    import numpy as np
    import midstride as ms
    with ms.Checkpointer(sys.argv[1]) as ckpt:
        for step in (1, 2):
            ckpt.save(step, {"model": {"w": np.full(3000, step)}}).result()
"""

_READ = """
    import os, sys
    import numpy as np
    import midstride as ms
    from midstride import checkpointer, reader
    path, expected = sys.argv[1:]
    if os.geteuid() == 0:  # root may read everything: be somebody else
        os.setegid(65534)
        os.seteuid(65534)
    def read(look):
        try:
            found = look()
            return found if found is None or isinstance(found, int) else found.step
        except ms.MidstrideError as error:
            return type(error).__name__
    found = {
        read(lambda: ms.open(path).latest()),
        read(lambda: ms.Checkpointer(path).latest()),
        read(lambda: ms.Checkpointer(path).restore()),
        read(lambda: int(ms.open(path).load()["model"]["w"][0])),
    }
    print(*found)
    assert {str(f) for f in found} == {expected}
"""


@pytest.fixture
def public() -> Iterator[Path]:
    """A folder that every user may enter, which pytest's own are not."""
    folder = Path(tempfile.mkdtemp())
    folder.chmod(0o755)
    yield folder
    shutil.rmtree(folder)


def _mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


@pytest.mark.parametrize("umask", [0o022, 0o002, 0o077])
@pytest.mark.parametrize("setgid", [False, True])
def test_modes_follow_the_umask(public: Path, umask: int, setgid: bool) -> None:
    parent = public / "runs"
    parent.mkdir()
    if setgid:
        if os.geteuid() == 0:
            os.chown(parent, -1, 65534)
        parent.chmod(0o2755)
    run = parent / "run"
    run_well(_SAVE, run, umask=umask)
    seen = sorted(run.rglob("*"))
    assert {p.suffix for p in seen} >= {".json", ".safetensors"}
    for path in [run, *seen]:
        mode = _mode(path)
        expected = (0o777 if path.is_dir() else 0o666) & ~umask
        assert mode & 0o777 == expected, f"{path} has mode {mode:o}"
        if setgid:
            assert path.stat().st_gid == parent.stat().st_gid, "the folder's group is handed down"
            assert bool(mode & stat.S_ISGID) == path.is_dir()
    if os.geteuid() == 0 and not setgid:
        run_well(_READ, run, "2" if umask & 0o007 != 0o007 else "PermissionDenied")


@pytest.mark.parametrize("what", ["*", "model.safetensors", "manifest.json", "midstride.json", "step folder", "run"])
def test_refusal_is_told_as_one(public: Path, what: str) -> None:
    run = public / "run"
    run_well(_SAVE, run, umask=0o022)
    newest = max(run.glob("step-*"))
    places = {"*": list(newest.iterdir()), "midstride.json": [run / what], "step folder": [newest], "run": [run]}
    for path in places.get(what, [newest / what]):
        path.chmod(0)
    run_well(_READ, run, "PermissionDenied")
    run.chmod(0o755)
