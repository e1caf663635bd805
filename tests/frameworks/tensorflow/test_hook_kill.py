"""A training process is killed with SIGKILL at every file operation of its saves; what it leaves must be whole.

The process saves at steps 0, 1 and 2 with ``max_to_keep=2``: a first save, a later one, and one that deletes. Or it
goes on where another run has ended, so that its first save writes over the checkpoint that it was restored from. Its
operations are numbered (``operations.py``), and for each number a new process is killed just before that operation.
Where strace is installed, others are killed at a system call inside the op of TensorFlow that writes data and index.

After each kill, and after the power loss that might have been there instead: the state file names a checkpoint that a
plain Saver restores whole, so it does all others that it lists, nothing that was acknowledged is gone, digests are
right, and a new run with the hook goes on from there and leaves nothing unfinished behind.

``MIDSTRIDE_LONG=1`` takes every operation; the short form a few of each kind.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import re
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("tensorflow")
pytest.importorskip("midstride.tensorflow")

import tensorflow as tf

from midstride.tensorflow import CheckpointFolder, durable, latest_checkpoint, state_file
from tests.frameworks.tensorflow import children
from tests.frameworks.tensorflow.operations import Disk, Operations, after_power_loss
from tests.frameworks.tensorflow.training import WATCHDOG_SECONDS, Task, make_task, ours, v1, wait_until

LONG = os.environ.get("MIDSTRIDE_LONG") == "1"
KEEP = 2
SAVES = 3
VARIABLES, FLOATS = 3, 50


def task_of(kind: str, *, by: int = 1) -> Task:
    return make_task(
        by=by,
        variables=VARIABLES,
        floats=FLOATS,
        resource=kind != "ref",
        saver=lambda: v1.train.Saver(max_to_keep=KEEP, sharded=kind == "sharded"),
    )


# What the killed process does


class Tell(v1.train.CheckpointSaverListener):
    """Writes down each step that was said to be saved; in a file, since the process will be gone."""

    def __init__(self, path: str) -> None:
        self._file = open(path, "a", encoding="utf-8", buffering=1)

    def after_save(self, session: Any, global_step_value: Any) -> None:
        print(int(global_step_value), file=self._file, flush=True)


def session_of(task: Task, folder: str, hook: Any) -> Any:
    """Restored from what the state file names."""
    return v1.train.MonitoredTrainingSession(
        checkpoint_dir=folder,
        scaffold=task.scaffold,
        hooks=[hook],
        save_checkpoint_secs=None,
        save_checkpoint_steps=None,
        save_summaries_steps=None,
        save_summaries_secs=None,
        log_step_count_steps=None,
    )


def train(folder: str, kind: str, times: int, *, by: int = 1, settle: bool = True, **options: Any) -> None:
    task = task_of(kind, by=by)
    hook = ours(folder, save_steps=by, scaffold=task.scaffold, **options)
    hook._set_steps_per_run(by)
    with task.graph.as_default(), session_of(task, folder, hook) as session:
        for number in range(times + 1):
            if number:
                session.run(task.train_op)
            if settle:
                hook.wait(WATCHDOG_SECONDS)


def killed_run(base: str, kind: str, restarted: bool, broken: str, at: int) -> None:
    """``at`` 0: it is not killed, and writes down its operations."""
    folder, told = os.path.join(base, "run"), os.path.join(base, "told")
    os.mkdir(folder)
    patch = pytest.MonkeyPatch()
    disk = Disk(folder, os.path.join(base, "shadow"))
    disk.watch(patch)
    if restarted:
        train(folder, kind, 1, listeners=[Tell(told)])

    def act(name: str, path: str) -> None:
        if len(operations.seen) == at:
            Path(base, "unsynced").write_text(json.dumps(disk.unsynced()))
            os.kill(os.getpid(), signal.SIGKILL)

    operations = Operations(folder, act)
    operations.watch(patch)
    if broken:
        BROKEN[broken](patch)
    train(folder, kind, SAVES - 1 - restarted, listeners=[Tell(told)])
    Path(base, "operations").write_text(json.dumps(operations.seen))
    os._exit(0)


def state_file_before_the_syncs(patch: pytest.MonkeyPatch) -> None:
    make_durable, announce = durable.make_durable, state_file.announce
    patch.setattr(durable, "make_durable", lambda path, step: None)

    def announce_first(saver: Any, path: str, *, basename: str) -> None:
        announce(saver, path, basename=basename)
        make_durable(path, int(path.rpartition("-")[2]))

    patch.setattr(state_file, "announce", announce_first)


def deletion_before_the_announcement(patch: pytest.MonkeyPatch) -> None:
    announce = state_file.announce

    def delete_first(saver: Any, path: str, *, basename: str) -> None:
        saver._RecordLastCheckpoint(path)
        saver._MaybeDeleteOldCheckpoints()
        announce(saver, path, basename=basename)

    patch.setattr(state_file, "announce", delete_first)


BROKEN: dict[str, Callable[[pytest.MonkeyPatch], None]] = {
    "state file before the syncs": state_file_before_the_syncs,
    "deletion before the announcement": deletion_before_the_announcement,
}


# What must be true after it


class PlainSaver:
    """Restores as somebody does who has only TensorFlow."""

    def __init__(self) -> None:
        task = task_of("plain")
        with task.graph.as_default():
            self._graph, self._saver, self._session = task.graph, v1.train.Saver(), v1.Session(graph=task.graph)
        self._read = [task.step, *task.variables]

    def problems(self, path: str) -> list[str]:
        name, step = os.path.basename(path), float(path.rpartition("-")[2])
        try:
            with self._graph.as_default():
                self._saver.restore(self._session, path)
        except (tf.errors.OpError, ValueError) as error:
            return [f"{name} cannot be restored: {str(error).splitlines()[0]}"]
        values = set(np.concatenate([np.ravel(value) for value in self._session.run(self._read)]).tolist())
        return [] if values == {step} else [f"{name} holds {sorted(values)}"]

    def close(self) -> None:
        self._session.close()


@pytest.fixture(scope="module")
def plain() -> Iterator[PlainSaver]:
    made = PlainSaver()
    yield made
    made.close()


def problems_at_rest(plain: PlainSaver, folder: Path, told: list[int]) -> list[str]:
    """What is wrong with a folder, before anybody writes into it again."""
    state = tf.train.get_checkpoint_state(str(folder))
    if state is None:
        found = ["the state file cannot be read"] if (folder / "checkpoint").exists() else []
        return found + (["the state file names nothing"] if told else [])
    # The folder may be a copy.
    listed = [str(folder / os.path.basename(path)) for path in state.all_model_checkpoint_paths]
    named = str(folder / os.path.basename(state.model_checkpoint_path))
    found = [] if listed[-1] == named else ["the newest is not the last of the list"]
    for path in listed:
        found += plain.problems(path)
    steps = [int(path.rpartition("-")[2]) for path in listed]
    # The state file may be ahead by a checkpoint that is durable and was not told of yet.
    expected = [step for step in told[-KEEP:] if step > max(steps) - KEEP]
    found += [f"step {step} was said to be saved, and is not listed" for step in expected if step not in steps]
    found += [f"{wrong}" for wrong in CheckpointFolder(folder).problems(os.path.basename(named))]
    latest = latest_checkpoint(folder)
    return found + ([] if latest == named else [f"latest_checkpoint gives {latest}, not {named}"])


UNFINISHED = re.compile(r"(model\.ckpt|checkpoint).*(\.tempstate|\.tmp|_temp|draft).*")
NOT_OF_CHECKPOINTS = re.compile(r"checkpoint|graph\.pbtxt|events\.out\.tfevents\..*")


def problems_of_a_new_run(plain: PlainSaver, folder: Path, kind: str) -> list[str]:
    """Go on in the folder; its steps are others than those of the killed run, so that nothing is overwritten by chance."""
    state = tf.train.get_checkpoint_state(str(folder))
    first = 0 if state is None else int(state.model_checkpoint_path.rpartition("-")[2])
    train(str(folder), kind, 2, by=10)
    v1.summary.FileWriterCache.clear()
    state = tf.train.get_checkpoint_state(str(folder))
    kept = [os.path.basename(path) for path in state.all_model_checkpoint_paths]
    found = [] if kept == [f"model.ckpt-{first + 10}", f"model.ckpt-{first + 20}"] else [f"kept are {kept}"]
    for name in kept:
        found += plain.problems(str(folder / name))
    left = sorted(file.name for file in folder.iterdir() if UNFINISHED.fullmatch(file.name))
    return found + [f"left behind: {', '.join(left)}"] * bool(left)


def of_no_checkpoint(folder: Path) -> list[str]:
    """The files of checkpoints that the state file does not list."""
    state = tf.train.get_checkpoint_state(str(folder))
    kept = tuple(f"{os.path.basename(path)}." for path in state.all_model_checkpoint_paths)
    names = sorted(file.name for file in folder.iterdir() if not NOT_OF_CHECKPOINTS.fullmatch(file.name))
    return [name for name in names if not name.startswith(kept)]


def problems_after(base: Path, plain: PlainSaver, kind: str) -> list[str]:
    told = [int(line) for line in (base / "told").read_text().split()] if (base / "told").exists() else []
    found = problems_at_rest(plain, base / "run", told)
    if (base / "unsynced").exists():
        unsynced = json.loads((base / "unsynced").read_text())
        for names, what in (("run", "with all names"), ("shadow", "with the names of the last sync")):
            lost = base / f"lost-{names}"
            after_power_loss(str(base / names), unsynced, str(lost))
            found += [f"after a power loss, {what}: {one}" for one in problems_at_rest(plain, lost, told)]
    return found + [f"in a new run: {one}" for one in problems_of_a_new_run(plain, base / "run", kind)]


# The sweeps


@functools.cache
def operations_of(kind: str, restarted: bool, broken: str = "") -> list[str]:
    """Those of a run that is not killed."""
    with tempfile.TemporaryDirectory() as base:
        child = children.run(killed_run, base, kind, restarted, broken, 0)
        assert child.wait() == 0, child.output
        made: list[str] = json.loads(Path(base, "operations").read_text())
        return made


Killed = Iterator[tuple[int, Path]]


def kill_at_each(base: Path, points: list[int], kind: str, restarted: bool, broken: str = "") -> Killed:
    """Kill at each of these operations; where it was, one after the other."""

    def start(at: int) -> tuple[int, Path, children.Child]:
        folder = base / f"at-{at}"
        folder.mkdir()
        return at, folder, children.start(killed_run, folder, kind, restarted, broken, at)

    # The next one runs while what one has left is looked at.
    running = [start(at) for at in points[:1]]
    for following in [*points[1:], None]:
        if following is not None:
            running.append(start(following))
        at, folder, child = running.pop(0)
        assert child.wait() == -signal.SIGKILL, f"operation {at} never came: {child.output}"
        yield at, folder
        shutil.rmtree(folder)


def sample(operations: list[str], count: int) -> list[int]:
    """All numbers, or as many as ``count``, spread evenly."""
    step = 1 if LONG else len(operations) / count
    return sorted({int(number * step) + 1 for number in range(int(len(operations) / step))})


@pytest.mark.timeout(3600 if LONG else 300)
@pytest.mark.parametrize(
    "kind, restarted, count",
    [
        ("plain", False, 7),
        ("sharded", False, 3),
        ("ref", False, 2),
        ("plain", True, 3),
        ("sharded", True, 3),
    ],
)
def test_whatever_operation_it_is_killed_at(
    kind: str, restarted: bool, count: int, tmp_path: Path, plain: PlainSaver
) -> None:
    operations = operations_of(kind, restarted)
    for expected in ("save op of", "after save op of", "fsync", "replace checkpoint.midstride-draft", "DeleteFile"):
        assert any(operation.startswith(expected) for operation in operations), "or the wrong functions are watched"
    wrong = []
    for at, folder in kill_at_each(tmp_path, sample(operations, count), kind, restarted):
        found = problems_after(folder, plain, kind)
        wrong += [f"killed before {at}, {operations[at - 1]}: {one}" for one in found]
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("broken", BROKEN)
def test_a_broken_order_is_found_out(broken: str, tmp_path: Path, plain: PlainSaver) -> None:
    operations = operations_of("plain", False, broken)
    turning_point = {
        "state file before the syncs": "replace checkpoint.midstride-draft",
        "deletion before the announcement": "DeleteFile model.ckpt-0.index",
    }[broken]
    at = len(operations) - operations[::-1].index(turning_point)
    found = []
    for _, folder in kill_at_each(tmp_path, [at + 1], "plain", False, broken):
        found += problems_after(folder, plain, "plain")
    assert found, "the sweep saw nothing wrong"


@pytest.mark.parametrize(
    "operation", ["after save op of model.ckpt-1", "DeleteFile model.ckpt-0.index", "close graph.pbtxt.tmp"]
)
def test_nothing_of_the_killed_run_is_left_for_ever(operation: str, tmp_path: Path, plain: PlainSaver) -> None:
    operations = operations_of("plain", False)
    at = next(number for number, name in enumerate(operations, 1) if name.startswith(operation))
    for _, folder in kill_at_each(tmp_path, [at], "plain", False):
        assert problems_after(folder, plain, "plain") == []
        assert of_no_checkpoint(folder / "run") == []


# Inside TensorFlow's own op


def stopped_run(base: str, kind: str, restarted: bool) -> None:
    """Stands still before the save op of its second save until somebody has come to kill it; ends if nobody did."""
    folder, told = os.path.join(base, "run"), os.path.join(base, "told")
    os.mkdir(folder)
    train(folder, kind, 1, listeners=[Tell(told)])

    def act(name: str, path: str) -> None:
        if name == "save op of" and path.endswith("-1" if restarted else "-2"):
            Path(base, "ready").touch()
            wait_until(Path(base, "go").exists, "strace")
        if name == "after save op of" and Path(base, "go").exists():
            os._exit(0)

    Operations(folder, act).watch(pytest.MonkeyPatch())
    train(folder, kind, 1, settle=False, listeners=[Tell(told)], busy="wait")
    os._exit(1)


@contextlib.contextmanager
def strace(pid: int, call: str, number: int, output: Path) -> Iterator[bool]:
    """Kill a thread's process at its n-th call. False if nobody may be traced here."""
    inject = ["-e", f"trace={call}", "-e", f"inject={call}:signal=KILL:when={number}"]
    with output.open("w") as log:
        tracer = subprocess.Popen(
            ["strace", "-f", *inject, "-o", str(output.with_suffix(".calls")), "-p", str(pid)], stderr=log
        )
    try:
        wait_until(lambda: tracer.poll() is not None or "attached with" in output.read_text(), "strace to attach")
        yield tracer.poll() is None
    finally:
        tracer.wait(WATCHDOG_SECONDS)


OF_WRITERS = ["mkdir", "openat", "write", "rename", "unlink", "rmdir"]
CALLS = (
    [(kind, restarted, call, number)
        for kind in ("plain", "sharded") for restarted in (False, True) for call in OF_WRITERS for number in range(1, 7)]
    if LONG
    else [("plain", False, "write", 1), ("plain", True, "rename", 2), ("sharded", False, "rmdir", 1),
          ("sharded", True, "write", 4)]
)  # fmt: skip


@pytest.mark.skipif(shutil.which("strace") is None, reason="needs strace")
@pytest.mark.parametrize("kind, restarted, call, number", CALLS)
def test_killed_inside_the_op_that_writes(
    kind: str, restarted: bool, call: str, number: int, tmp_path: Path, plain: PlainSaver
) -> None:
    child = children.start(stopped_run, tmp_path, kind, restarted)
    wait_until((tmp_path / "ready").exists, "the save op to be reached")
    with strace(child.pid, call, number, tmp_path / "strace") as attached:
        (tmp_path / "go").touch()
        ended = child.wait()
    if not attached:
        pytest.skip("processes may not be traced here")
    if ended == 0 and LONG:
        pytest.skip(f"there is no {call} number {number}")
    assert ended == -signal.SIGKILL, child.output
    assert problems_after(tmp_path, plain, kind) == []
