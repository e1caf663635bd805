"""ENOSPC and EIO at every operation: the trainer is told, nothing older is lost, the next save works.

A full disk is told at once; an EIO inside a save is tried again, and told when it stays.
"""

from __future__ import annotations

import errno
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import midstride as ms
from midstride.format import layout
from midstride.restore.catalog import scan
from midstride.storage import Storage
from midstride.testing import FaultyStorage, Operation, fail_at, fail_from
from midstride.testing.faulty import Fault
from tests.crash.broken import ERRORS, in_force
from tests.crash.runs import RUNS, Acknowledged, leftovers, problems, state_of

LOOKS = {"list_folder", "open_file", "read"}
"""May fail without failing the save: a manifest that cannot be read counts in the order as one that can."""

KINDS: dict[str, Callable[[int], Fault]] = {
    "ENOSPC": lambda number: fail_at(number, errno.ENOSPC),
    "EIO": lambda number: fail_at(number, errno.EIO),
    "EIO for good": lambda number: fail_from(number, errno.EIO),
    "EIO, and took effect": lambda number: fail_at(number, errno.EIO, late=True),
}
"""What happens to operation ``number``."""


def run_with(
    run: Callable[..., None], folder: Path, fault: Fault, wrap: Callable[[Storage], Any] = lambda storage: storage
) -> tuple[list[Operation], Acknowledged, Exception | None]:
    storage = FaultyStorage(ms.LocalStorage(folder), fault)
    said: Acknowledged = []
    error: Exception | None = None
    try:
        run(wrap(storage), said)
    except ms.MidstrideError as raised:
        error = raised
    return storage.operations, said, error


def sweep(
    kind: str, run: Callable[..., None], base: Path, wrap: Callable[[Storage], Any] = lambda storage: storage
) -> Iterator[tuple[str, list[str]]]:
    """A fault at every operation of a run: where, and what is wrong after it."""
    whole, everything, error = run_with(run, base / "whole", Fault(), wrap)
    assert error is None
    for number in range(1, len(whole) + 1):
        folder = base / str(number)
        operations, said, error = run_with(run, folder, KINDS[kind](number), wrap)
        failed = operations[number - 1]
        wrong = problems(ms.LocalStorage(folder), said)
        if error is None and said != everything:
            wrong.append("not everything was saved, and nothing was raised")
        if error is not None and "injected" not in f"{error} {error.__cause__}":
            wrong.append(f"it was not told what failed: {error!r}")
        if kind == "EIO" and error is not None and "make_folder" in [o.name for o in operations[:number]]:
            wrong.append("an error that passes was not ridden out")
        if kind == "ENOSPC" and error is None and not may_fail(operations, failed):
            wrong.append("it failed in silence")
        wrong += [f"{name} was synced again" for name in synced_again(operations)]
        if kind != "EIO for good":
            wrong += told_as_failed(folder, said, error)
        wrong += next_run(folder)
        yield f"operation {number}, {failed.name} {failed.target}", wrong


def may_fail(operations: list[Operation], failed: Operation) -> bool:
    """Whether the save may go well all the same: deleting what is old, and looking at what is there."""
    folder = failed.target.split("/")[0]
    if failed.name == "sync_folder":
        retired = [o.target for o in operations[: failed.number] if o.name == "remove_file"]
        return f"{folder}/{layout.MANIFEST}" in retired
    return failed.name in LOOKS or failed.name.startswith("remove_")


def synced_again(operations: list[Operation]) -> list[str]:
    synced = [operation.target for operation in operations if operation.name == "sync"]
    return sorted({name for name in synced if synced.count(name) > 1 and "/" in name})


def told_as_failed(folder: Path, said: Acknowledged, error: Exception | None) -> list[str]:
    """Checkpoints that nobody was told of: each counts in the retention, in the place of a good one."""
    if "could not be marked" in str(error):  # says itself that the checkpoint stays
        return []
    try:
        there = [info.step for info in scan(ms.LocalStorage(folder)).checkpoints]
    except ms.NotFound:
        return []
    steps = [step for step, _ in said]
    return [
        f"step {step} is there, and was not said to be saved" for step in there if there.count(step) > steps.count(step)
    ]


def next_run(folder: Path) -> list[str]:
    """The disk is well again: the next run goes on, and clears up."""
    try:
        with ms.Checkpointer(folder) as ckpt:
            ckpt.restore()
            ckpt.save(9, state_of(9)).result()
    except ms.MidstrideError as error:
        return [f"the next run failed: {error!r}"]
    return [f"{name} was left" for name in leftovers(ms.LocalStorage(folder))]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("run", RUNS.values(), ids=RUNS.keys())
def test_a_fault_at_every_operation(run: Callable[..., None], kind: str, tmp_path: Path) -> None:
    cases = list(sweep(kind, run, tmp_path))
    assert [(where, wrong) for where, wrong in cases if wrong] == []
    assert len(cases) > 30


@pytest.mark.parametrize("broken", ERRORS)
def test_the_sweep_notices_a_broken_variant(broken: str, tmp_path: Path) -> None:
    run, variant = ERRORS[broken]
    with in_force(variant) as wrap:
        assert any(wrong for kind in KINDS for _, wrong in sweep(kind, RUNS[run], tmp_path / kind, wrap))


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
