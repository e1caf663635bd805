"""A fault that passes is ridden out: a save is tried again, after longer and longer pauses, from the staged snapshot.

How many saves that fail all the same a run tolerates in a row is said with ``max_failures``; more are
raised, and all are counted. The age of the last commit is there to see.
"""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hooked import HookedStorage

import midstride as ms
from midstride import telemetry
from midstride.errors import Unavailable
from midstride.storage import open_storage


class _Flaky:
    """Fails every write of these steps."""

    def __init__(self, steps: Any) -> None:
        self.steps = steps

    def __call__(self, operation: str, name: str) -> None:
        if operation == "write" and name.startswith("step-") and int(name.split("-")[1]) in self.steps:
            raise Unavailable("injected: try again later")


def _state(step: int) -> dict[str, Any]:
    return {"w": np.full(1000, step)}


def _run(ckpt: ms.Checkpointer, steps: range) -> int:
    """Train until the end or an error; return the last step that was reached."""
    for step in steps:
        try:
            ckpt.step(step, _state(step))
        except ms.WriteError:
            return step
    return steps[-1]


def _checkpointer(path: Path, failing: Any, **options: Any) -> ms.Checkpointer:
    return ms.Checkpointer(HookedStorage(open_storage(path), _Flaky(failing)), every=1, busy="wait", **options)


class _FewFaults:
    """Fails the next few writes, whatever they are of."""

    def __init__(self, count: int) -> None:
        self.left = count

    def __call__(self, operation: str, name: str) -> None:
        if operation == "write" and name.startswith("step-") and self.left:
            self.left -= 1
            raise Unavailable("injected: try again later")


@pytest.mark.parametrize("faults", [1, 3])
def test_faults_that_pass(tmp_path: Path, faults: int, pauses: list[float]) -> None:
    storage = HookedStorage(open_storage(tmp_path), _FewFaults(faults))
    with ms.Checkpointer(storage, every=1, busy="wait") as ckpt:
        assert _run(ckpt, range(1, 4)) == 3
        ckpt.wait()
        statistics = ckpt.statistics()
    assert (statistics.saves_retried, statistics.saves_failed) == (faults, 0)
    assert pauses == [0.5, 2.0, 8.0][:faults]
    assert [(ms.open(tmp_path).load(step)["w"] == step).all() for step in (1, 2, 3)] == [True] * 3


def test_five_faults_in_a_row(tmp_path: Path, pauses: list[float]) -> None:
    """Four attempts are what a save has; the next save needs two."""
    storage = HookedStorage(open_storage(tmp_path), _FewFaults(5))
    with ms.Checkpointer(storage, every=1, busy="wait", max_failures=1) as ckpt:
        assert _run(ckpt, range(1, 4)) == 3
        ckpt.wait()
        assert ckpt.statistics().saves_failed == 1
    assert pauses == [0.5, 2.0, 8.0, 0.5]
    assert [info.step for info in ms.open(tmp_path).checkpoints()] == [2, 3]


def test_the_state_may_change_while_a_save_is_tried_again(tmp_path: Path) -> None:
    state = {"w": np.zeros(1000)}
    storage = HookedStorage(open_storage(tmp_path), _FewFaults(3))
    with ms.Checkpointer(storage) as ckpt:
        pending = ckpt.save(7, state)
        state["w"][:] = 9
        pending.result()
    assert (ms.open(tmp_path).load()["w"] == 0).all()


def test_raise_at_once(tmp_path: Path) -> None:
    with _checkpointer(tmp_path, {3}) as ckpt:
        reached = _run(ckpt, range(1, 10))
        assert reached in (3, 4), "told at the next step at the latest, once that step's save had begun"
        assert _run(ckpt, range(reached + 1, 10)) == 9, "told once"
    assert [info.step for info in ms.open(tmp_path).checkpoints()] == [1, 2, 4, 5, 6, 7, 8, 9]


def test_one_fault_is_tolerated(tmp_path: Path) -> None:
    with _checkpointer(tmp_path, {3, 6, 7}, max_failures=2) as ckpt:
        assert _run(ckpt, range(1, 10)) == 9
        statistics = ckpt.statistics()
    assert statistics.saves_failed == 3, "tolerated, not unseen"
    assert "try again later" in str(statistics.last_error)
    assert ckpt.statistics().failures_in_a_row == 0
    assert [info.step for info in ms.open(tmp_path).checkpoints()] == [1, 2, 4, 5, 8, 9]


@pytest.mark.parametrize("max_failures", [1, 2, 4])
def test_too_many_in_a_row(tmp_path: Path, max_failures: int) -> None:
    ckpt = _checkpointer(tmp_path, range(3, 8), max_failures=max_failures)
    one_too_many = 3 + max_failures
    assert _run(ckpt, range(1, 10)) in (one_too_many, one_too_many + 1)
    assert ckpt.statistics().saves_failed >= max_failures + 1
    with contextlib.suppress(ms.WriteError):  # of the save that was begun when the error was raised
        ckpt.close()


def test_five_in_a_row_within_the_limit(tmp_path: Path) -> None:
    with _checkpointer(tmp_path, range(3, 8), max_failures=5) as ckpt:
        assert _run(ckpt, range(1, 10)) == 9
        assert ckpt.statistics().saves_failed == 5
    assert [info.step for info in ms.open(tmp_path).checkpoints()] == [1, 2, 8, 9]


def test_failing_for_ever(tmp_path: Path) -> None:
    ckpt = _checkpointer(tmp_path, range(2, 1000), max_failures=3)
    assert _run(ckpt, range(1, 100)) in (5, 6)
    with contextlib.suppress(ms.WriteError):
        ckpt.wait()
    # Who waits for a save, and who closes, is told of its failure, tolerated or not.
    with pytest.raises(ms.WriteError, match="step 50 "):
        ckpt.save(50, _state(50))
        ckpt.wait()
    with pytest.raises(ms.WriteError, match="step 51 "):
        ckpt.save(51, _state(51))
        ckpt.close()
    assert [info.step for info in ms.open(tmp_path).checkpoints()] == [1]


def test_age_of_the_last_commit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now = 1000.0

    class Clock:
        @staticmethod
        def monotonic() -> float:
            return now

    monkeypatch.setattr(telemetry, "time", Clock)
    with _checkpointer(tmp_path, {2, 3}, max_failures=5) as ckpt:
        assert ckpt.statistics().last_commit_age_seconds is None
        ckpt.save(1, _state(1)).result()
        for step in (2, 3):
            now += 60
            pending = ckpt.save(step, _state(step))
            with pytest.raises(ms.WriteError):
                pending.result()
        assert ckpt.statistics().last_commit_age_seconds == 120
        assert ckpt.statistics().failures_in_a_row == 2
        ckpt.save(4, _state(4)).result()
        assert ckpt.statistics().last_commit_age_seconds == 0
