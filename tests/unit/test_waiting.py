"""Waiting counts the time in which nothing moves, and not that in which nothing could."""

from __future__ import annotations

import threading

import pytest

import midstride as ms
from midstride import waiting
from midstride.waiting import StallWatch, wait_for


class Clock:
    """Shows the times of a list, one a look, and then the last for ever."""

    def __init__(self, times: list[float]) -> None:
        self._times = times

    def monotonic(self) -> float:
        return self._times.pop(0) if len(self._times) > 1 else self._times[0]


def wait(monkeypatch: pytest.MonkeyPatch, times: list[float], looks: int) -> None:
    """Until the look number ``looks``, with 60 s for what does not move."""
    changed = threading.Condition()
    seen: list[int] = []
    monkeypatch.setattr(waiting, "time", Clock(times))
    monkeypatch.setattr(changed, "wait", lambda _: None)

    def ready() -> bool:
        seen.append(len(seen))
        return len(seen) > looks

    with changed:
        wait_for(changed, ready, what=lambda: "it", progress=lambda: 0, stall_seconds=60.0)


def test_a_process_that_was_stopped_for_an_hour_goes_on_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    wait(monkeypatch, [0.0, 1.0, 3600.0, 3601.0, 3602.0], 4)


def test_what_does_not_move_in_all_the_looks_of_a_minute_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ms.Deadline, match="no progress for 60 s"):
        wait(monkeypatch, [float(second) for second in range(62)], 1000)


@pytest.mark.parametrize("moves", [True, False])
def test_a_watch_gives_a_process_that_was_stopped_a_moment_to_move(
    moves: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(waiting, "time", Clock([0.0, 3600.0]))
    progress = [0]
    monkeypatch.setattr(waiting, "_sleep", lambda _: progress.append(1) if moves else None)
    watch = StallWatch()
    assert not watch.stalled(lambda: len(progress))
    assert watch.stalled(lambda: len(progress)) is not moves
