"""How a training process ends while a save is being written: what becomes of the save, and of the exit code.

Each case is a process of its own that stands in the middle of the save of step 2, with a real signal, a real
``sys.exit`` or the end of its script; the checkpoint of step 1 is durable by then.
"""

from __future__ import annotations

import atexit
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("tensorflow")
pytest.importorskip("midstride.tensorflow")

import tensorflow as tf

import midstride as ms
from midstride.tensorflow import CheckpointFolder, latest_checkpoint
from tests.frameworks.tensorflow import children
from tests.frameworks.tensorflow.training import (
    WATCHDOG_SECONDS,
    FullDisk,
    Loop,
    make_task,
    ours,
    v1,
    values_of,
    wait_until,
)


class GatedSaver(v1.train.Saver):
    """Its third save waits until somebody outside says go; then it may fail."""

    calls = 0

    def __init__(self, base: str, fail: bool) -> None:
        super().__init__()
        self._base, self._fail = Path(base), fail

    def save(self, *arguments: Any, **options: Any) -> Any:
        self.calls += 1
        if self.calls == 3:
            (self._base / "saving").touch()
            wait_until((self._base / "go").exists, "the test to let the save go")
            if self._fail:
                raise FullDisk
        return super().save(*arguments, **options)


class Tell(v1.train.CheckpointSaverListener):
    def __init__(self, base: str) -> None:
        self._path = Path(base, "told")

    def after_save(self, session: Any, global_step_value: Any) -> None:
        with self._path.open("a") as file:
            print(int(global_step_value), file=file)


def train_until_saving(base: str, and_then: Callable[[Any, Any], Any], *, fail: bool = False) -> Any:
    """``and_then`` is called in the middle of the training, while step 2 is being saved."""
    task = make_task(variables=2, saver=lambda: GatedSaver(base, fail))
    hook = ours(str(Path(base, "run")), save_steps=1, scaffold=task.scaffold, listeners=[Tell(base)])
    with (
        task.graph.as_default(),
        v1.train.MonitoredTrainingSession(
            checkpoint_dir=str(Path(base, "run")),
            scaffold=task.scaffold,
            hooks=[hook],
            save_checkpoint_secs=None,
            save_checkpoint_steps=None,
            log_step_count_steps=None,
        ) as session,
    ):
        for _ in range(2):
            hook.wait(WATCHDOG_SECONDS)
            session.run(task.train_op)
        wait_until(Path(base, "saving").exists, "the save of step 2")
        return and_then(session, hook)


def nap(session: Any, hook: Any) -> None:
    """Where a signal finds the main thread."""
    for _ in range(int(WATCHDOG_SECONDS * 100)):
        time.sleep(0.01)


def go(base: str) -> None:
    Path(base, "go").touch()


# What the processes do


def sleeps(base: str) -> None:
    def sleep(session: Any, hook: Any) -> None:
        # Called just before the handler that finishes the save: the last to come is the first to go.
        atexit.register(Path(base, "exiting").touch)
        Path(base, "asleep").touch()
        nap(session, hook)

    train_until_saving(base, sleep)


def has_a_handler(base: str) -> None:
    def handler(number: int, frame: Any) -> None:
        raise SystemExit(7)

    signal.signal(signal.SIGTERM, handler)
    train_until_saving(base, nap)


def saves_on_a_signal(base: str) -> None:
    task = make_task(variables=2)
    hook = ours(
        str(Path(base, "run")), save_steps=10_000, scaffold=task.scaffold, on_signal=ms.OnSignal(signal.SIGTERM)
    )
    with (
        task.graph.as_default(),
        v1.train.MonitoredSession(v1.train.ChiefSessionCreator(task.scaffold), hooks=[hook]) as session,
    ):
        steps = 0
        while not session.should_stop():
            session.run(task.train_op)
            steps += 1
            if steps == 2:
                Path(base, "saving").touch()
    Path(base, "steps").write_text(str(steps))


def calls_exit(base: str, code: int, fail: bool) -> None:
    def leave(session: Any, hook: Any) -> None:
        go(base)
        sys.exit(code)

    train_until_saving(base, leave, fail=fail)


def calls_os_exit(base: str) -> None:
    train_until_saving(base, lambda session, hook: os._exit(5))


def raises(base: str) -> None:
    def fail(session: Any, hook: Any) -> None:
        go(base)
        raise ZeroDivisionError("training failed (injected)")

    train_until_saving(base, fail)


def just_ends(base: str) -> None:
    """A loop of one's own, which never calls ``end``."""
    task = make_task(variables=2, saver=lambda: GatedSaver(base, False))
    hook = ours(str(Path(base, "run")), save_steps=1, scaffold=task.scaffold, listeners=[Tell(base)])
    with task.graph.as_default():
        training = Loop(task, hook, created=True, settle=lambda: None)
        for _ in range(2):
            hook.wait(WATCHDOG_SECONDS)
            training.run()
        wait_until(Path(base, "saving").exists, "the save of step 2")
        training.session.close()
    go(base)


def forks(base: str) -> int:
    """The child neither saves, nor waits, nor takes anything away; the parent's save is finished as ever."""

    def work(session: Any, hook: Any) -> int:
        child = os.fork()
        if child == 0:
            try:
                hook.wait(1)
                try:
                    hook._saves.begin(9)
                except ms.SaveError as error:
                    Path(base, "refused").write_text(str(error))
            finally:
                sys.exit(11)
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        Path(base, "child").write_text(str(status))
        go(base)
        return 0

    # The child leaves by sys.exit, through everything that the interpreter does at its end.
    return int(train_until_saving(base, work))


# What must be there


def told(base: Path) -> list[int]:
    return [int(line) for line in (base / "told").read_text().split()]


def check_whole(base: Path, newest: int) -> None:
    """The newest is this, everything that is listed is whole, and whatever was told of is listed."""
    folder = base / "run"
    state = tf.train.get_checkpoint_state(str(folder))
    steps = [int(path.rpartition("-")[2]) for path in state.all_model_checkpoint_paths]
    assert steps[-1] == newest
    for step in steps:
        assert values_of(folder, step) == {float(step)}
    assert set(told(base)) <= set(steps)
    assert latest_checkpoint(folder) == str(folder / f"model.ckpt-{newest}")
    assert not CheckpointFolder(folder).verify()[f"model.ckpt-{newest}"]


def started(work: Callable[..., Any], base: Path, *arguments: Any) -> children.Child:
    """Running, and in the middle of its save."""
    child = children.start(work, base, *arguments)
    wait_until((base / "saving").exists, "the child to save")
    return child


def test_ctrl_c(tmp_path: Path) -> None:
    child = started(sleeps, tmp_path)
    wait_until((tmp_path / "asleep").exists, "the training to be interrupted")
    child.send(signal.SIGINT)
    go(str(tmp_path))
    assert child.wait() == -signal.SIGINT
    assert "KeyboardInterrupt" in child.output
    check_whole(tmp_path, 2)
    assert told(tmp_path) == [0, 1, 2]


def test_ctrl_c_again_gives_the_save_up(tmp_path: Path) -> None:
    child = started(sleeps, tmp_path)
    wait_until((tmp_path / "asleep").exists, "the training to be interrupted")
    child.send(signal.SIGINT)
    wait_until((tmp_path / "exiting").exists, "the interpreter to end")
    child.send(signal.SIGINT)
    assert child.wait() != 0, "what was torn off is no success"
    check_whole(tmp_path, 1)


def test_sigterm(tmp_path: Path) -> None:
    child = started(sleeps, tmp_path)
    child.send(signal.SIGTERM)
    assert child.wait() == -signal.SIGTERM
    check_whole(tmp_path, 1)


def test_sigterm_with_a_handler(tmp_path: Path) -> None:
    child = started(has_a_handler, tmp_path)
    child.send(signal.SIGTERM)
    go(str(tmp_path))
    assert child.wait() == 7, child.output
    check_whole(tmp_path, 2)


def test_sigterm_with_on_signal(tmp_path: Path) -> None:
    child = started(saves_on_a_signal, tmp_path)
    child.send(signal.SIGTERM)
    assert child.wait() == 0, child.output
    steps = int((tmp_path / "steps").read_text())
    folder = tmp_path / "run"
    assert latest_checkpoint(folder) == str(folder / f"model.ckpt-{steps}")
    assert values_of(folder, steps) == {float(steps)}


@pytest.mark.parametrize("code", [0, 3])
def test_sys_exit_finishes_the_save_and_keeps_the_code(code: int, tmp_path: Path) -> None:
    child = children.run(calls_exit, tmp_path, code, False)
    assert child.wait() == code, child.output
    check_whole(tmp_path, 2)
    assert told(tmp_path) == [0, 1, 2]


def test_sys_exit_does_not_hide_that_the_save_failed(tmp_path: Path) -> None:
    child = children.run(calls_exit, tmp_path, 0, True)
    assert child.wait() == 1, "success would be a lie"
    assert "midstride: WriteError" in child.output
    assert "step 2" in child.output
    check_whole(tmp_path, 1)


def test_os_exit(tmp_path: Path) -> None:
    child = children.run(calls_os_exit, tmp_path)
    assert child.wait() == 5
    check_whole(tmp_path, 1)


def test_training_raises(tmp_path: Path) -> None:
    child = children.run(raises, tmp_path)
    assert child.wait() == 1
    assert "ZeroDivisionError: training failed" in child.output
    check_whole(tmp_path, 2)


def test_the_script_ends(tmp_path: Path) -> None:
    child = children.run(just_ends, tmp_path)
    assert child.wait() == 0, child.output
    check_whole(tmp_path, 2)


def test_the_process_forks(tmp_path: Path) -> None:
    child = children.run(forks, tmp_path)
    assert child.wait() == 0, child.output
    assert (tmp_path / "child").read_text() == "11"
    assert "forked child" in (tmp_path / "refused").read_text()
    check_whole(tmp_path, 2)
