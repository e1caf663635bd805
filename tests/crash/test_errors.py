"""ENOSPC and EIO at every operation: the trainer is told, nothing older is lost, the next save works.

A full disk is told at once; an EIO inside a save is tried again, and told when it stays.
"""

from __future__ import annotations

import errno
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

import midstride as ms
from midstride.testing import FaultyStorage, Operation, fail_at, fail_from
from midstride.testing.faulty import Fault
from tests.crash.runs import RUNS, Acknowledged, leftovers, problems, state_of

MAY_FAIL = {"remove_file", "remove_folder", "sync_folder", "list_folder", "open_file", "read", "close"}
"""What may fail without failing the save: deleting what is old and all that belongs to it, and looking at what is
there (a manifest that cannot be read counts in the order as one that can)."""


def run_with(run: Callable[..., None], folder: Path, fault: Fault) -> tuple[list[str], Acknowledged, Exception | None]:
    storage = FaultyStorage(ms.LocalStorage(folder), fault)
    said: Acknowledged = []
    error: Exception | None = None
    try:
        run(storage, said)
    except ms.MidstrideError as raised:
        error = raised
    return [operation.name for operation in storage.operations], said, error


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO], ids=["ENOSPC", "EIO"])
@pytest.mark.parametrize("run", RUNS.values(), ids=RUNS.keys())
def test_one_failure(run: Callable[..., None], code: int, tmp_path: Path) -> None:
    names, everything, error = run_with(run, tmp_path / "whole", Fault())
    assert error is None
    silent = []
    opened = names.index("make_folder")
    for number in range(1, len(names) + 1):
        folder = tmp_path / str(number)
        failed, said, error = run_with(run, folder, fail_at(number, code))
        where = f"operation {number}, {failed[number - 1]}"
        assert problems(ms.LocalStorage(folder), said) == [], where
        if error is None:
            assert said == everything, where
            silent.append(failed[number - 1])
        else:
            assert "injected" in str(error) or "injected" in str(error.__cause__), where
            assert code != errno.EIO or number <= opened, where
        with ms.Checkpointer(folder) as ckpt:
            ckpt.restore()
            ckpt.save(9, state_of(9)).result()
        assert leftovers(ms.LocalStorage(folder)) == [], where
    assert code == errno.EIO or set(silent) <= MAY_FAIL, silent


@pytest.mark.parametrize("run", RUNS.values(), ids=RUNS.keys())
def test_the_disk_is_gone_for_good(run: Callable[..., None], tmp_path: Path) -> None:
    names, _, _ = run_with(run, tmp_path / "whole", Fault())
    for number in range(1, len(names) + 1):
        folder = tmp_path / str(number)
        _, said, _ = run_with(run, folder, fail_from(number, errno.EIO))
        assert problems(ms.LocalStorage(folder), said) == [], number


@pytest.mark.parametrize("times", [1, 3, 4])
def test_a_flaky_disk(times: int, pauses: list[float], tmp_path: Path) -> None:
    """Three faults in a row are ridden out, in an attempt of its own each, with longer and longer pauses."""
    for name in ("make_folder", "create_file", "write", "sync", "sync_folder", "rename"):
        pauses.clear()
        storage = FaultyStorage(ms.LocalStorage(tmp_path / name))
        with ms.Checkpointer(storage) as ckpt:
            ckpt.save(1, state_of(1)).result()
            storage.fault = _Some(name, times, errno.EIO)
            pending = ckpt.save(2, state_of(2))
            if times == 4:
                with pytest.raises(ms.SaveError, match="injected"):
                    pending.result()
            else:
                assert pending.result().step == 2
            assert pauses == [0.5, 2.0, 8.0][:times]
            assert ckpt.statistics().saves_retried == min(times, 3)
            assert ckpt.statistics().saves_failed == (times == 4)
        assert problems(storage, [(1, 1)] if times == 4 else [(1, 1), (2, 2)]) == []
        assert leftovers(storage) == []


def test_a_failed_sync_is_never_retried_on_the_same_file(tmp_path: Path) -> None:
    storage = FaultyStorage(ms.LocalStorage(tmp_path / "run"))
    with ms.Checkpointer(storage) as ckpt:
        ckpt.save(1, state_of(1)).result()
        storage.fault = _Some("sync", 1, errno.EIO)
        before = len(storage.operations)
        ckpt.save(2, state_of(2)).result()
    synced = [operation.target for operation in storage.operations[before:] if operation.name == "sync"]
    assert len(synced) == len(set(synced))
    assert len({target.split("/")[0] for target in synced if "/" in target}) == 2, "a folder for each attempt"


def test_a_budget_that_does_not_hold_the_state_leaves_nothing_to_try_again(pauses: list[float], tmp_path: Path) -> None:
    storage = FaultyStorage(ms.LocalStorage(tmp_path / "run"))
    with ms.Checkpointer(storage, staging_bytes=256 * 1024) as ckpt:
        ckpt.save(1, {"w": np.ones(10**6)}).result()
        storage.fault = _Some("write", 1, errno.EIO)
        with pytest.raises(ms.WriteError, match="injected"):
            ckpt.save(2, {"w": np.ones(10**6)}).result()
    assert pauses == []


@pytest.mark.parametrize("run", RUNS.values(), ids=RUNS.keys())
def test_an_error_that_lies(run: Callable[..., None], tmp_path: Path) -> None:
    """The operation has taken effect, and is told as failed."""
    names, _, _ = run_with(run, tmp_path / "whole", Fault())
    for number in range(1, len(names) + 1):
        folder = tmp_path / str(number)
        _, said, _ = run_with(run, folder, fail_at(number, errno.EIO, late=True))
        assert problems(ms.LocalStorage(folder), said) == [], names[number - 1]


def test_saving_goes_on_with_the_same_object(tmp_path: Path) -> None:
    storage = FaultyStorage(ms.LocalStorage(tmp_path / "run"))
    with ms.Checkpointer(storage, keep=2) as ckpt:
        ckpt.save(1, state_of(1)).result()
        for step, name in enumerate(["make_folder", "create_file", "write", "sync", "sync_folder", "rename"], 2):
            ckpt.wait()  # also for the retirement, which is not what is to fail
            storage.fault = _Some(name, 1, errno.ENOSPC)
            failing = ckpt.save(step, state_of(step))
            with pytest.raises(ms.SaveError) as caught:
                failing.result()
            assert f"{name} (injected)" in str(caught.value)
            assert ms.open(storage).load()["value"] < step
            assert ckpt.save(step, state_of(step)).result().step == step
    assert ms.open(storage).load()["value"] == 7
    assert leftovers(storage) == []


class _Some(Fault):
    """The next few operations of a kind fail, one for each attempt."""

    def __init__(self, name: str, times: int, code: int) -> None:
        self._name, self._left, self._code = name, times, code
        self._failed: set[str] = set()

    def before(self, operation: Operation) -> None:
        attempt = operation.target.split("/")[0]
        if operation.name == self._name and self._left and attempt not in self._failed:
            self._left -= 1
            self._failed.add(attempt)
            fail_at(operation.number, self._code).before(operation)


def test_what_cannot_be_looked_at_is_not_passed_over(tmp_path: Path) -> None:
    """Damage is passed over; a disk that does not answer is not: going back then would be a guess."""
    storage = FaultyStorage(ms.LocalStorage(tmp_path / "run"))
    with ms.Checkpointer(storage) as ckpt:
        for step in (1, 2):
            newest = ckpt.save(step, state_of(step)).result()
    for name in ("manifest.json", "model.safetensors"):
        storage.fault = _Unreadable(f"{newest.name}/{name}")
        for look in (ms.Checkpointer(storage).restore, ms.Checkpointer(storage).restore):
            with pytest.raises(ms.Unavailable, match="injected"):
                look()
        restored = ms.Checkpointer(storage).restore(step=1)
        assert restored is not None
        assert restored.step == 1
    storage.fault = _Unreadable(f"{newest.name}/manifest.json")
    with pytest.raises(ms.Unavailable):
        ms.Checkpointer(storage).latest()
    storage.fault = Fault()
    assert ms.open(storage).load()["value"] == 2


class _Unreadable(Fault):
    def __init__(self, target: str) -> None:
        self._target = target

    def before(self, operation: Operation) -> None:
        if operation.name in ("open_file", "read") and operation.target == self._target:
            fail_at(operation.number, errno.EIO).before(operation)


@pytest.mark.parametrize("name", ["remove_file", "sync_folder", "remove_folder"])
def test_a_retirement_that_failed_is_made_up_for(name: str, tmp_path: Path) -> None:
    storage = FaultyStorage(ms.LocalStorage(tmp_path / "run"))
    with ms.Checkpointer(storage, keep=1) as ckpt:
        first = ckpt.save(1, state_of(1)).result()
        storage.fault = _In(first.name, name)
        ckpt.save(2, state_of(2)).result()
        ckpt.wait()
        storage.fault = Fault()
        ckpt.save(3, state_of(3)).result()
        ckpt.wait()
        assert [info.step for info in ckpt.checkpoints()] == [3]
    assert leftovers(storage) == []


class _In(Fault):
    """An operation fails in one folder."""

    def __init__(self, folder: str, name: str) -> None:
        self._folder, self._name = folder, name

    def before(self, operation: Operation) -> None:
        if operation.name == self._name and operation.target.startswith(self._folder):
            fail_at(operation.number, errno.EIO).before(operation)
