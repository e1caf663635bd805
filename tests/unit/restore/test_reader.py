"""The team that reads: it stops at the first error, and makes do with less memory and fewer threads."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import midstride as ms
from midstride import limits
from midstride.restore import reader
from midstride.restore.reader import _Team

GROUPS = 60


def team(load: Callable[[Any, np.ndarray], None], groups: int = GROUPS) -> _Team:
    block: Any = SimpleNamespace(begin=0, end=1)
    return _Team([[block] for _ in range(groups)], load, lambda nbytes: None, "storage", "checkpoint")


def told(team: _Team) -> None:
    """Wait until the team knows of an error; not for ever, where it never does."""
    deadline = time.monotonic() + 1
    while not team._errors and time.monotonic() < deadline:
        time.sleep(0.001)


def test_after_an_error_no_more_is_read() -> None:
    loads: list[int] = []

    def load(group: Any, scratch: np.ndarray) -> None:
        loads.append(len(loads))
        if len(loads) == 1:
            raise ms.CorruptCheckpoint("injected")
        told(reading)

    reading = team(load)
    with pytest.raises(ms.CorruptCheckpoint, match="injected"):
        reading.run()
    assert len(loads) <= limits.READ_THREADS


def test_when_the_reader_is_interrupted_its_threads_end(monkeypatch: pytest.MonkeyPatch) -> None:
    loads: list[threading.Thread] = []

    def load(group: Any, scratch: np.ndarray) -> None:
        loads.append(threading.current_thread())
        told(reading)

    def interrupted(*args: object, **named: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(reader, "wait_for", interrupted)
    reading = team(load)
    with pytest.raises(KeyboardInterrupt):
        reading.run()
    for thread in loads:
        thread.join(60)
    assert len(loads) <= limits.READ_THREADS, "it went on to write into the caller's memory"


@pytest.fixture
def run(tmp_path: Path) -> Path:
    with ms.Checkpointer(tmp_path / "run") as ckpt:
        ckpt.save(1, {f"m{number}": {"w": np.full(70_000, number)} for number in range(20)}).result()
    return tmp_path / "run"


def restored_well(run: Path) -> bool:
    state = ms.open(run).load()
    return all(np.array_equal(state[f"m{number}"]["w"], np.full(70_000, number)) for number in range(20))


def test_memory_for_one_thread_is_enough(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real, made = np.empty, []

    def empty(shape: Any, *args: Any, **named: Any) -> np.ndarray:
        if shape == limits.CHUNK_BYTES:
            made.append(shape)
            if len(made) > 1:
                raise MemoryError
        return real(shape, *args, **named)

    monkeypatch.setattr(np, "empty", empty)
    assert restored_well(run)
    assert len(made) == 2


@pytest.mark.parametrize("spared", [0, 1, 2])
def test_as_many_threads_as_are_to_be_had(run: Path, spared: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without any, the caller reads."""
    monkeypatch.setattr(limits, "STORAGE_SECONDS", 10.0)  # for a caller who waits for threads that never began
    real, starts = threading.Thread.start, []

    def start(thread: threading.Thread) -> None:
        if thread.name == "midstride-read":
            starts.append(thread)
            if len(starts) > spared:
                raise RuntimeError("can't start new thread")
        real(thread)

    monkeypatch.setattr(threading.Thread, "start", start)
    assert restored_well(run)
    assert len(starts) > spared
    loads: list[threading.Thread] = []
    starts.clear()
    reading = team(lambda group, scratch: loads.append(threading.current_thread()))
    reading.run()
    assert len(loads) == GROUPS
    assert (threading.current_thread() in loads) == (not spared)


def test_an_object_without_memory_for_its_state_is_no_mismatch(tmp_path: Path) -> None:
    class Full:
        def state_dict(self) -> dict[str, object]:
            return {"w": np.zeros(3)}

        def load_state_dict(self, state: dict[str, object]) -> None:
            raise MemoryError("injected")

    with ms.Checkpointer(tmp_path / "run") as ckpt:
        ckpt.save(1, {"m": Full()}).result()
    with pytest.raises(MemoryError, match="injected"):
        ms.Checkpointer(tmp_path / "run").restore({"m": Full()})
