"""Errors of the disk while checkpoints are written: told at the next step with their cause, and survived.

One training run meets "no space left" and "input/output error" at every file operation of a save, one after the other
(``operations.py`` numbers them): at the next step it is told; what was saved before is whole; training goes on, and the
next save works. Where the tests may mount a file system, a small real disk is filled up, and made read-only.

``MIDSTRIDE_LONG=1`` takes every operation with both errors; the short form every second with one or the other, and every
eighth of a first save.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import resource
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("tensorflow")
pytest.importorskip("midstride.tensorflow")

import tensorflow as tf

import midstride as ms
from midstride import limits
from midstride.tensorflow import CheckpointFolder, latest_checkpoint
from tests.frameworks.tensorflow.operations import Operations
from tests.frameworks.tensorflow.training import (
    WATCHDOG_SECONDS,
    CountingListener,
    Loop,
    Task,
    loop,
    make_task,
    ours,
    saved_step,
    steps_on_disk,
    v1,
    values_of,
)

LONG = os.environ.get("MIDSTRIDE_LONG") == "1"
KEEP = 2

SYSTEM_CODES = {"no space": errno.ENOSPC, "input/output": errno.EIO}
TENSORFLOW_ERRORS = {"no space": tf.errors.ResourceExhaustedError, "input/output": tf.errors.UnknownError}


def error_of(operation: str, kind: str, path: str) -> Exception:
    """As the one who does the operation would raise it."""
    if (
        operation in {"save op of", "after save op of", "WritableFile", "append", "flush", "close"}
        or operation[0].isupper()
    ):
        return TENSORFLOW_ERRORS[kind](None, None, f"{kind} (injected); {path}")
    return OSError(SYSTEM_CODES[kind], f"{kind} (injected)", path)


class BrokenDisk:
    """Fails at the n-th operation after ``break_at``, and at each that is like it, until it is mended."""

    def __init__(self, folder: Path, kind: str) -> None:
        self._kind = kind
        self._at: int | None = None
        self._count = 0
        self._like = ""
        self.broken = ""
        self.raised: list[Exception] = []
        self.operations = Operations(str(folder), self._act)

    def break_at(self, number: int) -> None:
        self._at, self._count, self._like, self.raised = number, 0, "", []

    def mend(self) -> None:
        self._at = None

    def _act(self, name: str, path: str) -> None:
        if self._at is None:
            return
        self._count += 1
        # Drafts have a new name each time.
        operation = f"{name} {re.sub('tmp[0-9a-f]+$', 'tmp', path)}"
        if self._count == self._at:
            self._like, self.broken = operation, self.operations.seen[-1]
        if operation == self._like:
            self.raised.append(error_of(name, self._kind, path))
            raise self.raised[-1]


def causes(error: BaseException | None) -> list[BaseException]:
    """An error and what it was raised from."""
    found = []
    while error is not None:
        found.append(error)
        error = error.__cause__ or error.__context__
    return found


def told_by(work: Callable[[], Any]) -> Exception | None:
    try:
        work()
    except Exception as error:
        return error
    return None


def listed_steps(folder: Path) -> list[int]:
    """What the state file lists; each of them is whole."""
    state = tf.train.get_checkpoint_state(str(folder))
    steps = [int(path.rpartition("-")[2]) for path in state.all_model_checkpoint_paths] if state else []
    for step in steps:
        assert values_of(folder, step) == {float(step)}
    return steps


def task_of() -> Task:
    return make_task(variables=2, floats=10, saver=lambda: v1.train.Saver(max_to_keep=KEEP))


@contextlib.contextmanager
def running(folder: Path, task: Task, **options: Any) -> Iterator[Loop]:
    hook = ours(str(folder), save_steps=1, scaffold=task.scaffold, **options)
    with loop(task, hook, created=True, settle=lambda: hook.wait(WATCHDOG_SECONDS)) as training:
        yield training


@pytest.mark.timeout(1200 if LONG else 120)
@pytest.mark.parametrize("kind", SYSTEM_CODES)
def test_an_error_at_any_operation_of_a_save(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every save here also deletes one. Told, or nothing was lost by it: one or the other."""
    disk, listener = BrokenDisk(tmp_path, kind), CountingListener()
    disk.operations.watch(monkeypatch)
    failed_at = []
    task = task_of()
    with running(tmp_path, task, listeners=[listener]) as training:
        hook = training.hook
        training.run(2)
        number = 0 if LONG else list(SYSTEM_CODES).index(kind)
        while True:
            number += 1 if LONG else 2
            before, statistics, heard = listed_steps(tmp_path), hook.statistics(), listener.after
            disk.break_at(number)
            training.run()
            disk.mend()
            if not disk.raised:
                break
            where = f"{number}: {disk.broken} ({disk.raised[0]!r})"
            failed = hook.statistics().saves_failed - statistics.saves_failed
            assert hook.statistics().saves_committed == statistics.saves_committed + 1 - failed, where
            assert listener.after == heard + 1 - failed, where
            if failed:
                failed_at.append(disk.broken)
                # It may be named already if the last sync failed; then it is whole, as listed_steps sees to.
                after = listed_steps(tmp_path)
                assert after == before or after[:-1] == before[1:], where
                told = told_by(training.run)
                assert any(error is raised for error in causes(told) for raised in disk.raised), where
                assert hook.statistics().failures_in_a_row in (0, 1), where
                hook.wait(WATCHDOG_SECONDS)
            else:
                assert told_by(training.run) is None, where
            now = int(training.session.run(task.step))
            assert listed_steps(tmp_path)[-1] == saved_step(tmp_path) == now, where
            assert latest_checkpoint(tmp_path) == str(tmp_path / f"model.ckpt-{now}"), where
        assert told_by(training.end) is None
    assert len(failed_at) > 10
    for operation in ("save op of", "append", "fsync", "pwrite", "replace checkpoint.midstride-draft") if LONG else ():
        assert any(broken.startswith(operation) for broken in failed_at), f"{operation} was never broken"
    assert len(listed_steps(tmp_path)) == KEEP


def test_saved_is_said_though_what_is_deleted_after_it_cannot_be(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = os.unlink

    def unlink(path: Any, *arguments: Any, **options: Any) -> None:
        if os.fsdecode(path).endswith(".midstride.json"):
            raise OSError(errno.EIO, "injected", path)
        real(path, *arguments, **options)

    listener = CountingListener()
    with running(tmp_path, task_of(), listeners=[listener]) as training:
        training.run(1)
        monkeypatch.setattr(os, "unlink", unlink)
        training.run()
        assert saved_step(tmp_path) == 2
        assert listener.after == 3
        assert training.hook.statistics().saves_failed == 0


def test_an_error_after_the_announcement_is_not_taken_for_another_saver(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def act(name: str, path: str) -> None:
        if name == "fsync" and path == str(tmp_path) and operations.seen[-3].startswith("replace checkpoint"):
            raise OSError(errno.EIO, "injected", path)

    with running(tmp_path, task_of()) as training:
        with monkeypatch.context() as patch:
            operations = Operations(str(tmp_path), act)
            operations.watch(patch)
            training.run()
        assert training.hook.statistics().saves_failed == 1
        assert isinstance(told_by(training.run), ms.MidstrideError)
        training.hook.wait(WATCHDOG_SECONDS)
        training.run()
    assert listed_steps(tmp_path)[-1] == 3
    assert "Another saver" not in caplog.text


@pytest.mark.parametrize("operation", ["append model.ckpt-2.meta", "fsync model.ckpt-2.index"])
def test_a_failed_save_leaves_no_files(operation: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def act(name: str, path: str) -> None:
        if f"{name} {os.path.basename(path)}".startswith(operation):
            raise error_of(name, "no space", path)

    with running(tmp_path, task_of()) as training:
        training.run(1)
        with monkeypatch.context() as patch:
            Operations(str(tmp_path), act).watch(patch)
            training.run()
        assert training.hook.statistics().saves_failed == 1
        left = [file.name for file in tmp_path.iterdir() if file.name.startswith("model.ckpt-2.")]
        assert left == [], "after the failure"
        assert listed_steps(tmp_path) == [0, 1]


@pytest.mark.timeout(1200 if LONG else 120)
@pytest.mark.parametrize("kind", SYSTEM_CODES)
def test_an_error_at_any_operation_of_the_first_save(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Here it may also be raised before anything was begun: by ``begin``, or when the session is made."""
    number = 0 if LONG else 4 * list(SYSTEM_CODES).index(kind)
    while True:
        number += 1 if LONG else 8
        folder = tmp_path / str(number)
        disk, task = BrokenDisk(folder, kind), task_of()
        hook = ours(str(folder), save_steps=1, scaffold=task.scaffold)
        with monkeypatch.context() as patch:
            disk.operations.watch(patch)
            disk.break_at(number)
            told: Exception | None = None
            try:
                with loop(task, hook, created=True, settle=lambda hook=hook: hook.wait(WATCHDOG_SECONDS)) as training:
                    disk.mend()
                    told = told_by(training.run)
                    hook.wait(WATCHDOG_SECONDS)
                    training.run()
                    assert saved_step(folder) == listed_steps(folder)[-1] == 2
                    assert told_by(training.end) is None
            except (OSError, tf.errors.OpError, ms.MidstrideError) as error:
                told = error
        v1.summary.FileWriterCache.clear()
        if not disk.raised:
            break
        where = f"{number}: {disk.broken}"
        ridden_out = "midstride.json.tmp" in where and "unlink" in where  # it need not be there
        assert ridden_out or any(error is raised for error in causes(told) for raised in disk.raised), where
    assert number > 25, "or nothing was broken"


# Real disks


def mount(*arguments: object) -> None:
    """Skips the test where that is not allowed."""
    if shutil.which("mount") is None or subprocess.run(["mount", *map(str, arguments)], capture_output=True).returncode:
        pytest.skip("nothing may be mounted here")


def unmount(folder: Path) -> None:
    subprocess.run(["umount", "-l", str(folder)], check=True)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 2 MiB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mount("-t", "tmpfs", "-o", "size=2m", "tmpfs", folder)
    yield folder
    v1.summary.FileWriterCache.clear()
    unmount(folder)


def fill_up(file: Path, leave: int) -> None:
    """Take all the space there is, but these bytes."""
    with contextlib.suppress(OSError), file.open("wb", buffering=0) as open_file:
        while open_file.write(bytes(4096)):
            pass
    os.truncate(file, file.stat().st_size - leave)


def big_task() -> Task:
    """300 kB a checkpoint."""
    return make_task(variables=3, floats=25_000, saver=lambda: v1.train.Saver(max_to_keep=1))


def test_a_disk_that_is_full_for_a_while(small_disk: Path) -> None:
    ballast = small_disk / "ballast"
    with running(small_disk, big_task()) as training:
        training.run()
        fill_up(ballast, leave=100_000)
        training.run()
        assert training.hook.statistics().saves_failed == 1
        assert listed_steps(small_disk) == [1]
        told = told_by(training.run)
        assert isinstance(told, ms.SaveError | ms.StorageError)
        full = [error for error in causes(told) if isinstance(error, tf.errors.ResourceExhaustedError | OSError)]
        assert full and "space" in str(full[0])
        assert "step 2" in str(told)
        training.hook.wait(WATCHDOG_SECONDS)
        ballast.unlink()
        assert isinstance(told_by(training.run), ms.SaveError | ms.StorageError), "the save of the step that told"
        training.hook.wait(WATCHDOG_SECONDS)
        training.run()
        assert listed_steps(small_disk) == [5]
        training.end()
    assert latest_checkpoint(small_disk) == str(small_disk / "model.ckpt-5")


def test_a_folder_that_becomes_read_only(tmp_path: Path) -> None:
    with running(tmp_path, big_task()) as training:
        training.run()
        mount("--bind", tmp_path, tmp_path)
        try:
            mount("-o", "remount,bind,ro", tmp_path)
            training.run()
            told = told_by(training.run)
            assert told is not None and "ead-only" in str(causes(told))
            training.hook.wait(WATCHDOG_SECONDS)
            assert listed_steps(tmp_path) == [1]
        finally:
            unmount(tmp_path)
        assert told_by(training.run) is not None, "the save of the step that told"
        training.hook.wait(WATCHDOG_SECONDS)
        training.run()
        assert listed_steps(tmp_path) == [5]


def test_a_limit_on_the_size_of_files(tmp_path: Path) -> None:
    """The kernel itself refuses what TensorFlow's op writes."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    with running(tmp_path, big_task()) as training:
        training.run()
        resource.setrlimit(resource.RLIMIT_FSIZE, (200_000, hard))
        try:
            training.run()
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        told = told_by(training.run)
        assert told is not None and "File too large" in str(causes(told))
        training.hook.wait(WATCHDOG_SECONDS)
        training.run()
        assert listed_steps(tmp_path) == [4]


# Faults that pass, and how many are tolerated


class FailingSaver(v1.train.Saver):
    """Its next saves raise these, one each."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.errors: list[Exception] = []

    def save(self, *arguments: Any, **options: Any) -> Any:
        if self.errors:
            raise self.errors.pop(0)
        return super().save(*arguments, **options)


def unavailable() -> Exception:
    return tf.errors.UnavailableError(None, None, "the store is away (injected)")


@pytest.mark.parametrize("kind", ["UnavailableError", "AbortedError", "DeadlineExceededError", "UnknownError"])
def test_a_fault_that_passes_is_ridden_out(kind: str, tmp_path: Path, pauses: list[float]) -> None:
    task = make_task(variables=1, saver=FailingSaver)
    with running(tmp_path, task) as training:
        training.run()
        task.scaffold.saver.errors = [getattr(tf.errors, kind)(None, None, "injected") for _ in range(3)]
        training.run(2)
        statistics = training.hook.statistics()
        assert (statistics.saves_retried, statistics.saves_failed, statistics.saves_committed) == (3, 0, 4)
        assert pauses == list(limits.RETRY_SECONDS)
        assert values_of(tmp_path, 2) == {2.0}, "the snapshot of that step, though training went on"


def test_one_that_lasts_is_told_in_the_end(
    tmp_path: Path, pauses: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "RETRY_SECONDS", (0.25, 0.5))
    task = make_task(variables=1, saver=FailingSaver)
    with running(tmp_path, task) as training:
        task.scaffold.saver.errors = [unavailable() for _ in range(3)]
        last = task.scaffold.saver.errors[-1]
        training.run()
        assert pauses == [0.25, 0.5]
        told = told_by(training.run)
        assert last in causes(told)
        assert isinstance(told, ms.WriteError)
        training.hook.wait(WATCHDOG_SECONDS)
        assert steps_on_disk(tmp_path) == [0, 2]


def test_a_full_disk_is_not_tried_again(tmp_path: Path, pauses: list[float]) -> None:
    task = make_task(variables=1, saver=FailingSaver)
    with running(tmp_path, task) as training:
        task.scaffold.saver.errors = [tf.errors.ResourceExhaustedError(None, None, "full (injected)")]
        training.run()
        assert pauses == []
        assert training.hook.statistics().saves_failed == 1


def full() -> Exception:
    return tf.errors.ResourceExhaustedError(None, None, "full (injected)")


def test_failures_in_a_row_are_tolerated_up_to_a_number(tmp_path: Path) -> None:
    task = make_task(variables=1, saver=FailingSaver)
    saver = task.scaffold.saver
    with running(tmp_path, task, max_failures=2) as training:
        saver.errors = [full(), full()]
        training.run(4)
        statistics = training.hook.statistics()
        assert (statistics.saves_failed, statistics.failures_in_a_row) == (2, 0)
        assert steps_on_disk(tmp_path) == [0, 3, 4]
        saver.errors = [full(), full(), full()]
        training.run(3)
        told = told_by(training.run)
        assert isinstance(told, ms.WriteError)
        assert "step 5" in str(told), "the first of them is the one to look at"
        assert "2 more saves failed after this one, the last of step 7" in str(told.__notes__)
        training.hook.wait(WATCHDOG_SECONDS)
        training.end()
    assert saved_step(tmp_path) == 8


def test_tolerated_failures_do_not_hide_that_the_end_was_not_saved(tmp_path: Path) -> None:
    task = make_task(variables=1, saver=FailingSaver)
    with running(tmp_path, task, max_failures=5) as training:
        task.scaffold.saver.errors = [full() for _ in range(3)]
        training.run(2)
        assert isinstance(told_by(training.end), ms.WriteError)
    assert saved_step(tmp_path) == 0


def test_blocking_saves_tell_at_once(tmp_path: Path) -> None:
    task = make_task(variables=1, saver=FailingSaver)
    with running(tmp_path, task, blocking=True) as training:
        task.scaffold.saver.errors = [full()]
        assert isinstance(told_by(training.run), ms.WriteError)
        training.run()
        assert steps_on_disk(tmp_path) == [0, 2]


def test_the_error_reaches_the_one_who_trains_in_a_monitored_session(tmp_path: Path) -> None:
    task = make_task(variables=1, saver=FailingSaver)
    hook = ours(str(tmp_path), save_steps=1, scaffold=task.scaffold)
    runs = 0
    with (
        pytest.raises(ms.WriteError, match=r"step 2 could not be written.*Earlier ones are untouched"),
        task.graph.as_default(),
        v1.train.MonitoredTrainingSession(
            checkpoint_dir=str(tmp_path),
            scaffold=task.scaffold,
            hooks=[hook],
            save_checkpoint_secs=None,
            save_checkpoint_steps=None,
            log_step_count_steps=None,
        ) as session,
    ):
        while runs < 10:
            hook.wait(WATCHDOG_SECONDS)
            if runs == 1:
                task.scaffold.saver.errors = [full()]
            session.run(task.train_op)
            runs += 1
    assert runs == 2, "the run that told does not count"
    hook.wait(WATCHDOG_SECONDS)
    assert listed_steps(tmp_path) == [0, 1, 3]
    assert CheckpointFolder(tmp_path).verify() == {f"model.ckpt-{step}": [] for step in (0, 1, 3)}
