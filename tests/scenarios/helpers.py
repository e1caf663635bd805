"""What several scenarios share: sizes, waiting without sleeping, slow storages, kills at every operation."""

from __future__ import annotations

import os
import shutil
import signal
import sys
import threading
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import children
import numpy as np
from hooked import WAIT_SECONDS, HookedStorage

import midstride as ms
from midstride.storage import Storage
from midstride.storage.base import WritableFile
from midstride.testing import FaultyStorage, kill_at

LONG = bool(os.environ.get("MIDSTRIDE_LONG"))
"""Whether scenarios run at the full size of their text."""

if LONG:
    children.WATCHDOG_SECONDS = 3000

T = TypeVar("T")


def short_or_long(short: T, long: T) -> T:
    """The size that a scenario has in every test run, or the full one under ``MIDSTRIDE_LONG=1``."""
    return long if LONG else short


def pause(seconds: float) -> None:
    """Let other threads run for a while."""
    threading.Event().wait(seconds)


def wait_until(ready: Callable[[], bool], what: str) -> None:
    """Look again and again until ``ready()``; fail after the watchdog's time."""
    for _ in range(int(WAIT_SECONDS / 0.005)):
        if ready():
            return
        pause(0.005)
    raise AssertionError(f"waited {WAIT_SECONDS:g} s for {what}")


def values_in(state: Any) -> set[float]:
    """All distinct elements of all arrays of a state."""
    if isinstance(state, dict):
        return set().union(*(values_in(part) for part in state.values()))
    return set(np.unique(np.asarray(state)).tolist())


def folders(path: Path) -> list[str]:
    """The step folders of a run, in order of their names."""
    return sorted(entry.name for entry in path.glob("step-*"))


def folder_of(path: Path, step: int) -> Path:
    """The one folder of a step."""
    (found,) = path.glob(f"step-{step:012d}-*")
    return found


def flip_bit(file: Path, offset: int) -> None:
    """Change one bit of a file, ``offset`` bytes from its start, or from its end if negative."""
    raw = bytearray(file.read_bytes())
    raw[offset] ^= 1
    file.write_bytes(raw)


class WatchedWrites(HookedStorage):
    """Holds each write up for a moment and sees whether its bytes change meanwhile."""

    def __init__(self, inner: Storage, hook: Callable[[str, str], None], seconds: float = 0.002) -> None:
        super().__init__(inner, hook)
        self.seconds = seconds
        self.changed: list[str] = []
        self.writes = 0

    def create_file(self, name: str, size: int) -> WritableFile:
        return _WatchedFile(self, name, super().create_file(name, size))


class _WatchedFile:
    def __init__(self, storage: WatchedWrites, name: str, inner: WritableFile) -> None:
        self._storage, self._name, self._inner = storage, name, inner

    def write(self, offset: int, data: memoryview) -> None:
        self._storage.writes += 1
        before = bytes(data)
        pause(self._storage.seconds)
        self._inner.write(offset, data)
        if bytes(data) != before:
            self._storage.changed.append(f"{self._name} at {offset}")

    def sync(self) -> None:
        self._inner.sync()

    def close(self) -> None:
        self._inner.close()


def in_child(work: Callable[[], None]) -> int:
    """Run ``work`` in a forked process: its wait status. For scripts with one thread."""
    child = os.fork()
    if child == 0:
        code = 1
        try:
            work()
            code = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(code)
    return os.waitpid(child, 0)[1]


def kill_at_each_operation(prepared: Path, work: Callable[[Storage], None], check: Callable[[Path, int], None]) -> int:
    """Copy a run's folder, do ``work`` on it in a process that gets a SIGKILL before operation 1, 2, ...; then
    ``check`` what is left in another process. Ends when ``work`` was done unharmed; returns its operations."""
    number = 0
    while True:
        number += 1
        folder = prepared.with_name(f"{prepared.name}-{number}")
        shutil.copytree(prepared, folder)
        storage = FaultyStorage(ms.LocalStorage(folder), kill_at(number))
        status = in_child(lambda storage=storage: work(storage))  # type: ignore[misc]
        unharmed = status == 0
        assert unharmed or os.WTERMSIG(status) == signal.SIGKILL, f"operation {number}: wait status {status}"
        checked = in_child(lambda folder=folder, number=number: check(folder, number))  # type: ignore[misc]
        assert checked == 0, f"killed before operation {number}: see above"
        shutil.rmtree(folder)
        if unharmed:
            return number - 1


def exit_with_latest(path: str, way: str) -> None:
    """In a child of any start method: end with the latest step, and 10 more, as the exit code."""
    latest = ms.open(path).latest()
    assert latest is not None
    if way == "_exit":
        os._exit(10 + latest.step)
    sys.exit(10 + latest.step)


class LatestSeen:
    """A data set for workers of any start method: each item has the latest step and the worker's process.

    The worker that is asked for item ``dies_at`` ends by ``os._exit``.
    """

    def __init__(self, path: str, length: int, dies_at: int | None = None) -> None:
        self.path, self.length, self.dies_at = path, length, dies_at

    def __len__(self) -> int:
        return self.length

    def latest_step(self) -> int:
        latest = ms.open(self.path).latest()
        assert latest is not None
        return latest.step

    def __getitem__(self, index: int) -> list[int]:
        if index == self.dies_at:
            os._exit(0)
        return [index, self.latest_step(), os.getpid()]
