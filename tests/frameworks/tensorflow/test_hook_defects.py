"""The defects of TensorFlow's old asynchronous hook, D1 to D19: one test each, which ours and a mended imitation pass.

``old`` is the imitation with this defect and nothing else wrong; a test that it passes is an error. Counts and orders
are asserted, never times.
"""

from __future__ import annotations

import contextlib
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("tensorflow")

import tensorflow as tf
from google.protobuf import text_format
from tensorflow.python.client import session as session_module
from tensorflow.python.saved_model.pywrap_saved_model import metrics

from tests.frameworks.tensorflow.file_order import FileOrder
from tests.frameworks.tensorflow.old_hook import imitate
from tests.frameworks.tensorflow.training import (
    WATCHDOG_SECONDS,
    CountingListener,
    FullDisk,
    MockedTime,
    ProbedSaver,
    loop,
    make_task,
    ours,
    saved_step,
    steps_on_disk,
    v1,
    values_of,
    wait_until,
)

Make = Callable[..., Any]


def against(*defects: str, raises: type[BaseException] = AssertionError) -> Any:
    """Run the test with ours, with the imitation that has no defect, and with the one that has these."""
    old = pytest.mark.xfail(strict=True, raises=raises, reason="what the old hook did")
    return pytest.mark.parametrize(
        "make",
        [
            pytest.param(ours, id="ours"),
            pytest.param(imitate(), id="mended"),
            pytest.param(imitate(*defects), id="old", marks=old),
        ],
    )


# D4 goes with D1: with its error told, an imitation that writes nothing would not get as far as to be looked at.
@against("D1", "D4")
def test_d1_checkpoints_are_written_in_the_default_mode(make: Make, tmp_path: Path) -> None:
    assert tf.executing_eagerly(), "this test is about TensorFlow 2's default mode"
    task = make_task(variables=1)
    hook = make(str(tmp_path), save_steps=1, scaffold=task.scaffold)
    with loop(task, hook, created=True, settle=lambda: hook.wait(timeout=WATCHDOG_SECONDS)) as training:
        training.run(2)
        assert steps_on_disk(tmp_path) == [0, 1, 2]
        assert [values_of(tmp_path, step) for step in (0, 1, 2)] == [{0.0}, {1.0}, {2.0}]


@against("D2")
def test_d2_graph_pbtxt_is_the_training_graph(make: Make, tmp_path: Path) -> None:
    task = make_task(variables=2)
    hook = make(str(tmp_path), save_steps=100, scaffold=task.scaffold)
    with loop(task, hook, created=True) as training:
        training.run()
        training.end()
        expected = task.graph.as_graph_def(add_shapes=True)
    written = text_format.Parse((tmp_path / "graph.pbtxt").read_text(), v1.GraphDef())
    assert written == expected
    assert {"w0", "w1", "global_step"} <= {node.name for node in written.node}


@against("D3")
def test_d3_listener_can_stop_training(make: Make, tmp_path: Path) -> None:
    task, listener = make_task(), CountingListener()
    hook = make(str(tmp_path), save_steps=2, scaffold=task.scaffold, listeners=[listener])
    with loop(task, hook, created=True, settle=lambda: hook.wait(timeout=WATCHDOG_SECONDS)) as training:
        training.run()
        assert not training.should_stop
        listener.ask_to_stop = True
        training.run()
        assert listener.after == 2 and not training.should_stop
        training.run()
        assert training.should_stop, "step 3 saves nothing, and yet passes the wish on"


def chain(error: BaseException | None) -> list[BaseException]:
    """An error and what it was raised from."""
    found = []
    while error is not None:
        found.append(error)
        error = error.__cause__ or error.__context__
    return found


def run_until_told(training: Any, times: int) -> BaseException | None:
    """What ``run`` raises, if it does."""
    try:
        training.run(times)
    except Exception as error:
        return error
    return None


@against("D4")
def test_d4_full_disk_is_told_at_the_next_step(make: Make, tmp_path: Path) -> None:
    task = make_task(saver=lambda: ProbedSaver(fail=(2,)))
    hook = make(str(tmp_path), save_steps=2, scaffold=task.scaffold)
    with loop(task, hook, created=True) as training:
        hook.wait(timeout=WATCHDOG_SECONDS)
        training.run(2)
        wait_until(lambda: hook.statistics().saves_failed == 1, "the save of step 2 to fail")
        told = run_until_told(training, 1)
        assert any(isinstance(error, FullDisk) for error in chain(told)), "with its cause"
        assert saved_step(tmp_path) == 0, "the earlier checkpoint is the one to restore"
        assert run_until_told(training, 2) is None, "told once"
        hook.wait(timeout=WATCHDOG_SECONDS)
        assert saved_step(tmp_path) > 2, "and the next save succeeds"


@against("D4")
def test_d4_full_disk_is_told_at_the_end(make: Make, tmp_path: Path) -> None:
    task = make_task(saver=lambda: ProbedSaver(fail=(2,)))
    hook = make(str(tmp_path), save_steps=2, scaffold=task.scaffold)
    with loop(task, hook, created=True) as training:
        hook.wait(timeout=WATCHDOG_SECONDS)
        training.run(2)
        told: BaseException | None = None
        try:
            training.end()
        except Exception as error:
            told = error
    assert any(isinstance(error, FullDisk) for error in chain(told))


@against("D5")
def test_d5_last_step_whose_save_failed_is_saved_at_the_end(make: Make, tmp_path: Path) -> None:
    task = make_task(saver=lambda: ProbedSaver(fail=(2,)))
    hook = make(str(tmp_path), save_steps=3, scaffold=task.scaffold)
    with loop(task, hook, created=True) as training:
        hook.wait(timeout=WATCHDOG_SECONDS)
        training.run(3)
        wait_until(lambda: hook.statistics().saves_failed == 1, "the save of step 3 to fail")
        try:
            training.end()
        except Exception as error:
            assert any(isinstance(cause, FullDisk) for cause in chain(error))
    assert saved_step(tmp_path) == 3
    assert hook._last_checkpoint_step == 3


@pytest.mark.parametrize("resource", [False, True], ids=["ref", "resource"])
@against("D6")
def test_d6_checkpoint_is_of_the_step_that_it_names(make: Make, tmp_path: Path, resource: bool) -> None:
    """Deterministic: the write begins when training has gone on. test_hook_torn.py has the races."""
    task = make_task(variables=3, floats=10, resource=resource, saver=lambda: ProbedSaver(hold=(2,)))
    hook = make(str(tmp_path), save_steps=5, scaffold=task.scaffold)
    with loop(task, hook, created=True) as training:
        hook.wait(timeout=WATCHDOG_SECONDS)
        training.run(5)
        task.scaffold.saver.wait_until_held()
        training.run(3)
        task.scaffold.saver.go.set()
        hook.wait(timeout=WATCHDOG_SECONDS)
        assert values_of(tmp_path, 5) == {5.0}


@against("D7")
def test_d7_skipped_save_stays_due_and_is_counted(make: Make, tmp_path: Path) -> None:
    task = make_task(saver=lambda: ProbedSaver(hold=(2,)))
    hook = make(str(tmp_path), save_steps=10, scaffold=task.scaffold)
    with loop(task, hook, created=True) as training:
        hook.wait(timeout=WATCHDOG_SECONDS)
        training.run(10)
        task.scaffold.saver.wait_until_held()
        training.run(10)
        assert steps_on_disk(tmp_path) == [0], "step 20 was due, and step 10 is still being written"
        task.scaffold.saver.go.set()
        hook.wait(timeout=WATCHDOG_SECONDS)
        training.run()
        hook.wait(timeout=WATCHDOG_SECONDS)
        assert steps_on_disk(tmp_path) == [0, 10, 21], "not put off to step 30"
        assert hook.statistics().saves_skipped == 1


@against("D8")
def test_d8_running_save_is_finished_when_training_raises(make: Make, tmp_path: Path) -> None:
    task = make_task(variables=2, saver=lambda: ProbedSaver(hold=(2,)))
    hook = make(str(tmp_path), save_steps=2, scaffold=task.scaffold)
    with pytest.raises(ZeroDivisionError), task.graph.as_default():
        creator = v1.train.ChiefSessionCreator(task.scaffold)
        with v1.train.MonitoredSession(creator, hooks=[hook]) as session:
            hook.wait(timeout=WATCHDOG_SECONDS)
            session.run(task.train_op)
            session.run(task.train_op)
            task.scaffold.saver.wait_until_held()
            raise ZeroDivisionError
    task.scaffold.saver.go.set()
    hook.wait(timeout=WATCHDOG_SECONDS)
    assert steps_on_disk(tmp_path) == [0, 2]
    assert values_of(tmp_path, 2) == {2.0}
    assert saved_step(tmp_path) == 2


@against("D9")
def test_d9_files_are_durable_before_they_are_named_and_named_before_others_go(
    make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    task = make_task(variables=2, saver=lambda: v1.train.Saver(max_to_keep=1))
    hook = make(str(tmp_path), save_steps=1, scaffold=task.scaffold)
    order = FileOrder(tmp_path)
    order.watch(monkeypatch)
    with loop(task, hook, created=True, settle=lambda: hook.wait(timeout=WATCHDOG_SECONDS)) as training:
        training.run(2)
    monkeypatch.undo()
    assert order.published == [0, 1, 2], "or the test watches the wrong functions"
    assert {name.split(".")[1] for name in order.deleted} == {"ckpt-0", "ckpt-1"}
    assert steps_on_disk(tmp_path) == [2]
    assert order.faults == []


@against("D10")
def test_d10_leftovers_of_a_killed_run_are_swept_at_the_start(make: Make, tmp_path: Path) -> None:
    """The names are those that SIGKILL leaves in the middle of a plain and of a sharded save."""
    leftovers = [
        "model.ckpt-7.data-00000-of-00001.tempstate12674447799773003337",
        "model.ckpt-7.index.tempstate13003401784014780804",
        "model.ckpt-9_temp/part-00000-of-00001.data-00000-of-00001.tempstate13821786751309912367",
    ]
    of_others = [
        "other.ckpt-7.data-00000-of-00001.tempstate9571136018523325779",
        "other.ckpt-9_temp/part-00000-of-00001.data-00000-of-00001",
        "model.ckpt-5.data-00000-of-00001",
        "model.ckpt-5.index",
        "model.ckpt-5.meta",
        "notes_temp/kept.txt",
        "notes.txt",
    ]
    for name in leftovers + of_others:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(b"x")
    task = make_task()
    hook = make(str(tmp_path), save_steps=1, scaffold=task.scaffold)
    with loop(task, hook, created=True, settle=lambda: hook.wait(timeout=WATCHDOG_SECONDS)) as training:
        training.run()
    assert [name for name in of_others if not (tmp_path / name).exists()] == []
    assert [name for name in leftovers if (tmp_path / name).exists()] == []
    assert not (tmp_path / "model.ckpt-9_temp").exists()


class WaitRecorder:
    """Notes the limit of each wait that a hook's own code makes on this thread, and calls back at the first."""

    WAITING_CODE = ("threading", "queue", "concurrent.futures")
    OF_HOOKS = ("midstride", "tests.frameworks.tensorflow.old_hook")

    def __init__(self, monkeypatch: pytest.MonkeyPatch, at_first: Callable[[], None]) -> None:
        self.limits: list[float | None] = []
        self._thread = threading.get_ident()
        self._at_first = at_first
        for kind, name in ((threading.Condition, "wait"), (threading.Thread, "join")):
            self._record(monkeypatch, kind, name)

    def _record(self, monkeypatch: pytest.MonkeyPatch, kind: type, name: str) -> None:
        real = getattr(kind, name)

        def wait(waiting: Any, timeout: float | None = None) -> Any:
            if threading.get_ident() == self._thread and self._is_of_a_hook(sys._getframe(1)):
                if not self.limits:
                    self._at_first()
                self.limits.append(timeout)
            return real(waiting, timeout)

        monkeypatch.setattr(kind, name, wait)

    def _is_of_a_hook(self, frame: Any) -> bool:
        while frame is not None:
            module = frame.f_globals.get("__name__", "")
            if not module.startswith(self.WAITING_CODE):
                return module.startswith(self.OF_HOOKS)
            frame = frame.f_back
        return False


@against("D11")
def test_d11_waits_are_bounded(make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    task = make_task(saver=lambda: ProbedSaver(hold=(2,)))
    saver = task.scaffold.saver
    hook = make(str(tmp_path), save_steps=2, scaffold=task.scaffold)
    with loop(task, hook, created=True) as training:
        hook.wait(timeout=WATCHDOG_SECONDS)
        training.run(2)
        saver.wait_until_held()
        # A hook that waits by other means than these is let go after a while, and found out below.
        watchdog = threading.Timer(5.0, saver.go.set)
        watchdog.start()
        with monkeypatch.context() as patched:
            recorder = WaitRecorder(patched, at_first=saver.go.set)
            training.end()
        watchdog.cancel()
    assert recorder.limits, "the end did not wait for the running save, or not by a Condition, an Event or a join"
    assert None not in recorder.limits
    assert saved_step(tmp_path) == 2


@pytest.mark.parametrize("make", [pytest.param(ours, id="ours"), pytest.param(imitate(), id="mended")])
def test_d11_waiting_for_a_stuck_save_ends_with_an_error(make: Make, tmp_path: Path) -> None:
    """The old hook had no such call, so there is nothing to imitate."""
    task = make_task(saver=lambda: ProbedSaver(hold=(2,)))
    hook = make(str(tmp_path), save_steps=2, scaffold=task.scaffold)
    with loop(task, hook, created=True) as training:
        hook.wait(timeout=WATCHDOG_SECONDS)
        training.run(2)
        task.scaffold.saver.wait_until_held()
        with pytest.raises(TimeoutError):
            hook.wait(timeout=0.01)
        task.scaffold.saver.go.set()
        hook.wait(timeout=WATCHDOG_SECONDS)
        assert saved_step(tmp_path) == 2


@against("D12")
def test_d12_one_session_run_a_step(make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    task = make_task()
    hook = make(str(tmp_path), save_steps=100, scaffold=task.scaffold)
    ran: list[Any] = []
    real = session_module.BaseSession.run

    def run(session: Any, *arguments: Any, **options: Any) -> Any:
        ran.append(session)
        return real(session, *arguments, **options)

    with loop(task, hook, created=True) as training:
        hook.wait(timeout=WATCHDOG_SECONDS)
        monkeypatch.setattr(session_module.BaseSession, "run", run)
        training.run(20)
        assert ran == [training.session] * 20


@against("D13")
def test_d13_listeners_run_one_at_a_time_and_before_save_on_the_training_thread(make: Make, tmp_path: Path) -> None:
    entered, go = threading.Event(), threading.Event()

    class Slow(CountingListener):
        def while_after_save(self) -> None:
            entered.set()
            assert go.wait(WATCHDOG_SECONDS)

    task, listener = make_task(), Slow()
    hook = make(str(tmp_path), save_steps=2, scaffold=task.scaffold, listeners=[listener])
    with loop(task, hook, created=True) as training:
        assert entered.wait(WATCHDOG_SECONDS)
        training.run(4)  # two saves become due while after_save of the first is inside
        go.set()
        hook.wait(timeout=WATCHDOG_SECONDS)
        training.run(2)
        training.end()
    here = {threading.get_ident()}
    assert not listener.overlapped
    assert listener.threads["begin"] == listener.threads["before_save"] == listener.threads["end"] == here
    assert listener.threads["after_save"] != here, "or nothing here was asynchronous"
    assert listener.before == listener.after >= 2


@against("D14")
def test_d14_graph_is_serialised_once(make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    task = make_task(variables=2)
    hook = make(str(tmp_path), save_steps=1, scaffold=task.scaffold)
    serialised: list[Any] = []
    real = tf.Graph._as_graph_def

    def as_graph_def(graph: Any, *arguments: Any, **options: Any) -> Any:
        if graph is task.graph:
            serialised.append(graph)
        return real(graph, *arguments, **options)

    with loop(task, hook, created=True, settle=lambda: hook.wait(timeout=WATCHDOG_SECONDS)) as training:
        training.run()
        expected = task.scaffold.saver.export_meta_graph()
        monkeypatch.setattr(tf.Graph, "_as_graph_def", as_graph_def)
        training.run(4)
        monkeypatch.undo()
    assert serialised == []
    metas = {step: (tmp_path / f"model.ckpt-{step}.meta").read_bytes() for step in steps_on_disk(tmp_path)}
    assert sorted(metas) == [1, 2, 3, 4, 5]
    for meta in metas.values():
        written = v1.MetaGraphDef.FromString(meta)
        assert written.graph_def == expected.graph_def
        assert written.saver_def == expected.saver_def
        assert written.collection_def == expected.collection_def
    with tf.Graph().as_default(), v1.Session() as session:
        v1.train.import_meta_graph(str(tmp_path / "model.ckpt-5.meta")).restore(session, str(tmp_path / "model.ckpt-5"))
        assert session.run(v1.train.get_global_step()) == 5


def logged_checkpoints(folder: Path) -> list[tuple[int, str]]:
    """Step and path of each checkpoint event that is on disk by now, as far as the file is whole."""
    found = []
    for file in sorted(folder.glob("events.out.tfevents.*")):
        with contextlib.suppress(tf.errors.DataLossError):
            for event in v1.train.summary_iterator(str(file)):
                if event.WhichOneof("what") == "session_log":
                    assert event.session_log.status == v1.SessionLog.CHECKPOINT
                    found.append((event.step, event.session_log.checkpoint_path))
    return found


@against("D15")
def test_d15_summary_events_are_flushed(make: Make, tmp_path: Path) -> None:
    """A save happens to push out what earlier ones left in the buffer, so it is the newest event that is missing."""
    task = make_task()
    hook = make(str(tmp_path), save_steps=2, scaffold=task.scaffold)
    with loop(task, hook, created=True, settle=lambda: hook.wait(timeout=WATCHDOG_SECONDS)) as training:
        training.run(2)
        assert logged_checkpoints(tmp_path) == [(step, str(tmp_path / "model.ckpt")) for step in (0, 2)]


@against("D16", raises=TypeError)
def test_d16_save_graph_def_is_an_argument(make: Make, tmp_path: Path) -> None:
    task = make_task()
    hook = make(str(tmp_path), None, 1, None, "model.ckpt", task.scaffold, None, False)
    with loop(task, hook, created=True, settle=lambda: hook.wait(timeout=WATCHDOG_SECONDS)) as training:
        training.run()
        training.end()
    assert steps_on_disk(tmp_path) == [0, 1]
    assert not list(tmp_path.glob("*.meta")) and not (tmp_path / "graph.pbtxt").exists()
    make(str(tmp_path), save_steps=1, save_graph_def=True)


@against("D17")
def test_d17_each_hook_has_its_own_metric_clock(make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The clock is a mocked one: what is asserted is which differences are taken of it."""
    clock = MockedTime()
    monkeypatch.setattr(time, "perf_counter", clock)
    monkeypatch.setattr(time, "time", clock)

    def training_time_saved() -> int:
        return int(metrics.GetTrainingTimeSaved(api_label="async_checkpoint_v1"))

    # In microseconds of a float's precision at this clock's size.
    def seconds(count: float) -> Any:
        return pytest.approx(count * 1e6, abs=10)

    one, other = make_task(), make_task()
    first = make(str(tmp_path / "one"), save_steps=1, scaffold=one.scaffold)
    second = make(str(tmp_path / "other"), save_steps=1, scaffold=other.scaffold)
    with loop(one, first) as training:
        clock.move_to(10)
        training.run()
        first.wait(timeout=WATCHDOG_SECONDS)
    with loop(other, second) as training:
        clock.move_to(12)
        before = training_time_saved()
        training.run()
        second.wait(timeout=WATCHDOG_SECONDS)
        assert training_time_saved() - before == seconds(12), "not the 2 s since the other hook's save"
        clock.move_to(15)
        before = training_time_saved()
        training.run()
        second.wait(timeout=WATCHDOG_SECONDS)
        assert training_time_saved() - before == seconds(3)


class BreakOnce(v1.train.SessionRunHook):
    """Makes the next run fail as if the session's device had gone, once ``armed``."""

    def __init__(self) -> None:
        self.armed = False
        self.sessions = 0

    def after_create_session(self, session: Any, coord: Any) -> None:
        self.sessions += 1

    def before_run(self, run_context: Any) -> None:
        if self.armed:
            self.armed = False
            raise tf.errors.AbortedError(None, None, "the worker was preempted (injected)")


@against("D18")
def test_d18_running_save_outlives_a_recovered_session(make: Make, tmp_path: Path) -> None:
    task = make_task(variables=2, saver=lambda: ProbedSaver(hold=(2,)))
    hook, breaker = make(str(tmp_path), save_steps=2, scaffold=task.scaffold), BreakOnce()
    with task.graph.as_default():
        creator = v1.train.ChiefSessionCreator(task.scaffold, checkpoint_dir=str(tmp_path))
        with v1.train.MonitoredSession(creator, hooks=[hook, breaker]) as session:
            hook.wait(timeout=WATCHDOG_SECONDS)
            session.run(task.train_op)
            session.run(task.train_op)
            task.scaffold.saver.wait_until_held()
            breaker.armed = True
            assert session.run([task.train_op, task.step])[1] in (0, 1), "from the checkpoint of step 0"
            assert breaker.sessions == 2
            task.scaffold.saver.go.set()
            hook.wait(timeout=WATCHDOG_SECONDS)
            assert 2 in steps_on_disk(tmp_path)
            assert values_of(tmp_path, 2) == {2.0}
            session.run(task.train_op)
            assert not session.should_stop(), "training goes on"


@against("D19")
def test_d19_one_thread_for_all_saves(make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    task = make_task()
    hook = make(str(tmp_path), save_steps=1, scaffold=task.scaffold)
    started: list[threading.Thread] = []
    real = threading.Thread.start

    def start(thread: threading.Thread) -> None:
        started.append(thread)
        real(thread)

    with loop(task, hook, created=True, settle=lambda: hook.wait(timeout=WATCHDOG_SECONDS)) as training:
        training.run()
        monkeypatch.setattr(threading.Thread, "start", start)
        training.run(6)
        assert started == []
        assert steps_on_disk(tmp_path)[-1] == 7
