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


def test_without_it_signals_are_left_alone(tmp_path: Path) -> None:
    before = signal.getsignal(signal.SIGTERM)
    task = make_task()
    with task.graph.as_default():
        ours(str(tmp_path), save_steps=1, scaffold=task.scaffold).begin()
    assert signal.getsignal(signal.SIGTERM) == before
