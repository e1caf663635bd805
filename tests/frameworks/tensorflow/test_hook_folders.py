"""Folders that were copied or moved, that have odd names, or that two hooks write into."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("tensorflow")

import tensorflow as tf

import midstride as ms
from midstride import limits, waiting
from midstride.tensorflow import CheckpointManager, latest_checkpoint
from tests.frameworks.tensorflow.training import (
    WATCHDOG_SECONDS,
    ProbedSaver,
    loop,
    make_task,
    ours,
    steps_on_disk,
    v1,
    values_of,
)


def train(folder: Path, steps: int, *, restored: bool = False, path: str | None = None, keep: int = 2) -> None:
    """So many steps, each saved, from ``path``. With ``restored``, TensorFlow restores what the state file names,
    and tells the saver of the others there."""
    task = make_task(variables=1, saver=lambda: v1.train.Saver(max_to_keep=keep))
    hook = ours(str(folder), save_steps=1, scaffold=task.scaffold)
    creator = v1.train.ChiefSessionCreator(
        task.scaffold, checkpoint_dir=str(folder) if restored else None, checkpoint_filename_with_path=path
    )
    with task.graph.as_default(), v1.train.MonitoredSession(creator, hooks=[hook]) as session:
        for _ in range(steps):
            session.run(task.train_op)
            hook.wait(WATCHDOG_SECONDS)


@pytest.mark.parametrize("restored", [False, True])
def test_a_run_on_a_copy_leaves_the_original_alone(tmp_path: Path, restored: bool) -> None:
    train(tmp_path / "original", 4)
    assert steps_on_disk(tmp_path / "original") == [3, 4]
    shutil.copytree(tmp_path / "original", tmp_path / "copy")
    train(tmp_path / "copy", 6, restored=restored)
    assert steps_on_disk(tmp_path / "original") == [3, 4]
    assert steps_on_disk(tmp_path / "copy") == ([9, 10] if restored else [5, 6])


def test_a_manager_on_a_copy_of_a_hooks_folder_leaves_the_original_alone(tmp_path: Path) -> None:
    train(tmp_path / "original", 4)
    shutil.copytree(tmp_path / "original", tmp_path / "copy")
    checkpoint = tf.train.Checkpoint(v=tf.Variable(1.0))
    with CheckpointManager(checkpoint, str(tmp_path / "copy"), max_to_keep=1, checkpoint_name="model.ckpt") as manager:
        manager.save(checkpoint_number=9)
    assert steps_on_disk(tmp_path / "original") == [3, 4]
    assert 9 in steps_on_disk(tmp_path / "copy")


def test_in_a_folder_that_was_moved_earlier_checkpoints_count(tmp_path: Path) -> None:
    train(tmp_path / "before", 4)
    os.rename(tmp_path / "before", tmp_path / "after")
    train(tmp_path / "after", 1, path=latest_checkpoint(tmp_path / "after"))
    assert steps_on_disk(tmp_path / "after") == [4, 5]
    assert latest_checkpoint(tmp_path / "after") == str(tmp_path / "after" / "model.ckpt-5")


@pytest.mark.parametrize("name", ["a[1]", "back\\slash", "star*", "question?", "new\nline", "\u00e9", "{1,2}"])
def test_old_checkpoints_are_deleted_whatever_the_folder_is_called(tmp_path: Path, name: str) -> None:
    folder = tmp_path / name
    train(folder, 4)
    train(folder, 7)
    left = {file.name.removeprefix("model.ckpt-").split(".")[0] for file in folder.iterdir() if "ckpt" in file.name}
    assert left == {"6", "7"}


def test_two_hooks_on_one_folder(tmp_path: Path) -> None:
    task = make_task(variables=2)
    hooks = [ours(str(tmp_path), save_steps=every, scaffold=task.scaffold) for every in (2, 3)]
    creator = v1.train.ChiefSessionCreator(task.scaffold)
    with task.graph.as_default(), v1.train.MonitoredSession(creator, hooks=hooks) as session:
        for _ in range(30):
            session.run(task.train_op)
    assert max(steps_on_disk(tmp_path)) == 30
    for step in steps_on_disk(tmp_path):
        assert values_of(tmp_path, step) == {step}
    assert sum(hook.statistics().saves_failed for hook in hooks) == 0
    assert latest_checkpoint(tmp_path) == str(tmp_path / "model.ckpt-30")


def test_two_managers_on_one_folder(tmp_path: Path) -> None:
    checkpoint = tf.train.Checkpoint(v=tf.Variable(tf.zeros([100_000])))
    managers = [CheckpointManager(checkpoint, str(tmp_path), max_to_keep=3, busy="wait") for _ in range(2)]
    for _ in range(10):
        for manager in managers:
            manager.save()
    for manager in managers:
        manager.close()
        assert manager.statistics().saves_failed == 0


def test_training_hears_once_of_a_save_that_hangs_while_others_are_put_off(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    task = make_task(variables=1, saver=lambda: ProbedSaver(hold=(2,)))
    hook = ours(str(tmp_path), save_steps=1, scaffold=task.scaffold)
    clock = [0.0]
    with loop(task, hook, created=True) as training:
        hook.wait(WATCHDOG_SECONDS)
        training.run()
        task.scaffold.saver.wait_until_held()
        with monkeypatch.context() as patch:
            patch.setattr(waiting.time, "monotonic", lambda: clock[0])
            training.run()
            clock[0] += limits.STORAGE_SECONDS - 1
            training.run()
            clock[0] += 2
            with pytest.raises(ms.Deadline, match=r"no progress for 120 s\. Earlier checkpoints are untouched"):
                training.run()
            clock[0] += 1000
            training.run()
        task.scaffold.saver.go.set()
        training.end()


def test_a_hook_begins_its_next_session_afresh(tmp_path: Path) -> None:
    class Stop(v1.train.CheckpointSaverListener):  # type: ignore[misc]
        def after_save(self, session: Any, global_step_value: Any) -> bool:
            return int(global_step_value) == 2

    def runs(hook: Any, task: Any) -> int:
        count = 0
        creator = v1.train.ChiefSessionCreator(task.scaffold)
        with task.graph.as_default(), v1.train.MonitoredSession(creator, hooks=[hook]) as session:
            while not session.should_stop() and count < 9:
                session.run(task.train_op)
                hook.wait(WATCHDOG_SECONDS)
                count += 1
        return count

    first, second = make_task(variables=1), make_task(variables=1)
    hook = ours(str(tmp_path), save_steps=1, saver=None, scaffold=first.scaffold, listeners=[Stop()])
    assert runs(hook, first) == 3
    hook._scaffold = second.scaffold
    assert runs(hook, second) == 3


def test_a_folder_that_tensorflow_takes_for_a_pattern_is_warned_of(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Not so ``*`` and ``?``, which it finds its files by."""
    for name in ("run [1]", "run*1", "run?1"):
        caplog.clear()
        folder = tmp_path / name
        train(folder, 2)
        is_found = v1.train.checkpoint_exists(str(folder / "model.ckpt-2"))
        assert is_found == ("takes [ in a path for a pattern" not in caplog.text), name
        assert steps_on_disk(folder) == [1, 2]


def test_a_folder_that_was_removed_is_said_to_be_gone(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    task = make_task(variables=1)
    hook = ours(str(folder), save_steps=1, scaffold=task.scaffold, max_failures=9)
    with pytest.raises(ms.WriteError, match=r"run is gone: put it back") as caught, loop(task, hook) as training:
        training.run()
        hook.wait(WATCHDOG_SECONDS)
        shutil.rmtree(folder)
        training.run()
        hook.wait(WATCHDOG_SECONDS)
        hook._saves.check(tolerated=0)
    assert "untouched" not in str(caught.value)
