"""The end of the interpreter neither cuts a running save short nor hangs on a dead store.

A healthy store: the process waits and ends with its own exit code. A store that never answers: a
bounded wait, a message, a non-zero exit. ``os._exit``: no checkpoint at all rather than a part of one.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from children import run_script

import midstride as ms

_SCRIPT = """
    import atexit, os, sys, threading
    import numpy as np
    import midstride as ms
    from hooked import Gate, HookedStorage
    from midstride import limits
    from midstride.storage import open_storage

    path, store, way = sys.argv[1:]
    gate = Gate()
    ckpt = ms.Checkpointer(HookedStorage(open_storage(path), gate))
    if store == "slow":
        # Handlers run last in, first out: nothing is written before the interpreter is on its way out.
        atexit.register(gate.open)
    else:
        limits.EXIT_SECONDS = 0.5
    ckpt.save(1, {"model": {"w": np.arange(300_000)}, "optimizer": {"m": np.ones(300_000)}})
    assert gate.reached.wait(60)
    if way == "os._exit":
        os._exit(0)
    if way == "raise":
        raise KeyError("in main")
    if way == "sys.exit":
        sys.exit(7)
"""


@pytest.mark.parametrize(("way", "code"), [("fall off", 0), ("raise", 1), ("sys.exit", 7)])
def test_healthy_store_is_waited_for(tmp_path: Path, way: str, code: int) -> None:
    ended = run_script(_SCRIPT, tmp_path / "run", "slow", way)
    assert ended.returncode == code, ended.stderr
    assert ("KeyError" in ended.stderr) == (way == "raise")
    assert "midstride" not in ended.stderr and "shutdown" not in ended.stderr
    run = ms.open(tmp_path / "run")
    info = run.latest()
    assert info is not None and info.step == 1
    assert run.verify() == {info.name: []}


@pytest.mark.parametrize("way", ["fall off", "raise", "sys.exit"])
def test_dead_store_is_given_up(tmp_path: Path, way: str) -> None:
    ended = run_script(_SCRIPT, tmp_path / "run", "dead", way)
    assert ended.returncode == 1, ended.stderr
    assert "midstride: Deadline: waited for the save of step 1 to become durable" in ended.stderr
    assert "no progress for 0.5 s" in ended.stderr
    assert ms.open(tmp_path / "run").latest() is None


def test_sudden_exit_leaves_no_checkpoint(tmp_path: Path) -> None:
    ended = run_script(_SCRIPT, tmp_path / "run", "dead", "os._exit")
    assert ended.returncode == 0
    run = ms.open(tmp_path / "run")
    assert run.latest() is None and run.checkpoints() == []
    with ms.Checkpointer(tmp_path / "run") as ckpt:
        assert ckpt.restore() is None, "nothing was ever saved: a run may start at step 0"
