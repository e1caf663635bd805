"""Ctrl-C in a bounded read comes out, and what the read brings afterwards is given back."""

from __future__ import annotations

import signal
import threading
from pathlib import Path

import pytest

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


def ctrl_c() -> None:
    signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)


def test_an_interruption_comes_out_and_the_late_file_is_closed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bounded, "_INTERRUPTED_SECONDS", 0.01)
    (tmp_path / "file").write_bytes(b"1")
    storage = Slow(tmp_path)

    def interrupt() -> None:
        assert storage.reached.wait(60)
        ctrl_c()

    threading.Thread(target=interrupt).start()
    # So that one that ignores the interruption is seen, and does not hang.
    rescue = threading.Timer(20, storage.let_go.set)
    rescue.start()
    with pytest.raises(KeyboardInterrupt):
        BoundedReads(storage).open_file("file")
    rescue.cancel()
    assert not storage.let_go.is_set(), "it was to come at once"
    storage.let_go.set()
    assert storage.closed.wait(10)


def test_a_read_that_is_about_to_end_may_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It writes into the caller's memory: that must not go on after the interruption, if it can be helped."""
    monkeypatch.setattr(bounded, "_INTERRUPTED_SECONDS", 30.0)
    (tmp_path / "file").write_bytes(b"1")
    storage, ended = Slow(tmp_path), []

    def action() -> None:
        storage.reached.set()
        storage.let_go.wait(60)
        ended.append(True)

    def interrupt() -> None:
        assert storage.reached.wait(60)
        ctrl_c()
        threading.Timer(0.3, storage.let_go.set).start()

    threading.Thread(target=interrupt).start()
    with pytest.raises(KeyboardInterrupt):
        BoundedReads(storage).within(action, "reading file")
    assert ended
