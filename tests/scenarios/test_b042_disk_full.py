"""A full disk, at whatever call it shows: told to the trainer, nothing earlier lost, and no bytes left behind.

``ENOSPC``, ``EDQUOT`` and ``EIO`` at every system call that a save makes; a real small file system where
the system lets us mount one; a real limit on file sizes. The same Checkpointer saves again afterwards,
and older checkpoints are never deleted to make room.
"""

from __future__ import annotations

import contextlib
import errno
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from children import run_well

import midstride as ms
from midstride.errors import CommitError, NoSpace, Unavailable, WriteError
from midstride.storage import local

_CALLS = ("mkdir", "open", "pwrite", "ftruncate", "fdatasync", "fsync", "replace", "close")


class _FaultyOs:
    """The ``os`` module of the local storage, one of whose writing calls fails."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.fail_at: int | None = None
        self.fail_from = False
        self.code = 0

    def __getattr__(self, name: str) -> Any:
        real = getattr(os, name)
        if name not in _CALLS:
            return real

        def call(*args: Any, **options: Any) -> Any:
            if name == "open" and not args[1] & os.O_CREAT:
                return real(*args, **options)
            self.calls.append(name)
            here = len(self.calls) - 1
            if self.fail_at is not None and (here == self.fail_at or (self.fail_from and here > self.fail_at)):
                if name == "close":
                    real(*args)
                raise OSError(self.code, os.strerror(self.code))
            return real(*args, **options)

        return call

    def heal(self) -> None:
        self.calls, self.fail_at, self.fail_from = [], None, False


@pytest.fixture
def faulty(monkeypatch: pytest.MonkeyPatch) -> _FaultyOs:
    faulty = _FaultyOs()
    monkeypatch.setattr(local, "os", faulty)
    return faulty


def _state(step: int) -> dict[str, Any]:
    return {"model": {"w": np.full(3000, step)}, "optimizer": {"m": np.full(100, step)}}


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT, errno.EIO])
@pytest.mark.parametrize("fail_from", [False, True], ids=["once", "from then on"])
def test_every_call_of_a_save(tmp_path: Path, faulty: _FaultyOs, code: int, fail_from: bool) -> None:
    run = tmp_path / "run"
    with ms.Checkpointer(run, keep=1) as ckpt:
        ckpt.save(0, _state(0)).result()
        faulty.heal()
        ckpt.save(1, _state(1)).result()
        calls = faulty.calls[: faulty.calls.index("replace") + 2]  # up to the sync that ends the commit
        assert set(calls) == set(_CALLS)
        newest, step = 1, 1
        for fail_at, name in enumerate(calls):
            step += 1
            ckpt.wait()
            faulty.heal()
            faulty.fail_at, faulty.fail_from, faulty.code = fail_at, fail_from, code
            try:
                ckpt.save(step, _state(step)).result()
            except (WriteError, CommitError) as error:
                told = error.__cause__
                expected = Unavailable if code == errno.EIO else NoSpace
                assert isinstance(told, expected)
                assert os.strerror(code) in str(error) and f"step {step} " in str(error)
                assert "Earlier checkpoints are untouched" in str(error)
            else:
                ridden_out = code == errno.EIO and not fail_from
                assert name in ("close", "ftruncate") or ridden_out, f"a failed {name} was not told"
                newest = step
            with contextlib.suppress(ms.MidstrideError):
                ckpt.wait()
            faulty.heal()
            assert [info.step for info in ms.open(run).checkpoints()] == [newest]
            assert all(problems == [] for problems in ms.open(run).verify().values())
            folders = [p.name for p in run.glob("step-*")]
            assert len(folders) == 1 or fail_from, f"{name}: {folders}"
        # The same object, after space was made.
        ckpt.save(step + 1, _state(step + 1)).result()
        ckpt.wait()
        assert [info.step for info in ckpt.checkpoints()] == [step + 1]
    with ms.Checkpointer(run) as ckpt:
        restored = ckpt.restore()
        assert restored is not None and (restored.state["model"]["w"] == step + 1).all()
        ckpt.save(step + 2, _state(step + 2)).result()
    assert len(list(run.glob("step-*"))) == 2, "what could not be removed then is swept by the next run"


def test_full_disk_is_found_before_time_is_spent(
    tmp_path: Path, faulty: _FaultyOs, monkeypatch: pytest.MonkeyPatch
) -> None:
    with ms.Checkpointer(tmp_path / "run") as ckpt:
        ckpt.save(0, _state(0)).result()
        monkeypatch.setattr(local, "_fallocate", lambda descriptor, size: errno.ENOSPC)
        faulty.heal()
        with pytest.raises(WriteError, match=r"[0-9]+ bytes are needed and [0-9]+ are free"):
            ckpt.save(1, _state(1)).result()
        assert "pwrite" not in faulty.calls
        monkeypatch.undo()
        ckpt.save(2, _state(2)).result()
        assert [info.step for info in ckpt.checkpoints()] == [0, 2]


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 1 MiB."""
    disk = tmp_path / "disk"
    disk.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=1m", "midstride-test", str(disk)]
    mounted = subprocess.run(command, capture_output=True, text=True) if os.geteuid() == 0 else None
    if mounted is None or mounted.returncode:
        pytest.skip("mounting a small file system needs root's rights; the limit on file sizes is tested instead")
    yield disk
    subprocess.run(["umount", str(disk)], check=True)


def test_small_file_system(small_disk: Path) -> None:
    with ms.Checkpointer(small_disk / "run", keep=1) as ckpt:
        ckpt.save(0, {"w": np.zeros(300_000, np.uint8)}).result()
        for step, nbytes in enumerate([5_000_000, 1_000_000, 800_000, 740_000, 730_000], 1):
            with pytest.raises(WriteError, match=r"[0-9]+ bytes are needed and [0-9]+ are free"):
                ckpt.save(step, {"w": np.zeros(nbytes, np.uint8)}).result()
            # keep=1 would let the old one go after a commit, and there was none.
            assert [info.step for info in ckpt.checkpoints()] == [0]
            assert len(list((small_disk / "run").glob("step-*"))) == 1
        ballast = small_disk / "ballast"
        ballast.write_bytes(bytes(600_000))
        with pytest.raises(WriteError):
            ckpt.save(8, {"w": np.zeros(300_000, np.uint8)}).result()
        ballast.unlink()
        ckpt.save(9, {"w": np.ones(300_000, np.uint8)}).result()
        ckpt.wait()
        assert [info.step for info in ckpt.checkpoints()] == [9]
    assert all(problems == [] for problems in ms.open(small_disk / "run").verify().values())


_LIMITED = """
    import resource, sys
    import numpy as np
    import midstride as ms
    from midstride.errors import NoSpace, WriteError

    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    with ms.Checkpointer(sys.argv[1], keep=1, engine="thread") as ckpt:
        ckpt.save(0, {"w": np.zeros(100_000, np.uint8)}).result()
        for step in range(1, 20):
            resource.setrlimit(resource.RLIMIT_FSIZE, (step * 5000, hard))
            try:
                ckpt.save(step, {"w": np.zeros(100_000, np.uint8)}).result()
                raise AssertionError("larger than a file may be")
            except WriteError as error:
                assert isinstance(error.__cause__, NoSpace), error.__cause__
            assert [info.step for info in ckpt.checkpoints()] == [0]
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        ckpt.save(20, {"w": np.ones(100_000, np.uint8)}).result()
        assert [info.step for info in ckpt.checkpoints()] == [20]
"""


def test_limit_on_file_sizes(tmp_path: Path) -> None:
    run_well(_LIMITED, tmp_path / "run")
    assert all(problems == [] for problems in ms.open(tmp_path / "run").verify().values())
