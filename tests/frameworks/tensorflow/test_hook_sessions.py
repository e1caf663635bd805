"""The hook in every kind of session, over restarts, and with everything that people hang on it or name oddly."""

from __future__ import annotations

import contextlib
import gc
import logging
import os
import re
import shutil
import subprocess
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("tensorflow")
pytest.importorskip("midstride.tensorflow")

import tensorflow as tf
from tensorflow.python.training import monitored_session

import midstride as ms
from midstride import limits
from midstride.tensorflow import AsyncCheckpointSaverHook, CheckpointFolder, latest_checkpoint
from midstride.tensorflow.snapshot import _Buffers, _is_held
from tests.frameworks.tensorflow.test_snapshot import ROWS, files, save_plainly
from tests.frameworks.tensorflow.training import (
    WATCHDOG_SECONDS,
    CountingListener,
    ProbedSaver,
    Task,
    loop,
    make_task,
    ours,
    saved_step,
    steps_on_disk,
    v1,
    values_of,
)

WARNING = "Another saver writes checkpoints into"


@contextlib.contextmanager
def training_in(folder: Path | str, task: Task, *hooks: Any, **options: Any) -> Iterator[Callable[[int], None]]:
    """A MonitoredTrainingSession without a saver of its own, restored from the folder; the first hook is waited for."""
    without = ("save_checkpoint_secs", "save_checkpoint_steps", "save_summaries_secs", "save_summaries_steps")
    options = dict.fromkeys([*without, "log_step_count_steps"]) | options
    with (
        task.graph.as_default(),
        v1.train.MonitoredTrainingSession(
            checkpoint_dir=str(folder), scaffold=task.scaffold, hooks=hooks, **options
        ) as session,
    ):

        def run(times: int = 1) -> None:
            for _ in range(times):
                session.run(task.train_op)
                hooks[0].wait(WATCHDOG_SECONDS)

        hooks[0].wait(WATCHDOG_SECONDS)
        yield run


def keeping(number: int, **options: Any) -> Callable[[], Any]:
    return lambda: v1.train.Saver(max_to_keep=number, **options)


def all_listed(folder: Path) -> list[int]:
    """The steps that the state file lists; each is whole and of that step."""
    steps = [
        int(path.rpartition("-")[2]) for path in tf.train.get_checkpoint_state(str(folder)).all_model_checkpoint_paths
    ]
    for step in steps:
        assert values_of(folder, step) == {float(step)}
    assert CheckpointFolder(folder).verify() == {f"model.ckpt-{step}": [] for step in steps}
    return steps


# Kinds of sessions


def test_a_monitored_training_session(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    task = make_task(variables=2, saver=keeping(2))
    hook = ours(str(tmp_path), save_steps=2, scaffold=task.scaffold)
    with training_in(tmp_path, task, hook) as run:
        run(5)
    assert all_listed(tmp_path) == [4, 5]
    assert steps_on_disk(tmp_path) == [4, 5]
    assert WARNING not in caplog.text


def test_a_second_saver_on_the_folder_is_warned_of_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    task = make_task(variables=2)
    hook = ours(str(tmp_path), save_steps=2, scaffold=task.scaffold)
    with training_in(tmp_path, task, hook, save_checkpoint_steps=3) as run:
        run(8)
    warnings = [record for record in caplog.records if WARNING in record.getMessage()]
    assert len(warnings) == 1
    assert warnings[0].levelno == logging.WARNING
    assert str(tmp_path) in warnings[0].getMessage()
    assert "save_checkpoint_secs=None" in warnings[0].getMessage()
    assert saved_step(tmp_path) == 8


def test_no_warning_of_itself(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    for _ in range(2):
        task = make_task(variables=1)
        hook = ours(str(tmp_path), save_steps=1, scaffold=task.scaffold)
        with training_in(tmp_path, task, hook) as run:
            run(2)
    assert saved_step(tmp_path) == 4
    assert WARNING not in caplog.text


@pytest.mark.parametrize("way", ["singular", "scaffold", "saver", "collection"])
def test_other_sessions(way: str, tmp_path: Path) -> None:
    task = make_task(variables=2, saver=None if way == "collection" else keeping(3))
    named = {"scaffold": {"scaffold": task.scaffold}, "saver": {"saver": task.scaffold._saver}}.get(way, {})
    hook = ours(str(tmp_path), save_steps=1, **(named or {"scaffold": task.scaffold} if way == "singular" else named))
    with task.graph.as_default():
        if way == "singular":
            session = v1.train.SingularMonitoredSession(
                hooks=[hook], scaffold=task.scaffold, checkpoint_dir=str(tmp_path)
            )
        else:
            creator = v1.train.ChiefSessionCreator(task.scaffold, checkpoint_dir=str(tmp_path))
            session = v1.train.MonitoredSession(creator, hooks=[hook])
        with session:
            for _ in range(3):
                hook.wait(WATCHDOG_SECONDS)
                session.run(task.train_op)
    assert all_listed(tmp_path)[-3:] == [1, 2, 3]


def test_a_session_on_a_server(tmp_path: Path) -> None:
    server = v1.train.Server.create_local_server()
    fetched = []
    for resource in (True, False):
        v1.Session.reset(server.target)
        folder = tmp_path / str(resource)
        task = make_task(variables=2, resource=resource, saver=keeping(2))
        hook = ours(str(folder), save_steps=1, scaffold=task.scaffold)
        with training_in(folder, task, hook, master=server.target) as run:
            run(3)
        assert all_listed(folder) == [2, 3]
        fetched.append(hook.statistics().snapshot)
    assert fetched == ["copy", "copy"]


THROUGH_THE_HOOK = [
    "v2-resource", "v2-ref", "v1-resource", "v2-partitioned-resource", "v1-partitioned-ref", "v2-sharded-resource",
    "v2-partitioned-sharded-ref", "bfloat16-resource", "bfloat16-ref", "string-resource", "string-ref", "mutable-table",
    "dense-table", "iterator-resource", "padded-resource",
]  # fmt: skip


@pytest.mark.parametrize("row", THROUGH_THE_HOOK)
def test_what_the_hook_writes_is_what_the_plain_saver_writes(row: str, tmp_path: Path) -> None:
    model, folder = ROWS[row](), tmp_path / "ours"
    hook = ours(str(folder), save_steps=2, saver=model.saver)
    model.graph._unsafe_unfinalize()
    with model.graph.as_default():
        hook.begin()
        model.graph.finalize()
        session = model.session()
        hooked = monitored_session._HookedSession(session, [hook])
        hook.after_create_session(session, None)
        hook.wait(WATCHDOG_SECONDS)
        for _ in range(2):
            hooked.run(model.change)
        expected = save_plainly(model, session, tmp_path / "plain", 2)
        for _ in range(2):
            session.run(model.change)
        session.close()
    hook.wait(WATCHDOG_SECONDS)
    prefix = os.path.basename(expected)

    def of_step(where: Path) -> dict[str, bytes]:
        return {
            name: content for name, content in files(where).items()
            if name.startswith(prefix) and not name.endswith((".json", ".midstride.json"))
        }  # fmt: skip

    assert of_step(folder) == of_step(tmp_path / "plain")
    assert latest_checkpoint(folder) == str(folder / prefix)
    assert hook.statistics().saves_failed == 0


# Restarts


def test_a_restart_goes_on_and_counts_the_earlier_runs(tmp_path: Path) -> None:
    for number in range(3):
        task, listener = make_task(variables=2, saver=keeping(3)), CountingListener()
        hook = ours(str(tmp_path), save_steps=1, scaffold=task.scaffold, listeners=[listener])
        with training_in(tmp_path, task, hook) as run:
            assert saved_step(tmp_path) == 2 * number
            run(2)
        assert listener.counts == (1, 3, 3, 1)
    assert all_listed(tmp_path) == steps_on_disk(tmp_path) == [4, 5, 6]
    digests = sorted(file.name for file in tmp_path.glob("*.midstride.json"))
    assert digests == [f"model.ckpt-{step}.midstride.json" for step in (4, 5, 6)]


def test_a_restart_saves_what_it_has_changed(tmp_path: Path) -> None:
    """The step is that of a checkpoint which is there already; its content is not."""

    class Change(v1.train.SessionRunHook):
        def after_create_session(self, session: Any, coord: Any) -> None:
            # Nothing may be added to the graph now.
            weight = next(variable for variable in v1.global_variables() if variable.op.name == "w0")
            weight.load([0.5], session)

    for hooks in ([], [Change()]):
        task = make_task(variables=2, saver=keeping(2))
        hook = ours(str(tmp_path), save_steps=1, scaffold=task.scaffold)
        with (
            task.graph.as_default(),
            v1.train.MonitoredSession(
                v1.train.ChiefSessionCreator(task.scaffold, checkpoint_dir=str(tmp_path)), hooks=[*hooks, hook]
            ) as session,
        ):
            hook.wait(WATCHDOG_SECONDS)
            if not hooks:
                session.run(task.train_op)
    assert steps_on_disk(tmp_path) == [0, 1]
    assert values_of(tmp_path, 1) == {0.5, 1.0}
    assert CheckpointFolder(tmp_path).verify() == {"model.ckpt-0": [], "model.ckpt-1": []}
    assert latest_checkpoint(tmp_path) == str(tmp_path / "model.ckpt-1")


@pytest.mark.parametrize("hours", [1e-9, 10_000], ids=["all", "none"])
def test_what_is_kept_by_the_hour_over_a_restart(hours: float, tmp_path: Path) -> None:
    """As with TensorFlow's own hook."""

    def run_with(make: Callable[..., Any], folder: Path) -> list[int]:
        for _ in range(2):
            task = make_task(variables=1, saver=keeping(1, keep_checkpoint_every_n_hours=hours))
            hook = make(str(folder), save_steps=1, scaffold=task.scaffold)
            if not hasattr(hook, "wait"):
                hook.wait = lambda timeout: None
            with training_in(folder, task, hook) as run:
                run(2)
        return steps_on_disk(folder)

    expected = run_with(v1.train.CheckpointSaverHook, tmp_path / "plain")
    assert run_with(ours, tmp_path / "ours") == expected
    assert expected == ([0, 1, 2, 3, 4] if hours < 1 else [4])


@pytest.mark.parametrize("align, expected", [(True, [4, 5, 8, 12]), (False, [4, 5, 9, 13])], ids=["aligned", "not"])
def test_align_after_a_restart_at_a_step_between(align: bool, expected: list[int], tmp_path: Path) -> None:
    for times in (5, 8):
        task = make_task(saver=keeping(10))
        hook = ours(str(tmp_path), save_steps=4, scaffold=task.scaffold, align=align)
        with training_in(tmp_path, task, hook) as run:
            run(times)
    assert [step for step in steps_on_disk(tmp_path) if step] == (expected if not align else [*expected, 13])


def test_align_by_steps_of_several(tmp_path: Path) -> None:
    """Six steps a run never meet most multiples of four: the first step past one is saved."""
    task = make_task(by=6, saver=keeping(10))
    hook = ours(str(tmp_path), save_steps=4, scaffold=task.scaffold, align=True)
    hook._set_steps_per_run(6)
    with training_in(tmp_path, task, hook) as run:
        run(4)
    assert steps_on_disk(tmp_path) == [0, 6, 12, 18, 24]


def test_the_same_hook_serves_a_second_session(tmp_path: Path) -> None:
    hook, listener = None, CountingListener()
    for number in range(2):
        task = make_task(variables=2)
        with task.graph.as_default():
            v1.add_to_collection(v1.GraphKeys.SAVERS, v1.train.Saver())
        hook = hook or ours(str(tmp_path), save_steps=2, listeners=[listener])
        with training_in(tmp_path, task, hook) as run:
            run(2)
        assert all_listed(tmp_path)[-1] == 2 * (number + 1)
    assert (listener.begun, listener.ended) == (2, 2)
    assert listener.before == listener.after
    assert hook.statistics().saves_failed == 0


def test_a_session_is_recovered_while_a_save_runs(tmp_path: Path) -> None:
    class Break(v1.train.SessionRunHook):
        armed = False
        sessions = 0

        def after_create_session(self, session: Any, coord: Any) -> None:
            self.sessions += 1

        def before_run(self, run_context: Any) -> None:
            if self.armed:
                self.armed = False
                raise tf.errors.AbortedError(None, None, "the worker is gone (injected)")

    task, breaker = make_task(variables=2, saver=lambda: ProbedSaver(hold=(3,))), Break()
    saver = task.scaffold.saver
    hook = ours(str(tmp_path), save_steps=1, scaffold=task.scaffold)
    with task.graph.as_default():
        creator = v1.train.ChiefSessionCreator(task.scaffold, checkpoint_dir=str(tmp_path))
        with v1.train.MonitoredSession(creator, hooks=[hook, breaker]) as session:
            hook.wait(WATCHDOG_SECONDS)
            session.run(task.train_op)
            hook.wait(WATCHDOG_SECONDS)
            session.run(task.train_op)
            saver.wait_until_held()
            breaker.armed = True
            session.run(task.train_op)
            assert breaker.sessions == 2
            saver.go.set()
            for _ in range(3):
                hook.wait(WATCHDOG_SECONDS)
                session.run(task.train_op)
    # From step 1, with the step that was run again.
    assert all_listed(tmp_path)[-1] == saved_step(tmp_path) == 5
    assert hook.statistics().saves_failed == 0


# Folders and names


ODD = ["my model", "modèle-é", "x-1-2"]
PATTERNS = ["model.ckpt[1]", "a*b?c"]


def train_as(folder: Path, basename: str, *, runs: int) -> None:
    for _ in range(runs):
        task = make_task(variables=2)
        hook = ours(str(folder), save_steps=1, scaffold=task.scaffold, checkpoint_basename=basename)
        with training_in(folder, task, hook) as run:
            run(2)


@pytest.mark.parametrize("basename", ODD + PATTERNS)
def test_an_odd_basename(basename: str, tmp_path: Path) -> None:
    # TensorFlow itself does not find a checkpoint with brackets in its name.
    runs = 1 if "[" in basename else 2
    train_as(tmp_path, basename, runs=runs)
    newest = str(tmp_path / f"{basename}-{2 * runs}")
    if runs == 2:
        assert tf.train.latest_checkpoint(str(tmp_path)) == newest
        assert tf.train.load_variable(newest, "w0").tolist() == [4.0]
    assert latest_checkpoint(tmp_path) == newest
    assert CheckpointFolder(tmp_path).verify() == {f"{basename}-{step}": [] for step in range(2 * runs + 1)}


@pytest.mark.parametrize("basename, of_another", [
    *((name, f"{name}s") for name in ODD),
    ("model.ckpt[1]", "model.ckpt1"),
    ("a*b?c", "aXXbYc"),
    ("model.ckpt", "model.ckpt-best"),
])  # fmt: skip
def test_its_own_leftovers_are_swept_and_no_others(basename: str, of_another: str, tmp_path: Path) -> None:
    own, other = tmp_path / f"{basename}-9.index.tempstate123", tmp_path / f"{of_another}-9.index.tempstate123"
    for file in (own, other):
        file.write_bytes(b"left")
    train_as(tmp_path, basename, runs=1)
    assert (own.exists(), other.exists()) == (False, True)


@pytest.mark.parametrize("basename", [*ODD, "model.ckpt[1]", "a*b?c"])
def test_progress_is_seen_under_an_odd_basename(basename: str, tmp_path: Path) -> None:
    """Else a long write would be taken for one that hangs."""
    task = make_task(saver=lambda: ProbedSaver(hold=(2,)))
    hook = ours(str(tmp_path), save_steps=1, scaffold=task.scaffold, checkpoint_basename=basename)
    with loop(task, hook, created=True) as training:
        hook.wait(WATCHDOG_SECONDS)
        training.run()
        task.scaffold.saver.wait_until_held()
        before = hook._saves._progress()
        (tmp_path / f"{basename}-1.data-00000-of-00001.tempstate1").write_bytes(b"12345")
        now = hook._saves._progress()
        task.scaffold.saver.go.set()
        training.end()
        assert now == before + 5


def test_a_folder_that_is_not_there_yet(tmp_path: Path) -> None:
    folder = tmp_path / "a" / "b"
    task = make_task(variables=1)
    hook = ours(str(folder), save_steps=1, scaffold=task.scaffold)
    assert not folder.exists()
    with training_in(folder, task, hook) as run:
        run()
    assert all_listed(folder) == [0, 1]


def test_a_new_folder_is_durable_in_those_above_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced, real = set(), os.fsync

    def fsync(descriptor: Any) -> None:
        synced.add(os.fstat(descriptor).st_ino)
        real(descriptor)

    monkeypatch.setattr(os, "fsync", fsync)
    folder = tmp_path / "a" / "b"
    task = make_task(variables=1)
    hook = ours(str(folder), save_steps=1, scaffold=task.scaffold)
    with training_in(folder, task, hook):
        assert {path.stat().st_ino for path in (folder, folder.parent, tmp_path)} <= synced


def test_a_folder_given_as_a_path(tmp_path: Path) -> None:
    task = make_task(variables=1)
    hook = ours(tmp_path, save_steps=1, scaffold=task.scaffold)
    with training_in(tmp_path, task, hook) as run:
        run()
    assert all_listed(tmp_path) == [0, 1]


def test_a_relative_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for _ in range(2):
        task = make_task(variables=1)
        hook = ours("run", save_steps=1, scaffold=task.scaffold)
        with training_in("run", task, hook) as run:
            run(2)
    assert latest_checkpoint("run") == os.path.join("run", "model.ckpt-4")
    # Relative in the state file too, so that the folder can be moved.
    shutil.move("run", "moved")
    assert tf.train.latest_checkpoint("moved") == os.path.join("moved", "model.ckpt-4")
    assert all_listed(tmp_path / "moved") == [0, 1, 2, 3, 4]


def test_a_relative_folder_while_the_script_is_elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An evaluation in another folder, say, just while the worker writes."""
    (tmp_path / "here").mkdir()
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    task = make_task(variables=1, saver=lambda: ProbedSaver(hold=(2,)))
    hook = ours("run", save_steps=1, scaffold=task.scaffold)
    with loop(task, hook, created=True) as training:
        hook.wait(WATCHDOG_SECONDS)
        training.run()
        task.scaffold.saver.wait_until_held()
        os.chdir(tmp_path / "elsewhere")
        task.scaffold.saver.go.set()
        hook.wait(WATCHDOG_SECONDS)
        os.chdir(tmp_path / "here")
        training.run()
        training.end()
    assert not (tmp_path / "elsewhere" / "run").exists()
    assert all_listed(tmp_path / "here" / "run") == [0, 1, 2]


def train_in_memory(folder: str) -> None:
    """In a file system that only TensorFlow knows, as ``gs://`` is."""
    for _ in range(2):
        task = make_task(variables=2, saver=keeping(2))
        hook = ours(folder, save_steps=1, scaffold=task.scaffold)
        with training_in(folder, task, hook) as run:
            run(2)


def test_a_folder_that_is_not_of_this_machine(tmp_path: Path) -> None:
    folder = f"ram://{tmp_path.name}"
    train_in_memory(folder)
    assert tf.train.latest_checkpoint(folder) == f"{folder}/model.ckpt-4"
    assert tf.train.load_variable(folder, "w1").tolist() == [4.0]
    names = {name.split(".")[1] for name in tf.io.gfile.listdir(folder) if name.startswith("model.")}
    assert names == {"ckpt-3", "ckpt-4"}
    assert not Path("ram:").exists()


def test_the_latest_of_a_folder_that_is_not_of_this_machine(tmp_path: Path) -> None:
    folder = f"ram://{tmp_path.name}"
    train_in_memory(folder)
    assert latest_checkpoint(folder) == f"{folder}/model.ckpt-4"


def test_a_read_only_folder(tmp_path: Path) -> None:
    def mount(*arguments: object) -> bool:
        found = shutil.which("mount")
        return found is not None and not subprocess.run([found, *map(str, arguments)], capture_output=True).returncode

    if not mount("--bind", tmp_path, tmp_path):
        pytest.skip("nothing may be mounted here")
    try:
        assert mount("-o", "remount,bind,ro", tmp_path)
        task = make_task(variables=1)
        hook = ours(str(tmp_path), save_steps=1, scaffold=task.scaffold)
        with (
            pytest.raises((tf.errors.OpError, OSError, ms.MidstrideError), match="(?i)read-only"),
            training_in(tmp_path, task, hook) as run,
        ):
            run(3)
    finally:
        v1.summary.FileWriterCache.clear()
        subprocess.run(["umount", "-l", str(tmp_path)], check=True)


def test_two_hooks_on_two_folders(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    task = make_task(variables=2)
    with task.graph.as_default():
        often, seldom = v1.train.Saver(max_to_keep=2), v1.train.Saver(max_to_keep=5)
    first = ours(str(tmp_path / "often"), save_steps=1, saver=often)
    second = ours(str(tmp_path / "seldom"), save_steps=3, saver=seldom)
    with training_in(tmp_path / "often", task, first, second) as run:
        for _ in range(7):
            second.wait(WATCHDOG_SECONDS)
            run()
    assert all_listed(tmp_path / "often") == [6, 7]
    assert all_listed(tmp_path / "seldom") == [0, 3, 6, 7]
    assert WARNING not in caplog.text


def test_a_hook_that_is_never_begun(tmp_path: Path) -> None:
    before = set(threading.enumerate())
    hook = ours(str(tmp_path / "never"), save_steps=1)
    hook.wait(1)
    assert hook.statistics().saves_begun == 0
    del hook
    gc.collect()
    # Not a count: threads of an earlier test's session may end in between.
    assert set(threading.enumerate()) <= before
    assert not (tmp_path / "never").exists()


# What can be chosen


def test_busy_wait_saves_every_step_that_is_due(tmp_path: Path) -> None:
    task = make_task(variables=1, saver=lambda: ProbedSaver(hold=(2,), max_to_keep=None))
    saver = task.scaffold.saver
    hook = ours(str(tmp_path), save_steps=1, scaffold=task.scaffold, busy="wait")
    with loop(task, hook, created=True) as training:
        hook.wait(WATCHDOG_SECONDS)
        training.run()
        saver.wait_until_held()
        # Nothing but the waiting itself can let it go, or the run below would not return.
        letting_go = threading.Timer(0.3, saver.go.set)
        letting_go.start()
        training.run(3)
        training.end()
    assert steps_on_disk(tmp_path) == [0, 1, 2, 3, 4]
    assert hook.statistics().saves_skipped == 0


def test_skipping_is_counted_and_the_lag_can_be_seen(tmp_path: Path) -> None:
    task = make_task(variables=1, saver=lambda: ProbedSaver(hold=(2,)))
    hook = ours(str(tmp_path), save_steps=1, scaffold=task.scaffold)
    with loop(task, hook, created=True) as training:
        hook.wait(WATCHDOG_SECONDS)
        training.run()
        task.scaffold.saver.wait_until_held()
        training.run(2)
        assert hook.statistics().saves_skipped == 2
        assert hook._last_checkpoint_step == 0
        task.scaffold.saver.go.set()
        training.end()
    assert steps_on_disk(tmp_path) == [0, 1, 3]


@pytest.mark.parametrize("blocking", [False, True])
def test_what_is_held_is_copied_on_the_worker_before_it_is_written(tmp_path: Path, blocking: bool) -> None:
    held: list[int] = []

    class Looking(AsyncCheckpointSaverHook):
        def _write(self, snapshot: Any, step: int) -> Any:
            held.append(sum(_is_held(value) for value in snapshot._values))
            return super()._write(snapshot, step)

    task = make_task(variables=2)
    hook = Looking(str(tmp_path), save_steps=1, scaffold=task.scaffold, blocking=blocking)
    with loop(task, hook, created=True):
        hook.wait(WATCHDOG_SECONDS)
    # Where training waits anyway, the copy would only cost.
    assert bool(held[0]) == blocking


def test_blocking_does_all_on_the_training_thread(tmp_path: Path) -> None:
    task, listener = make_task(variables=1), CountingListener()
    hook = ours(str(tmp_path), save_steps=1, scaffold=task.scaffold, listeners=[listener], blocking=True)
    before = set(threading.enumerate())
    with loop(task, hook, created=True) as training:
        training.run()
        assert steps_on_disk(tmp_path) == [0, 1]
        assert listener.threads["after_save"] == {threading.get_ident()}
        assert not [thread for thread in set(threading.enumerate()) - before if "midstride" in thread.name]


@pytest.mark.parametrize("resource", [True, False], ids=["resource", "ref"])
@pytest.mark.parametrize("mode", ["auto", "handles", "copy", "blocking"])
def test_each_kind_of_snapshot(mode: str, resource: bool, tmp_path: Path) -> None:
    task = make_task(variables=2, resource=resource)
    hook = ours(str(tmp_path), save_steps=1, scaffold=task.scaffold, snapshot=mode)
    if mode == "handles" and not resource:
        with (
            pytest.raises(ValueError, match=r'snapshot="handles".*(global_step|w\d):0 comes from a VariableV2'),
            training_in(tmp_path, task, hook),
        ):
            pass
        return
    with training_in(tmp_path, task, hook) as run:
        run(2)
    assert all_listed(tmp_path) == [0, 1, 2]
    chosen = {"auto": "handles" if resource else "copy"}.get(mode, mode)
    assert hook.statistics().snapshot == chosen


@pytest.mark.parametrize("mode", ["handles", "copy"])
def test_a_snapshot_that_cannot_be_is_refused_by_name(mode: str, tmp_path: Path) -> None:
    server = v1.train.Server.create_local_server()
    model = ROWS["iterator-resource"]()
    model.graph._unsafe_unfinalize()
    hook = ours(str(tmp_path), save_steps=1, saver=model.saver, snapshot=mode)
    with model.graph.as_default():
        hook.begin()
        with (
            model.session(server.target) as session,
            pytest.raises(ValueError, match=r"SerializeIterator:0 is a variant"),
        ):
            hook.after_create_session(session, None)


@pytest.mark.parametrize("options, match", [
    ({"busy": "queue"}, "busy must be"),
    ({"snapshot": "fast"}, "snapshot must be"),
    ({"save_steps": None, "save_secs": 1, "align": True}, "align=True"),
])  # fmt: skip
def test_wrong_options_are_refused_at_once(options: dict[str, Any], match: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=match):
        ours(str(tmp_path), **({"save_steps": 1} | options))


def test_statistics(tmp_path: Path) -> None:
    task = make_task(variables=2, floats=1000, saver=lambda: ProbedSaver(fail=(3,)))
    hook = ours(str(tmp_path), save_steps=1, scaffold=task.scaffold)
    assert hook.statistics().last_commit_age_seconds is None
    with loop(task, hook, created=True, settle=lambda: hook.wait(WATCHDOG_SECONDS)) as training:
        training.run()
        found = hook.statistics()
        assert (found.saves_begun, found.saves_committed, found.saves_failed) == (2, 2, 0)
        assert found.snapshot == "handles"
        size = sum(file.stat().st_size for file in tmp_path.glob("model.ckpt-*") if file.suffix != ".json")
        assert found.bytes_committed == size
        assert found.stall_seconds >= found.last_stall_seconds > 0
        assert found.last_durable_seconds > 0
        assert found.last_commit_age_seconds >= 0
        assert (found.last_error, found.failures_in_a_row) == (None, 0)
        training.run()
        found = hook.statistics()
        assert (found.saves_begun, found.saves_committed, found.saves_failed) == (3, 2, 1)
        assert found.failures_in_a_row == 1
        assert "No space left" in found.last_error
        with pytest.raises(ms.WriteError):
            training.run()
        hook.wait(WATCHDOG_SECONDS)
        assert hook.statistics().failures_in_a_row == 0


# Listeners


class Recording(ms.Listener):
    """Midstride's own kind; keeps all that it is told."""

    def __init__(self) -> None:
        self.events: list[str] = []
        self.stop = False

    def begin(self, event: Any) -> None:
        self.events.append("begin")

    def before_save(self, event: Any) -> None:
        self.events.append(f"before {event.step}")

    def after_save(self, event: Any) -> bool:
        assert event.total_seconds >= 0
        assert event.stall_seconds >= 0
        assert event.info.name == f"model.ckpt-{event.info.step}"
        self.events.append(f"after {event.info.step}")
        return self.stop

    def save_failed(self, event: Any) -> None:
        self.events.append(f"failed {event.step}: {type(event.error).__name__}")

    def end(self, event: Any) -> None:
        self.events.append("end")


def test_both_kinds_of_listeners(tmp_path: Path) -> None:
    own, theirs = Recording(), CountingListener()
    task = make_task(variables=1, saver=lambda: ProbedSaver(fail=(2,)))
    hook = ours(str(tmp_path), save_steps=1, scaffold=task.scaffold, listeners=[own, theirs], max_failures=1)
    with loop(task, hook, created=True, settle=lambda: hook.wait(WATCHDOG_SECONDS)) as training:
        training.run(2)
        assert not training.should_stop
        own.stop = True
        training.run()
        training.run()
        assert training.should_stop
        training.end()
    told = [event for event in own.events if event not in ("begin", "end")]
    assert told == ["before 0", "after 0", "before 1", "failed 1: WriteError", "before 2", "after 2",
                    "before 3", "after 3", "before 4", "after 4"]  # fmt: skip
    assert theirs.counts == (1, 5, 4, 1)


def test_midstrides_listeners_are_told_of_begin_and_end(tmp_path: Path) -> None:
    own, task = Recording(), make_task()
    hook = ours(str(tmp_path), save_steps=1, scaffold=task.scaffold, listeners=[own])
    with training_in(tmp_path, task, hook) as run:
        run()
    assert (own.events[0], own.events[-1]) == ("begin", "end")


class Raising(CountingListener):
    def __init__(self, method: str, at: int) -> None:
        super().__init__()
        self._method, self._at = method, at

    def before_save(self, session: Any, global_step_value: Any) -> None:
        super().before_save(session, global_step_value)
        if (self._method, self._at) == ("before_save", self.before):
            raise ZeroDivisionError("before_save (injected)")

    def while_after_save(self) -> None:
        if (self._method, self._at) == ("after_save", self.after):
            raise ZeroDivisionError("after_save (injected)")


def test_a_listener_that_raises_in_before_save(tmp_path: Path) -> None:
    """On the training thread, as with TensorFlow's hook: it is the training's own error. Nothing is left half begun."""
    listener, task = Raising("before_save", 2), make_task(variables=1)
    hook = ours(str(tmp_path), save_steps=1, scaffold=task.scaffold, listeners=[listener])
    with loop(task, hook, created=True) as training:
        hook.wait(WATCHDOG_SECONDS)
        with pytest.raises(ZeroDivisionError, match="before_save"):
            training.run()
        hook.wait(WATCHDOG_SECONDS)
        assert steps_on_disk(tmp_path) == [0]
        training.run()
        training.end()
    assert steps_on_disk(tmp_path) == [0, 2]


def test_what_was_announced_to_a_listener_is_always_concluded(tmp_path: Path) -> None:
    own, task = Recording(), make_task(variables=1)
    hook = ours(str(tmp_path), save_steps=1, scaffold=task.scaffold, listeners=[own, Raising("before_save", 2)])
    with loop(task, hook, created=True, settle=lambda: hook.wait(WATCHDOG_SECONDS)) as training:
        with pytest.raises(ZeroDivisionError):
            training.run()
        training.run()
    announced = [event.split()[1] for event in own.events if event.startswith("before")]
    concluded = [re.split("[ :]", event)[1] for event in own.events if event.startswith(("after", "failed"))]
    assert announced == concluded == ["0", "1", "2"]


def test_a_listener_that_raises_in_after_save(tmp_path: Path) -> None:
    """The checkpoint is there and counts; the error is told at the next step."""
    listener, task = Raising("after_save", 2), make_task(variables=1)
    hook = ours(str(tmp_path), save_steps=1, scaffold=task.scaffold, listeners=[listener])
    with loop(task, hook, created=True, settle=lambda: hook.wait(WATCHDOG_SECONDS)) as training:
        training.run()
        assert saved_step(tmp_path) == 1
        assert (hook.statistics().saves_committed, hook.statistics().saves_failed) == (2, 0)
        with pytest.raises(ZeroDivisionError, match="after_save"):
            training.run()
        training.run()
        training.end()
    assert steps_on_disk(tmp_path) == [0, 1, 2, 3]


def test_what_a_midstride_listener_does_wrong_is_counted(tmp_path: Path) -> None:
    class Wrong(ms.Listener):
        def after_save(self, event: Any) -> bool:
            raise ZeroDivisionError

    task = make_task(variables=1)
    hook = ours(str(tmp_path), save_steps=1, scaffold=task.scaffold, listeners=[Wrong()])
    with loop(task, hook, created=True, settle=lambda: hook.wait(WATCHDOG_SECONDS)) as training:
        training.run(2)
        training.end()
    assert steps_on_disk(tmp_path) == [0, 1, 2]
    assert hook.statistics().listener_failures == 3


# Subclasses, as people have written them of the old hook


class Aligned(AsyncCheckpointSaverHook):
    """Keeps its saves on multiples by the private names."""

    seen: list[int]

    def after_create_session(self, session: Any, coord: Any) -> None:
        super().after_create_session(session, coord)
        step = int(session.run(self._global_step_tensor))
        self._timer.update_last_triggered_step(step - step % self._timer._every_steps)

    def after_run(self, run_context: Any, run_values: Any) -> None:
        self.seen = [*getattr(self, "seen", []), int(run_context.session.run(self._global_step_tensor))]
        super().after_run(run_context, run_values)


def test_a_subclass_that_moves_the_timer(tmp_path: Path) -> None:
    for times in (3, 6):
        task = make_task(saver=keeping(10))
        hook = Aligned(str(tmp_path), save_steps=4, scaffold=task.scaffold)
        with training_in(tmp_path, task, hook) as run:
            run(times)
    assert steps_on_disk(tmp_path) == [0, 3, 4, 8, 9]
    assert hook.seen == [4, 5, 6, 7, 8, 9]


class SavesOnDemand(AsyncCheckpointSaverHook):
    """Calls and replaces what CheckpointSaverHook has: ``_save(session, step)``."""

    saves = 0

    def _save(self, session: Any, step: int) -> Any:
        self.saves += 1
        return super()._save(session, step)


def test_a_subclass_that_replaces_save(tmp_path: Path) -> None:
    task = make_task(variables=1)
    hook = SavesOnDemand(str(tmp_path), save_steps=2, scaffold=task.scaffold)
    with loop(task, hook, created=True, settle=lambda: hook.wait(WATCHDOG_SECONDS)) as training:
        training.run(2)
        assert not hook._save(training.session, 2)
        training.run()
        training.end()
    assert steps_on_disk(tmp_path) == [0, 2, 3]
    assert hook.saves == 4


def test_listeners_may_be_added_later(tmp_path: Path) -> None:
    """An Estimator does so with ``_listeners``."""
    task, listener, own = make_task(variables=1), CountingListener(), Recording()
    hook = ours(str(tmp_path), save_steps=1, scaffold=task.scaffold)
    hook._listeners.extend([listener, own])
    with training_in(tmp_path, task, hook) as run:
        run()
    assert listener.counts == (1, 2, 2, 1)
    assert "after 1" in own.events


class TrainsOn(v1.train.CheckpointSaverListener):
    """A listener that takes one more step before each save."""

    def __init__(self, train_op: Any) -> None:
        self._train_op = train_op

    def before_save(self, session: Any, global_step_value: Any) -> None:
        session.run(self._train_op)


def test_label_and_timer_are_of_the_step_of_the_snapshot(tmp_path: Path) -> None:
    task = make_task(variables=2)
    hook = ours(str(tmp_path), save_steps=5, scaffold=task.scaffold, listeners=[TrainsOn(task.train_op)])
    with loop(task, hook, created=True, settle=lambda: hook.wait(WATCHDOG_SECONDS)) as training:
        training.run(5)  # from 1, where the listener took it, to 6
        assert hook._last_checkpoint_step == 7
    assert steps_on_disk(tmp_path) == [1, 7]
    assert [values_of(tmp_path, step) for step in (1, 7)] == [{1}, {7}]


def test_a_save_that_a_recovery_put_off_is_due_though_a_later_step_was_saved(tmp_path: Path) -> None:
    class Break(v1.train.SessionRunHook):
        armed = False

        def before_run(self, run_context: Any) -> None:
            if self.armed:
                self.armed = False
                raise tf.errors.AbortedError(None, None, "the worker is gone (injected)")

    task, breaker = make_task(variables=1, saver=lambda: ProbedSaver(hold=(2,))), Break()
    saver = task.scaffold.saver
    hook = ours(str(tmp_path), save_steps=5, scaffold=task.scaffold)
    with task.graph.as_default():
        creator = v1.train.ChiefSessionCreator(task.scaffold, checkpoint_dir=str(tmp_path))
        with v1.train.MonitoredSession(creator, hooks=[hook, breaker]) as session:
            hook.wait(WATCHDOG_SECONDS)
            for _ in range(5):
                session.run(task.train_op)
            saver.wait_until_held()
            breaker.armed = True
            session.run(task.train_op)  # the checkpoint of step 0 is restored first, while that of step 5 is written
            saver.go.set()
            hook.wait(WATCHDOG_SECONDS)
            session.run(task.train_op)
            hook.wait(WATCHDOG_SECONDS)
            assert hook._last_checkpoint_step == 2


def test_without_memory_for_the_copy_the_rest_stays_held_and_the_checkpoint_is_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    copy, copies = _Buffers.copy, []

    def failing(buffers: Any, number: int, value: Any) -> Any:
        copies.append(number)
        if len(copies) % 2 == 0:
            raise MemoryError
        return copy(buffers, number, value)

    monkeypatch.setattr(_Buffers, "copy", failing)
    task = make_task(variables=4)
    hook = ours(str(tmp_path), save_steps=1, scaffold=task.scaffold, busy="wait")
    with loop(task, hook, created=True) as training:
        training.run(3)
        training.end()
    assert len(copies) >= 4
    assert steps_on_disk(tmp_path) == [0, 1, 2, 3]
    assert [values_of(tmp_path, step) for step in range(4)] == [{0}, {1}, {2}, {3}]
    assert hook.statistics().saves_failed == 0


def test_a_save_that_is_put_off_costs_no_run_of_the_session_at_each_step(tmp_path: Path) -> None:
    task = make_task(variables=1, saver=lambda: ProbedSaver(hold=(2,)))
    hook = ours(str(tmp_path), save_steps=1, scaffold=task.scaffold)
    with loop(task, hook, created=True) as training:
        hook.wait(WATCHDOG_SECONDS)
        training.run()
        task.scaffold.saver.wait_until_held()
        run, reads = training.session.run, []

        def counted(fetches: Any, *arguments: Any, **options: Any) -> Any:
            reads.append(fetches is hook._global_step_tensor)
            return run(fetches, *arguments, **options)

        training.session.run = counted
        training.run(10)
        assert hook.statistics().saves_skipped == 10
        assert sum(reads) <= 1, "the first of them reads the step"
        task.scaffold.saver.go.set()
        hook.wait(WATCHDOG_SECONDS)
        training.run()
        training.session.run = run
        training.end()
    assert steps_on_disk(tmp_path) == [0, 1, 12]


def test_the_end_waits_once_for_a_disk_that_hangs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("midstride.tensorflow.hook.EXIT_SECONDS", 0.5)
    monkeypatch.setattr(limits, "EXIT_SECONDS", 3600.0)
    monkeypatch.setattr(limits, "WRITER_SECONDS", 0.1)
    task = make_task(variables=1, saver=lambda: ProbedSaver(hold=(2,)))
    hook = ours(str(tmp_path), save_steps=1, scaffold=task.scaffold)
    with loop(task, hook, created=True) as training:
        hook.wait(WATCHDOG_SECONDS)
        training.run()
        task.scaffold.saver.wait_until_held()
        with pytest.raises(ms.Deadline, match=r"no progress for 0\.5 s"):
            training.end()
        task.scaffold.saver.go.set()
