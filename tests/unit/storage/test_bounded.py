"""Bounded reads: few threads, which end, also in a forked child. That they end in time is in ``test_limits.py``."""

from __future__ import annotations

import os
import threading
import time
import warnings
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

import midstride as ms
from midstride import limits
from midstride.errors import Unavailable
from midstride.storage import bounded
from midstride.storage.base import Entry, ReadableFile
from midstride.storage.bounded import BoundedReads
from midstride.storage.local import LocalStorage


class Watched(LocalStorage):
    """Keeps the threads that its calls came on; listing hangs while it is told to."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.threads: set[threading.Thread] = set()
        self.let_go = threading.Event()
        self.let_go.set()

    def list_folder(self, folder: str) -> list[Entry]:
        self.threads.add(threading.current_thread())
        self.let_go.wait(60)
        return super().list_folder(folder)

    def open_file(self, name: str) -> ReadableFile:
        self.threads.add(threading.current_thread())
        return super().open_file(name)


def test_one_thread_makes_all_the_calls_of_a_look(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bounded, "_IDLE_SECONDS", 60.0)
    with ms.Checkpointer(tmp_path) as ckpt:
        for step in range(5):
            ckpt.save(step, {"w": np.zeros(3)}).result()
    storage = Watched(tmp_path)
    assert len(ms.open(storage).checkpoints()) == 5
    (helper,) = storage.threads
    assert helper is not threading.current_thread()
    assert helper.daemon


def test_a_helper_that_is_about_to_end_is_never_lost(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bounded, "_IDLE_SECONDS", 0.0005)
    storage = Watched(tmp_path)
    reads = BoundedReads(storage)
    for number in range(300):
        assert reads.list_folder("") == []
        time.sleep(0.0004 + number % 5 * 0.0001)
    for helper in storage.threads:
        helper.join(60)
        assert not helper.is_alive()


def test_one_that_hung_ends_when_it_is_let_go(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "STORAGE_SECONDS", 0.2)
    storage = Watched(tmp_path)
    reads = BoundedReads(storage)
    storage.let_go.clear()
    for _ in range(3):
        with pytest.raises(Unavailable, match="does not answer"):
            reads.list_folder("")
    (helper,) = storage.threads
    storage.let_go.set()
    helper.join(60)
    assert not helper.is_alive()
    assert reads.list_folder("") == []


def test_calls_at_once_have_a_thread_each(tmp_path: Path) -> None:
    storage = Watched(tmp_path)
    reads = BoundedReads(storage)
    storage.let_go.clear()
    callers = [threading.Thread(target=reads.list_folder, args=("",)) for _ in range(3)]
    for caller in callers:
        caller.start()
    deadline = time.monotonic() + 60
    while len(storage.threads) < 3 and time.monotonic() < deadline:
        time.sleep(0.01)
    storage.let_go.set()
    for caller in callers:
        caller.join(60)
    assert len(storage.threads) == 3


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork")
def test_a_forked_child_has_helpers_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "STORAGE_SECONDS", 5.0)
    monkeypatch.setattr(bounded, "_IDLE_SECONDS", 60.0)
    storage = Watched(tmp_path)
    reads = BoundedReads(storage)
    assert reads.list_folder("") == []  # and so there is an idle helper
    assert in_child(lambda: reads.list_folder("") == [])
    monkeypatch.setattr(limits, "STORAGE_SECONDS", 0.2)
    storage.let_go.clear()
    with pytest.raises(Unavailable):
        reads.list_folder("")

    def look() -> bool:
        storage.let_go = threading.Event()
        storage.let_go.set()
        return reads.list_folder("") == []

    assert in_child(look)  # what hangs in the parent says nothing of the child's own calls
    storage.let_go.set()


def in_child(look: Callable[[], bool]) -> bool:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of newer Pythons: other threads are running
        child = os.fork()
    if child == 0:
        good = False
        try:
            good = look()
        finally:
            os._exit(0 if good else 1)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
