"""What TensorFlow tests of its own checkpoint hooks holds of ours: each case, restated in our words, is run three ways.

``oracle`` is TensorFlow's CheckpointSaverHook, ``blocking`` is ours with ``blocking=True``, ``async`` is ours with
``hook.wait()`` before each look. A case that the oracle fails is a wrong case.

From tensorflow/python/training/basic_session_run_hooks_test.py:

| upstream class and test | here |
|---|---|
| SecondOrStepTimerTest.test_raise_in_both_secs_and_steps, and the one of CheckpointSaverHookTest | test_timer_takes_seconds_or_steps_not_both |
| SecondOrStepTimerTest.test_raise_in_none_secs_and_steps, and the one of CheckpointSaverHookTest | test_timer_needs_seconds_or_steps |
| SecondOrStepTimerTest.test_every_secs | test_timer_by_seconds |
| SecondOrStepTimerTest.test_every_steps | test_timer_by_steps |
| SecondOrStepTimerTest.test_update_last_triggered_step | test_timer_answers_what_has_passed |
| CheckpointSaverHookTest.test_saves_when_saver_and_scaffold_both_missing | test_saver_from_the_collection |
| CheckpointSaverHookTest.test_raise_when_saver_and_scaffold_both_present | test_saver_and_scaffold_exclude_each_other |
| CheckpointSaverHookTest.test_save_secs_saves_in_first_step, .test_save_steps_saves_in_first_step | test_first_run_saves |
| CheckpointSaverHookTest.test_save_secs_calls_listeners_at_begin_and_end | test_listener_counts_of_a_short_run |
| CheckpointSaverHookTest.test_listener_with_monitored_session | test_listener_in_a_singular_monitored_session |
| CheckpointSaverHookTest.test_listener_stops_training_in_after_save | test_listener_stops_training |
| CheckpointSaverHookTest.test_listener_with_default_saver, .test_two_listeners_with_default_saver | test_default_saver_with_listeners |
| CheckpointSaverHookTest.test_save_secs_saves_periodically | test_every_two_seconds |
| CheckpointSaverHookTest.test_save_secs_calls_listeners_periodically | test_every_two_seconds_listeners_are_called |
| CheckpointSaverHookTest.test_save_steps_saves_periodically, and the one of ResourceCheckpointSaverHookTest | test_every_two_steps |
| CheckpointSaverHookTest.test_save_saves_at_end | test_last_step_is_saved_at_the_end |
| CheckpointSaverHookTest.test_summary_writer_defs | test_summary_writer_gets_the_graph_once |
| CheckpointSaverHookTest.test_save_checkpoint_before_first_train_step | test_state_before_the_first_step_is_saved |
| CheckpointSaverHookTest.test_save_graph_def, .test_save_graph_def_false | test_graph_files_are_written_or_not |
| CheckpointSaverHookMultiStepTest.test_save_steps_saves_in_first_step, .test_save_steps_saves_periodically | test_several_steps_a_run |
| CheckpointSaverHookMultiStepTest.test_save_steps_saves_at_end | test_several_steps_a_run_saved_at_the_end |

From tensorflow/python/tpu/async_checkpoint_test.py, whose asserts need neither a TPU nor an Estimator:

| upstream class and test | here |
|---|---|
| AsyncCheckpointingTest.testAsyncCheckpointHookEnabled | test_long_run_in_a_monitored_session |
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("tensorflow")

from tensorflow.python.framework import meta_graph

from tests.frameworks.tensorflow.conftest import Way
from tests.frameworks.tensorflow.training import CountingListener, MockedTime, make_task, saved_step, v1


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> MockedTime:
    """``time.time`` stands still until the test moves it."""
    mocked = MockedTime()
    monkeypatch.setattr(time, "time", mocked)
    return mocked


# The timer


def test_timer_takes_seconds_or_steps_not_both(way: Way, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"Can not provide both every_secs and every_steps\."):
        way.make(str(tmp_path), save_secs=2.0, save_steps=10)


def test_timer_needs_seconds_or_steps(way: Way, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"Either every_secs or every_steps should be provided\."):
        way.make(str(tmp_path))


def test_timer_by_seconds(way: Way, tmp_path: Path, clock: MockedTime) -> None:
    timer = way.make(str(tmp_path), save_secs=1.0)._timer
    assert timer.should_trigger_for_step(1)
    timer.update_last_triggered_step(1)
    assert not timer.should_trigger_for_step(1)
    assert not timer.should_trigger_for_step(2)
    clock.move_to(1.0)
    assert not timer.should_trigger_for_step(1), "the same step is never due twice"
    assert timer.should_trigger_for_step(2)


def test_timer_by_steps(way: Way, tmp_path: Path) -> None:
    timer = way.make(str(tmp_path), save_steps=3)._timer
    assert timer.should_trigger_for_step(1)
    timer.update_last_triggered_step(1)
    assert [timer.should_trigger_for_step(step) for step in (1, 2, 3, 4)] == [False, False, False, True]


def test_timer_answers_what_has_passed(way: Way, tmp_path: Path, clock: MockedTime) -> None:
    timer = way.make(str(tmp_path), save_steps=1)._timer
    assert timer.update_last_triggered_step(1) == (None, None)
    clock.move_to(0.25)
    assert timer.update_last_triggered_step(5) == (0.25, 4)
    clock.move_to(1.75)
    assert timer.update_last_triggered_step(7) == (1.5, 2)
    assert timer.last_triggered_step() == 7


# Which saver


def test_saver_from_the_collection(way: Way, tmp_path: Path) -> None:
    task = make_task()
    with way.loop(task, way.make(str(tmp_path), save_steps=1)) as training:
        training.run()
        assert saved_step(tmp_path) == 1


def test_saver_and_scaffold_exclude_each_other(way: Way, tmp_path: Path) -> None:
    task = make_task(saver=v1.train.Saver)
    with pytest.raises(ValueError, match=r"You cannot provide both saver and scaffold\."):
        way.make(str(tmp_path), save_steps=1, saver=task.scaffold.saver, scaffold=task.scaffold)


# When it saves


@pytest.mark.parametrize("interval", [{"save_secs": 2}, {"save_steps": 2}], ids=["secs", "steps"])
def test_first_run_saves(way: Way, tmp_path: Path, interval: dict[str, int]) -> None:
    task = make_task()
    with way.loop(task, way.make(str(tmp_path), scaffold=task.scaffold, **interval)) as training:
        training.run()
        assert saved_step(tmp_path) == 1


@pytest.mark.parametrize("resource", [False, True], ids=["ref", "resource"])
def test_every_two_steps(way: Way, tmp_path: Path, resource: bool) -> None:
    task = make_task(resource=resource)
    seen = []
    with way.loop(task, way.make(str(tmp_path), save_steps=2, scaffold=task.scaffold)) as training:
        for _ in range(5):
            training.run()
            seen.append(saved_step(tmp_path))
    assert seen == [1, 1, 3, 3, 5]


def test_every_two_seconds(way: Way, tmp_path: Path, clock: MockedTime) -> None:
    task = make_task()
    seen = []
    with way.loop(task, way.make(str(tmp_path), save_secs=2, scaffold=task.scaffold)) as training:
        for seconds in (0, 0.5, 2.5, 2.6, 2.7, 10):
            clock.move_to(seconds)
            training.run()
            seen.append(saved_step(tmp_path))
    assert seen == [1, 1, 3, 3, 3, 6]


def test_every_two_seconds_listeners_are_called(way: Way, tmp_path: Path, clock: MockedTime) -> None:
    task, listener = make_task(), CountingListener()
    hook = way.make(str(tmp_path), save_secs=2, scaffold=task.scaffold, listeners=[listener])
    seen = []
    with way.loop(task, hook) as training:
        for seconds in (0, 0.5, 2.5, 2.6, 2.7, 10, 10.5):
            clock.move_to(seconds)
            training.run()
            seen.append(listener.after)
        clock.move_to(11)
        training.end()
    assert seen == [1, 1, 2, 2, 2, 3, 3]
    assert listener.counts == (1, 4, 4, 1), "the seventh step, not yet due, is saved at the end"


def test_state_before_the_first_step_is_saved(way: Way, tmp_path: Path) -> None:
    task = make_task()
    hook = way.make(str(tmp_path), save_steps=2, scaffold=task.scaffold)
    with way.loop(task, hook, created=True) as training:
        seen = [saved_step(tmp_path)]
        for _ in range(2):
            training.run()
            seen.append(saved_step(tmp_path))
    assert seen == [0, 0, 2]


def test_last_step_is_saved_at_the_end(way: Way, tmp_path: Path, clock: MockedTime) -> None:
    task = make_task()
    with way.loop(task, way.make(str(tmp_path), save_secs=2, scaffold=task.scaffold)) as training:
        training.run(2)
        assert saved_step(tmp_path) == 1
        training.end()
        assert saved_step(tmp_path) == 2


def test_several_steps_a_run(way: Way, tmp_path: Path) -> None:
    task = make_task(by=5)
    hook = way.make(str(tmp_path), save_steps=10, scaffold=task.scaffold)
    hook._set_steps_per_run(5)
    seen = []
    with way.loop(task, hook) as training:
        for _ in range(5):
            training.run()
            seen.append(saved_step(tmp_path))
    assert seen == [5, 5, 15, 15, 25]


def test_several_steps_a_run_saved_at_the_end(way: Way, tmp_path: Path) -> None:
    task = make_task(by=5)
    hook = way.make(str(tmp_path), save_steps=10, scaffold=task.scaffold)
    hook._set_steps_per_run(5)
    with way.loop(task, hook) as training:
        training.run(2)
        training.end()
        assert saved_step(tmp_path) == 10


# Listeners


def test_listener_counts_of_a_short_run(way: Way, tmp_path: Path, clock: MockedTime) -> None:
    task, listener = make_task(), CountingListener()
    hook = way.make(str(tmp_path), save_secs=2, scaffold=task.scaffold, listeners=[listener])
    with way.loop(task, hook) as training:
        training.run(2)
        assert listener.counts == (1, 1, 1, 0)
        training.end()
    assert listener.counts == (1, 2, 2, 1)


def test_listener_in_a_singular_monitored_session(way: Way, tmp_path: Path) -> None:
    task, listener = make_task(), CountingListener()
    hook = way.make(str(tmp_path), save_steps=1, scaffold=task.scaffold, listeners=[listener])
    with (
        task.graph.as_default(),
        v1.train.SingularMonitoredSession(
            hooks=[hook], scaffold=task.scaffold, checkpoint_dir=str(tmp_path)
        ) as session,
    ):
        for _ in range(2):
            way.settle(hook)
            session.run(task.train_op)
        way.settle(hook)
        assert session.raw_session().run(task.step) == 2
    assert listener.counts == (1, 3, 3, 1)


def test_listener_stops_training(way: Way, tmp_path: Path) -> None:
    task, listener = make_task(), CountingListener()
    hook = way.make(str(tmp_path), save_steps=1, scaffold=task.scaffold, listeners=[listener])
    with way.loop(task, hook, created=True) as training:
        for _ in range(2):
            training.run()
            assert not training.should_stop
        listener.ask_to_stop = True
        training.run()
        if way.name == "async":
            assert not training.should_stop, "nobody can ask a session to stop between two runs"
            training.run()
        assert training.should_stop


@pytest.mark.parametrize("how_many", [1, 2])
def test_default_saver_with_listeners(way: Way, tmp_path: Path, how_many: int) -> None:
    task, listeners = make_task(), [CountingListener() for _ in range(how_many)]
    hook = way.make(str(tmp_path), save_steps=1, listeners=listeners)
    with (
        task.graph.as_default(),
        v1.train.SingularMonitoredSession(hooks=[hook], checkpoint_dir=str(tmp_path)) as session,
    ):
        for _ in range(2):
            way.settle(hook)
            session.run(task.train_op)
        way.settle(hook)
    assert [listener.counts for listener in listeners] == [(1, 3, 3, 1)] * how_many

    again = make_task()
    with again.graph.as_default(), v1.train.SingularMonitoredSession(checkpoint_dir=str(tmp_path)) as session:
        assert session.run(again.step) == 2


# What it writes besides


class SummaryRecorder:
    """Takes the place of the summary writer of one folder and keeps what it is given."""

    def __init__(self) -> None:
        self.graphs: list[Any] = []
        self.meta_graphs: list[Any] = []
        self.session_logs: list[tuple[Any, int]] = []

    def add_graph(self, graph: Any, global_step: int | None = None) -> None:
        self.graphs.append(graph)

    def add_meta_graph(self, meta_graph_def: Any, global_step: int | None = None) -> None:
        self.meta_graphs.append(meta_graph_def)

    def add_session_log(self, session_log: Any, global_step: int | None = None) -> None:
        self.session_logs.append((session_log, int(global_step)))

    def flush(self) -> None: ...

    def close(self) -> None: ...


def test_summary_writer_gets_the_graph_once(way: Way, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recorder = SummaryRecorder()
    monkeypatch.setitem(v1.summary.FileWriterCache._cache, str(tmp_path), recorder)
    task = make_task()
    hook = way.make(str(tmp_path), save_steps=2, scaffold=task.scaffold)
    with way.loop(task, hook, created=True) as training:
        training.run(2)
        expected = meta_graph.create_meta_graph_def(
            graph_def=task.graph.as_graph_def(add_shapes=True), saver_def=task.scaffold.saver.saver_def
        )
    assert recorder.graphs == [task.graph]
    assert recorder.meta_graphs == [expected]
    logs = [(log.status, log.checkpoint_path, step) for log, step in recorder.session_logs]
    assert logs == [(v1.SessionLog.CHECKPOINT, str(tmp_path / "model.ckpt"), step) for step in (0, 2)]


@pytest.mark.parametrize("wanted", [True, False], ids=["graph", "no_graph"])
def test_graph_files_are_written_or_not(way: Way, tmp_path: Path, wanted: bool) -> None:
    task = make_task()
    hook = way.make(str(tmp_path), save_steps=1, scaffold=task.scaffold, save_graph_def=wanted)
    with way.loop(task, hook, created=True) as training:
        assert (tmp_path / "graph.pbtxt").exists() == wanted
        assert len(list(tmp_path.glob("*.meta"))) == (1 if wanted else 0)
        training.run()
        assert len(list(tmp_path.glob("*.meta"))) == (2 if wanted else 0)
        assert saved_step(tmp_path) == 1


# A long run


@pytest.mark.parametrize("waited_for", [True, False], ids=["settled", "at_full_speed"])
def test_long_run_in_a_monitored_session(way: Way, tmp_path: Path, waited_for: bool) -> None:
    """100 steps, five a run, a save every five. At full speed ours may skip saves, but never the last."""
    task = make_task(by=5, saver=lambda: v1.train.Saver(max_to_keep=10))
    listener = CountingListener()
    hook = way.make(str(tmp_path), save_steps=5, scaffold=task.scaffold, listeners=[listener])
    hook._set_steps_per_run(5)
    with (
        task.graph.as_default(),
        v1.train.MonitoredSession(v1.train.ChiefSessionCreator(task.scaffold), hooks=[hook]) as session,
    ):
        for _ in range(20):
            if waited_for:
                way.settle(hook)
            session.run(task.train_op)
        if waited_for:
            way.settle(hook)
    kept = list(tmp_path.glob("model.ckpt-*.meta"))
    assert 1 <= len(kept) <= 10
    assert saved_step(tmp_path) == 100
    assert listener.before == listener.after >= 2
    if waited_for:
        assert listener.counts == (1, 21, 21, 1)
        assert len(kept) == 10

    again = make_task(by=5)
    with again.graph.as_default(), v1.train.SingularMonitoredSession(checkpoint_dir=str(tmp_path)) as session:
        assert session.run(again.step) == 100
