"""Ctrl-C in a bounded read comes out, and what the read brings afterwards is given back."""

from __future__ import annotations

import queue
import threading
import time
from pathlib import Path

import pytest

from midstride.errors import Unavailable
from midstride.storage import bounded
from midstride.storage.base import ReadableFile
from midstride.storage.bounded import BoundedReads
from midstride.storage.local import LocalStorage


class Slow(LocalStorage):
    """Opens a file when it is let go; ``closed`` is set when somebody closes it."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.reached, self.let_go, self.closed = threading.Event(), threading.Event(), threading.Event()

    def open_file(self, name: str) -> ReadableFile:
        self.reached.set()
        assert self.let_go.wait(60)
        file, closed = super().open_file(name), self.closed

        class File:
            size = file.size
            read_into = file.read_into

            def close(self) -> None:
                file.close()
                closed.set()

        return File()


class Interrupted:
    """A queue on which the first wait is interrupted, once the call has begun.

    Not by a signal: one that comes just before the wait would be heard after it only.
    """

    def __init__(self, begun: threading.Event) -> None:
        self._queue: queue.SimpleQueue[None] = queue.SimpleQueue()
        self._begun, self._first = begun, True
        self.put = self._queue.put

    def get(self, timeout: float) -> None:
        if self._first:
            self._first = False
            assert self._begun.wait(60)
            raise KeyboardInterrupt
        self._queue.get(timeout=timeout)


@pytest.fixture
def storage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Slow:
    (tmp_path / "file").write_bytes(b"1")
    storage, made = Slow(tmp_path), bounded._Call.__init__

    def make(call: bounded._Call[object], *args: object) -> None:
        made(call, *args)  # type: ignore[arg-type]
        call._told = Interrupted(storage.reached)  # type: ignore[assignment]

    monkeypatch.setattr(bounded._Call, "__init__", make)
    return storage


def test_an_interruption_comes_out_and_the_late_file_is_closed(storage: Slow, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bounded, "_MOMENT_SECONDS", 0.01)
    with pytest.raises(KeyboardInterrupt):
        BoundedReads(storage).open_file("file")
    storage.let_go.set()
    assert storage.closed.wait(10)


def test_a_read_that_is_about_to_end_may_end(storage: Slow, monkeypatch: pytest.MonkeyPatch) -> None:
    """It writes into the caller's memory: that must not go on after the interruption, if it can be helped."""
    monkeypatch.setattr(bounded, "_MOMENT_SECONDS", 30.0)
    ended = []

    def read() -> None:
        storage.reached.set()
        assert storage.let_go.wait(60)
        ended.append(True)

    soon = threading.Timer(0.2, storage.let_go.set)
    soon.start()
    with pytest.raises(KeyboardInterrupt):
        BoundedReads(storage).within(read, "reading file")
    assert ended
    soon.join()


def test_a_call_that_ended_as_the_interruption_came_is_not_waited_for_and_leaves_no_file_open(
    storage: Slow, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bounded, "_MOMENT_SECONDS", 3600.0)
    give, ended = bounded._Call.give_to, []

    def give_and_end(call: bounded._Call[object], helper: bounded._Helper) -> None:
        give(call, helper)
        storage.let_go.set()
        while not call.ended:
            time.sleep(0.001)
        call._told._queue.get(timeout=60)  # type: ignore[attr-defined]  # heard, and then interrupted
        ended.append(call)

    monkeypatch.setattr(bounded._Call, "give_to", give_and_end)
    with pytest.raises(KeyboardInterrupt):
        BoundedReads(storage).open_file("file")
    assert ended
    assert storage.closed.is_set()


def test_a_call_that_hung_when_it_was_interrupted_is_remembered(storage: Slow, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bounded, "_MOMENT_SECONDS", 0.01)
    reads = BoundedReads(storage)
    with pytest.raises(KeyboardInterrupt):
        reads.open_file("file")
    with pytest.raises(Unavailable, match="opening file still hangs"):
        reads.list_folder("")
    storage.let_go.set()
    assert storage.closed.wait(10)
    for call in list(reads._hanging):
        assert call._helper is not None
        call._helper.join(10)
    with pytest.raises(KeyboardInterrupt):  # this one is asked again
        reads.list_folder("")


def test_a_helper_whose_taker_was_interrupted_ends(storage: Slow, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bounded, "_IDLE_SECONDS", 0.01)
    monkeypatch.setattr(bounded, "_ABANDONED_SECONDS", 0.05)
    helper = BoundedReads(storage)._helper()
    assert helper is not None
    helper.join(10)
    assert not helper.is_alive()
