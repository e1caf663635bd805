"""The clock may do what it likes: order is that of the commits, names never collide, intervals are monotonic."""

from __future__ import annotations

import datetime
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import midstride as ms
from midstride.save import run_folder
from midstride.triggers import Watch

_DAY = 86_400.0


class _Clock:
    """The wall clock of ``run_folder`` and ``time.time``, set by the test."""

    now = 1.7e9

    def time(self) -> float:
        return self.now

    def date_and_time(self, zone: Any = None) -> datetime.datetime:
        return datetime.datetime.fromtimestamp(self.now, datetime.UTC)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> _Clock:
    clock = _Clock()

    class FrozenDatetime(datetime.datetime):
        now = staticmethod(clock.date_and_time)  # type: ignore[assignment]

    monkeypatch.setattr(time, "time", clock.time)
    monkeypatch.setattr(run_folder, "datetime", FrozenDatetime)
    return clock


_JUMPS: dict[str, Callable[[int], float]] = {
    "constant": lambda step: 1.7e9,
    "back an hour each time": lambda step: 1.7e9 - 3600 * step,
    "ahead a day, then back": lambda step: 1.7e9 + (_DAY if step % 2 else -_DAY),
}


@pytest.mark.parametrize("jump", _JUMPS)
def test_order_is_that_of_the_commits(tmp_path: Path, clock: _Clock, jump: str) -> None:
    run = tmp_path / "run"
    with ms.Checkpointer(run, keep=5) as ckpt:
        for step in range(20):
            clock.now = _JUMPS[jump](step)
            info = ckpt.save(step, {"w": np.full(10, step)}).result()
            assert info.created == clock.date_and_time().isoformat(timespec="microseconds")
            latest = ckpt.latest()
            assert latest is not None and latest.step == step
        ckpt.wait()
        assert [info.step for info in ckpt.checkpoints()] == [15, 16, 17, 18, 19]
    assert len(list(run.glob("step-*"))) == 5
    with ms.Checkpointer(run) as ckpt:
        restored = ckpt.restore()
        assert restored is not None and restored.step == 19 and (restored.state["w"] == 19).all()


def test_one_step_saved_again_in_one_tick(tmp_path: Path, clock: _Clock) -> None:
    """Attempts of one step in one tick of the clock have names of their own."""
    with ms.Checkpointer(tmp_path / "run") as ckpt:
        names = {ckpt.save(7, {"w": np.full(10, n)}, overwrite=True).result().name for n in range(20)}
        assert len(names) == 20
        restored = ckpt.restore()
        assert restored is not None and (restored.state["w"] == 19).all()


class _EveryTenMinutes(ms.EverySeconds):
    """``EverySeconds(600)`` over a monotonic clock that the test sets."""

    def start(self, step: int, clock: Callable[[], float] = time.monotonic) -> Watch:
        return super().start(step, lambda: _MONOTONIC[0])


_MONOTONIC = [0.0]


def test_interval_counts_monotonic_time(tmp_path: Path, clock: _Clock) -> None:
    state = {"w": np.zeros(10)}
    with ms.Checkpointer(tmp_path / "run", every=_EveryTenMinutes(600), busy="wait") as ckpt:
        saved = []
        for step, (wall, passed) in enumerate(
            [(0, 0), (3 * _DAY, 1), (-_DAY, 2), (0, 599), (-_DAY, 601), (_DAY, 602), (0, 1190), (-3 * _DAY, 1203)], 1
        ):
            clock.now, _MONOTONIC[0] = 1.7e9 + wall, float(passed)
            if ckpt.step(step, state) is not None:
                saved.append(step)
        assert saved == [5, 8]


def test_interval_as_users_write_it(tmp_path: Path, clock: _Clock) -> None:
    with ms.Checkpointer(tmp_path / "run", every="10min") as ckpt:
        for step in range(10):
            clock.now += _DAY
            assert ckpt.step(step, {"w": np.zeros(10)}) is None
