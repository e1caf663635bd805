"""ENOSPC and EIO at every operation: the trainer is told, nothing older is lost, the next save works."""

from __future__ import annotations

import errno
from collections.abc import Callable
from pathlib import Path

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
        with ms.Checkpointer(folder) as ckpt:
            ckpt.restore()
            ckpt.save(9, state_of(9)).result()
        assert leftovers(ms.LocalStorage(folder)) == [], where
    assert set(silent) <= MAY_FAIL, silent


@pytest.mark.parametrize("run", RUNS.values(), ids=RUNS.keys())
def test_the_disk_is_gone_for_good(run: Callable[..., None], tmp_path: Path) -> None:
    names, _, _ = run_with(run, tmp_path / "whole", Fault())
    for number in range(1, len(names) + 1):
        folder = tmp_path / str(number)
        _, said, _ = run_with(run, folder, fail_from(number, errno.EIO))
        assert problems(ms.LocalStorage(folder), said) == [], number


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
            storage.fault = _Once(name)
            failing = ckpt.save(step, state_of(step))
            with pytest.raises(ms.SaveError) as caught:
                failing.result()
            assert f"{name} (injected)" in str(caught.value)
            assert ms.open(storage).load()["value"] < step
            assert ckpt.save(step, state_of(step)).result().step == step
    assert ms.open(storage).load()["value"] == 7
    assert leftovers(storage) == []


class _Once(Fault):
    def __init__(self, name: str) -> None:
        self._name, self._done = name, False

    def before(self, operation: object) -> None:
        if getattr(operation, "name", None) == self._name and not self._done:
            self._done = True
            fail_at(getattr(operation, "number", 0), errno.ENOSPC).before(operation)  # type: ignore[arg-type]


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
