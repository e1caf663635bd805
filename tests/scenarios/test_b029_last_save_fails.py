"""A last save that fails never looks like success: somebody is told, or the process ends non-zero.

``close()`` and the ``with`` block raise; without either, the failure is printed at exit and the exit
code is 1; the user's own exception is the one that is seen, with ours as a note on it. ``sys.exit(0)``
inside the block claims success, so the failure takes its place.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from children import run_script

_SCRIPT = """
    import sys
    import numpy as np
    import midstride as ms
    from hooked import HookedStorage
    from midstride.errors import NoSpace
    from midstride.storage import open_storage

    path, mode = sys.argv[1:]

    def hook(operation, name):
        if operation == "sync":
            raise NoSpace("injected: the disk is full")

    storage = HookedStorage(open_storage(path), hook)
    state = {"w": np.zeros(100)}
    if mode == "close":
        ckpt = ms.Checkpointer(storage)
        ckpt.save(1, state)
        ckpt.close()
    elif mode == "with":
        with ms.Checkpointer(storage) as ckpt:
            ckpt.save(1, state)
    elif mode == "nothing":
        ckpt = ms.Checkpointer(storage)
        ckpt.save(1, state)
    elif mode == "dropped":
        ms.Checkpointer(storage).save(1, state)
    elif mode == "own":
        with ms.Checkpointer(storage) as ckpt:
            ckpt.save(1, state)
            raise KeyError("the user's own")
    elif mode == "exit":
        ckpt = ms.Checkpointer(storage)
        ckpt.save(1, state)
        sys.exit(0)
    elif mode == "exit-with":
        with ms.Checkpointer(storage) as ckpt:
            ckpt.save(1, state)
            sys.exit(0)
    print("went on", flush=True)
"""


@pytest.mark.parametrize("mode", ["close", "with", "nothing", "dropped", "own", "exit", "exit-with"])
def test_exit_tells_of_the_failure(tmp_path: Path, mode: str) -> None:
    ended = run_script(_SCRIPT, tmp_path / "run", mode)
    assert ended.returncode == 1, ended.stderr
    assert "injected: the disk is full" in ended.stderr
    assert ("went on" in ended.stdout) == (mode in ("nothing", "dropped"))
    last = ended.stderr.strip().splitlines()
    if mode == "own":
        assert any(line.startswith("KeyError: ") and "the user's own" in line for line in last)
        assert any(line.startswith("midstride: WriteError") for line in last), "a note on the user's exception"
        assert not any(line.startswith("midstride.errors.WriteError") for line in last)
    elif mode in ("close", "with", "exit-with"):
        assert last[-1].startswith("midstride.errors.WriteError: step 1 could not be saved")
    else:
        assert any(line.startswith("midstride: WriteError: step 1 could not be saved") for line in last)
    assert not list((tmp_path / "run").glob("step-*/manifest.json"))
