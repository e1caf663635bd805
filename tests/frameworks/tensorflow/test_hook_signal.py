"""A signal before the machine is taken away: the step that runs is finished and saved, and training stops."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

pytest.importorskip("tensorflow")

import midstride as ms
from tests.frameworks.tensorflow.training import make_task, ours, saved_step, v1


def test_a_signal_saves_the_step_and_stops_training(tmp_path: Path) -> None:
    before = signal.getsignal(signal.SIGUSR1)
    task = make_task(variables=1)
    hook = ours(str(tmp_path), save_steps=1000, scaffold=task.scaffold, on_signal=ms.OnSignal(signal.SIGUSR1))
    with (
        task.graph.as_default(),
        v1.train.MonitoredSession(v1.train.ChiefSessionCreator(task.scaffold), hooks=[hook]) as session,
    ):
        runs = 0
        while not session.should_stop():
            session.run(task.train_op)
            runs += 1
            if runs == 3:
                signal.raise_signal(signal.SIGUSR1)
            assert runs < 10
    assert runs == 4, "the step after the signal is the last"
    assert saved_step(tmp_path) == 4
    assert signal.getsignal(signal.SIGUSR1) == before


def test_a_loop_that_never_asks_loses_no_step(tmp_path: Path) -> None:
    task = make_task(variables=1)
    hook = ours(str(tmp_path), save_steps=1000, scaffold=task.scaffold, on_signal=ms.OnSignal(signal.SIGUSR1))
    with (
        task.graph.as_default(),
        pytest.raises(RuntimeError, match="should_stop"),
        v1.train.MonitoredSession(v1.train.ChiefSessionCreator(task.scaffold), hooks=[hook]) as session,
    ):
        for run in range(10):
            session.run(task.train_op)
            if run == 3:
                signal.raise_signal(signal.SIGUSR1)
    assert saved_step(tmp_path) == 5


def test_after_a_session_that_an_exception_left_the_signal_means_what_it_meant(tmp_path: Path) -> None:
    heard: list[int] = []
    before = signal.signal(signal.SIGUSR1, lambda signum, frame: heard.append(signum))
    try:
        theirs = signal.getsignal(signal.SIGUSR1)
        task, again = make_task(variables=1), make_task(variables=1)
        hook = ours(str(tmp_path), save_steps=1000, scaffold=task.scaffold, on_signal=ms.OnSignal(signal.SIGUSR1))
        with (
            task.graph.as_default(),
            pytest.raises(ValueError, match="of training"),
            v1.train.MonitoredSession(v1.train.ChiefSessionCreator(task.scaffold), hooks=[hook]) as session,
        ):
            session.run(task.train_op)
            raise ValueError("of training")
        signal.raise_signal(signal.SIGUSR1)
        assert heard == [signal.SIGUSR1]
        assert signal.getsignal(signal.SIGUSR1) == theirs
        # The next session hears signals again.
        hook._scaffold = again.scaffold
        with (
            again.graph.as_default(),
            v1.train.MonitoredSession(v1.train.ChiefSessionCreator(again.scaffold), hooks=[hook]) as session,
        ):
            session.run(again.train_op)
            signal.raise_signal(signal.SIGUSR1)
            session.run(again.train_op)
            assert session.should_stop()
    finally:
        signal.signal(signal.SIGUSR1, before)


def test_without_it_signals_are_left_alone(tmp_path: Path) -> None:
    before = signal.getsignal(signal.SIGTERM)
    task = make_task()
    with task.graph.as_default():
        ours(str(tmp_path), save_steps=1, scaffold=task.scaffold).begin()
    assert signal.getsignal(signal.SIGTERM) == before
