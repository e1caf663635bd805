"""A save has one end, told once: committed, when another process can restore it; or failed.

No log line, callback, handle or counter says "saved" before. The time that training was held up and
the time until durable are told apart.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from children import run_well
from hooked import Gate, HookedStorage, data_of

import midstride as ms
from midstride.errors import NoSpace
from midstride.listeners import RunBegan, RunEnded, SaveBegan, SaveCommitted, SaveFailed
from midstride.storage import open_storage

RESTORE = """
import sys
import midstride as ms
print(ms.Checkpointer(sys.argv[1]).restore(step=int(sys.argv[2])).state["part0"]["w"][0])
"""


class _Notes(ms.Listener):
    def __init__(self, path: Path, *, in_another_process: bool = False) -> None:
        self.path, self.in_another_process = path, in_another_process
        self.events: list[Any] = []
        self.told: list[str] = []
        self.restored: list[str] = []

    def begin(self, event: RunBegan) -> None:
        self.told.append("begin")

    def before_save(self, event: SaveBegan) -> None:
        self.told.append(f"before {event.step}")

    def after_save(self, event: SaveCommitted) -> None:
        if self.in_another_process:
            self.restored.append(run_well(RESTORE, self.path, event.info.step).strip())
        assert not any(ms.open(self.path).verify(event.info.step).values())
        self.told.append(f"after {event.info.step}")
        self.events.append(event)

    def save_failed(self, event: SaveFailed) -> None:
        self.told.append(f"failed {event.step}")
        self.events.append(event)

    def end(self, event: RunEnded) -> None:
        self.told.append(f"end {event.last.step if event.last else None}")


def _state(step: int) -> dict[str, Any]:
    return {f"part{n}": {"w": np.full(1000, step)} for n in range(10)}


def test_committed_means_restorable_elsewhere(tmp_path: Path) -> None:
    gate = Gate()
    notes = _Notes(tmp_path, in_another_process=True)
    with ms.Checkpointer(HookedStorage(open_storage(tmp_path), gate), listeners=[notes]) as ckpt:
        pending = ckpt.save(1, _state(1))
        assert gate.reached.wait(60)
        assert notes.told == ["begin", "before 1"] and not pending.done()
        assert ckpt.statistics().saves_committed == 0 and pending.progress().fraction < 1
        gate.open()
        pending.result()
        assert notes.told == ["begin", "before 1", "after 1"]
    assert notes.restored == ["1"]
    assert notes.told[-1] == "end 1"
    (event,) = notes.events
    statistics = ckpt.statistics()
    assert 0 < event.stall_seconds < event.total_seconds, "held up for less than until durable"
    assert event.stall_seconds == statistics.last_stall_seconds
    assert event.total_seconds == statistics.last_durable_seconds
    assert statistics.listener_failures == 0


def test_failed_near_the_end(tmp_path: Path) -> None:
    written: set[str] = set()

    def hook(operation: str, name: str) -> None:
        if operation == "write" and name.startswith(data_of(2)):
            written.add(name)
            if len(written) == 10:
                raise NoSpace("injected: the last of ten files")

    notes = _Notes(tmp_path)
    ckpt = ms.Checkpointer(HookedStorage(open_storage(tmp_path), hook), listeners=[notes], max_failures=1)
    ckpt.save(1, _state(1)).result()
    failed = ckpt.save(2, _state(2))
    with pytest.raises(ms.WriteError):
        failed.result()
    ckpt.save(3, _state(3))
    ckpt.close()
    assert len(written) == 10
    assert notes.told == [
        "begin", "before 1", "after 1", "before 2", "failed 2", "before 3", "after 3", "end 3",
    ]  # fmt: skip
    assert notes.events[1].error is failed._error
    assert ckpt.statistics().listener_failures == 0


def test_log_line_comes_with_the_commit(tmp_path: Path) -> None:
    told: list[tuple[str, list[int]]] = []

    class Handler(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            told.append((record.getMessage(), [info.step for info in ms.open(tmp_path).checkpoints()]))

    log = logging.getLogger("midstride")
    handler, level = Handler(), log.level
    log.addHandler(handler)
    log.setLevel(logging.INFO)
    try:
        with ms.Checkpointer(tmp_path) as ckpt:
            for step in (1, 2):
                ckpt.save(step, _state(step))
    finally:
        log.removeHandler(handler)
        log.setLevel(level)
    saved = [(message, steps) for message, steps in told if "saved" in message]
    assert [message.split(" as ")[0] for message, _ in saved] == ["saved step 1", "saved step 2"]
    assert [steps for _, steps in saved] == [[1], [1, 2]]


def test_stall_of_a_save_that_is_durable_at_once(tmp_path: Path) -> None:
    """The writer may be faster than the return from ``save()``: the durations are still those of this save."""
    notes = _Notes(tmp_path)
    with ms.Checkpointer(ms.LocalStorage(tmp_path), listeners=[notes]) as ckpt:
        real = ckpt._saver.begin

        def begin(*args: Any, **options: Any) -> Any:
            pending = real(*args, **options)
            pending.result()  # durable before save() goes on
            return pending

        ckpt._saver.begin = begin  # type: ignore[method-assign]
        for step in (1, 2):
            ckpt.save(step, _state(step))
    assert all(0 < event.stall_seconds <= event.total_seconds for event in notes.events)
    assert notes.events[0].stall_seconds != notes.events[1].stall_seconds
