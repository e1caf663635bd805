"""What the tests of the TensorFlow hook share: tiny graphs, a loop with one hook, savers and listeners that a test controls.

Import this only after ``pytest.importorskip("tensorflow")``.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from tensorflow.python.training import monitored_session

v1 = tf.compat.v1

WATCHDOG_SECONDS = 30.0
"""No test depends on this: it only turns what would hang for ever into a failure."""


def ours(*arguments: Any, **options: Any) -> Any:
    """Our hook. Skips the test where the TensorFlow room is not installed."""
    room = pytest.importorskip("midstride.tensorflow")
    return room.AsyncCheckpointSaverHook(*arguments, **options)


@dataclass
class Task:
    """A graph whose train op adds to the global step, and to every other variable of it."""

    graph: tf.Graph
    step: Any
    train_op: Any
    scaffold: Any
    variables: list[Any] = field(default_factory=list)


def make_task(
    *,
    by: int = 1,
    resource: bool = True,
    variables: int = 0,
    floats: int = 1,
    saver: Callable[[], Any] | None = None,
) -> Task:
    """All of ``variables`` hold ``floats`` elements equal to the step: before, and after, every run of the train op."""
    with tf.Graph().as_default() as graph, v1.variable_scope("", use_resource=resource):
        step = v1.train.get_or_create_global_step()
        weights = [
            v1.get_variable(f"w{index}", shape=[floats], initializer=v1.zeros_initializer())
            for index in range(variables)
        ]
        added = tf.fill([floats], tf.constant(by, tf.float32))
        updates = [v1.assign_add(weight, added) for weight in weights]
        train_op = tf.group(*updates, v1.assign_add(step, by))
        scaffold = v1.train.Scaffold(saver=None if saver is None else saver())
    return Task(graph, step, train_op, scaffold, weights)


class Loop:
    """A bare session with one hook, as ``MonitoredSession`` drives it but without the save at its creation.

    ``settle`` is called after everything that may save.
    """

    def __init__(self, task: Task, hook: Any, *, created: bool, settle: Callable[[], None]) -> None:
        self._task, self.hook, self._settle = task, hook, settle
        hook.begin()
        task.scaffold.finalize()
        self.session = v1.Session(graph=task.graph)
        self.session.run(task.scaffold.init_op)
        self._hooked = monitored_session._HookedSession(self.session, [hook])
        if created:
            hook.after_create_session(self.session, None)
            settle()

    def run(self, times: int = 1) -> None:
        for _ in range(times):
            self._hooked.run(self._task.train_op)
            self._settle()

    def end(self) -> None:
        self.hook.end(self.session)
        self._settle()

    @property
    def should_stop(self) -> bool:
        return bool(self._hooked.should_stop())


@contextlib.contextmanager
def loop(task: Task, hook: Any, *, created: bool = False, settle: Callable[[], None] = lambda: None) -> Iterator[Loop]:
    """The graph is the default one of this thread inside, and only of this thread."""
    with task.graph.as_default():
        running = Loop(task, hook, created=created, settle=settle)
        try:
            yield running
        finally:
            running.session.close()


def saved_step(folder: Path) -> int:
    """The global step inside the checkpoint that the state file names."""
    return int(tf.train.load_variable(str(folder), "global_step"))


def steps_on_disk(folder: Path) -> list[int]:
    """The steps that have an index file."""
    return sorted(int(file.name.split("-")[1].split(".")[0]) for file in folder.glob("model.ckpt-*.index"))


def values_of(folder: Path, step: int) -> set[float]:
    """All distinct elements of all variables in the checkpoint of this step, the step itself too."""
    reader = tf.train.load_checkpoint(str(folder / f"model.ckpt-{step}"))
    seen: set[float] = set()
    for name in reader.get_variable_to_shape_map():
        seen.update(np.unique(reader.get_tensor(name)).tolist())
    return seen


def wait_until(ready: Callable[[], bool], what: str) -> None:
    """Look again and again; fail after the watchdog's time."""
    for _ in range(int(WATCHDOG_SECONDS / 0.005)):
        if ready():
            return
        threading.Event().wait(0.005)
    raise AssertionError(f"waited {WATCHDOG_SECONDS:g} s for {what}")


class FullDisk(tf.errors.ResourceExhaustedError):
    """What TensorFlow says when the disk is full; of our own class so that a test can know it again."""

    def __init__(self) -> None:
        super().__init__(None, None, "No space left on device (injected)")


class ProbedSaver(v1.train.Saver):
    """A saver of which single calls of ``save``, counted from 1, are held until ``go`` or fail as on a full disk."""

    def __init__(self, *, hold: tuple[int, ...] = (), fail: tuple[int, ...] = (), **options: Any) -> None:
        super().__init__(**options)
        self._hold, self._fail = hold, fail
        self.calls = 0
        self.held = threading.Event()
        self.go = threading.Event()

    def save(self, *arguments: Any, **options: Any) -> Any:
        self.calls += 1
        if self.calls in self._fail:
            raise FullDisk
        if self.calls in self._hold:
            self.held.set()
            assert self.go.wait(WATCHDOG_SECONDS), "the test never let this save go"
        return super().save(*arguments, **options)

    def wait_until_held(self) -> None:
        assert self.held.wait(WATCHDOG_SECONDS), "no save reached the saver"


class CountingListener(v1.train.CheckpointSaverListener):
    """Counts its calls, and notes which thread made them and whether two were inside at once."""

    def __init__(self) -> None:
        self.begun = self.before = self.after = self.ended = 0
        self.ask_to_stop = False
        self.threads: dict[str, set[int]] = {}
        self.overlapped = False
        self._inside = threading.Lock()

    def begin(self) -> None:
        with self._enter("begin"):
            self.begun += 1

    def before_save(self, session: Any, global_step_value: Any) -> None:
        with self._enter("before_save"):
            self.before += 1

    def after_save(self, session: Any, global_step_value: Any) -> bool:
        with self._enter("after_save"):
            self.after += 1
            self.while_after_save()
            return self.ask_to_stop

    def end(self, session: Any, global_step_value: Any) -> None:
        with self._enter("end"):
            self.ended += 1

    def while_after_save(self) -> None:
        """For tests to override."""

    @property
    def counts(self) -> tuple[int, int, int, int]:
        """Calls of begin, before_save, after_save, end."""
        return self.begun, self.before, self.after, self.ended

    @contextlib.contextmanager
    def _enter(self, method: str) -> Iterator[None]:
        self.threads.setdefault(method, set()).add(threading.get_ident())
        if not self._inside.acquire(blocking=False):
            self.overlapped = True
            yield
            return
        try:
            yield
        finally:
            self._inside.release()


class MockedTime:
    """Stands for ``time.time`` or ``time.perf_counter``: it moves only when told."""

    def __init__(self, start: float = 1_700_000_000.0) -> None:
        self._start = self.now = start

    def __call__(self) -> float:
        return self.now

    def move_to(self, seconds_from_start: float) -> None:
        self.now = self._start + seconds_from_start
