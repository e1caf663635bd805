"""Reads that end: a mount that no longer answers becomes an error, where the system would wait for ever."""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from collections.abc import Callable
from typing import Any, Generic, TypeVar

from midstride import limits
from midstride.errors import MidstrideError, Unavailable
from midstride.storage.base import Entry, ReadableFile, ReadableStorage
from midstride.waiting import SupervisedThread, room_for_threads

_T = TypeVar("_T")


class BoundedReads:
    """A storage to read from, each call of which ends within ``limits.STORAGE_SECONDS`` or raises ``Unavailable``.

    Nothing can end a call that hangs in the system: it keeps its thread until it returns, and as long
    as one does, every other call is refused at once. So no more threads hang than were reading. Where there is
    no room for threads, calls are made as they are.
    """

    def __init__(self, storage: ReadableStorage) -> None:
        self._storage = storage
        self.description = storage.description
        self._idle: list[_Helper] = []
        self._hanging: dict[_Call[Any], str] = {}

    def list_folder(self, folder: str) -> list[Entry]:
        return self.within(lambda: self._storage.list_folder(folder), f"listing {folder or self.description}")

    def open_file(self, name: str) -> ReadableFile:
        return _BoundedFile(self, self.within(lambda: self._storage.open_file(name), f"opening {name}", _close), name)

    def within(self, action: Callable[[], _T], what: str, too_late: Callable[[_T], None] = lambda _: None) -> _T:
        """The result of ``action``. ``too_late`` gets one that comes when nobody waits for it any more."""
        if isinstance(threading.current_thread(), SupervisedThread) or not room_for_threads():
            return action()
        for hanging, still in list(self._hanging.items()):
            if hanging.is_running():
                raise Unavailable(f"{self.description} does not answer: {still} still hangs. Look at the mount")
            self._hanging.pop(hanging, None)
        call: _Call[_T] = _Call(action, too_late)
        helper = self._helper()
        if helper is None:
            return action()  # unbounded is better than not at all
        ended = False
        try:
            call.give_to(helper)
            ended = call.wait(limits.STORAGE_SECONDS)
        finally:
            if ended:
                self._idle.append(helper)
            else:
                helper.calls.put(None)
                self._hanging[call] = what
        if not ended:
            raise Unavailable(
                f"{self.description} does not answer: {what} took more than {limits.STORAGE_SECONDS:g} s. "
                "Look at the mount"
            )
        return call.result()

    def _helper(self) -> _Helper | None:
        """A thread that waits for a call; None if there is none to be had."""
        with contextlib.suppress(IndexError):
            while True:
                helper = self._idle.pop()
                if helper.is_alive():  # else its process is the one that we were forked from
                    return helper
        helper = _Helper(self._idle)
        try:
            helper.start()
        except RuntimeError:
            return None
        return helper


class _Helper(SupervisedThread):
    """Makes one call after the other, and ends when it has been idle for a while, or by None."""

    def __init__(self, idle: list[_Helper]) -> None:
        super().__init__(self._work, "midstride-read")
        self.calls: queue.SimpleQueue[_Call[Any] | None] = queue.SimpleQueue()
        self._idle = idle

    def _work(self) -> None:
        began = time.monotonic()
        while True:
            try:
                call = self.calls.get(timeout=_IDLE_SECONDS)
            except queue.Empty:
                with contextlib.suppress(ValueError):  # not there: it was taken, and a call is coming
                    self._idle.remove(self)
                    return
                if time.monotonic() - began > _ABANDONED_SECONDS:
                    return  # who took it was interrupted before the call came
                continue
            if call is None:
                return
            call.run()
            began = time.monotonic()
            del call  # what it holds, such as the caller's memory, may go while we wait


class _Call(Generic[_T]):
    """One call, made by a helper."""

    def __init__(self, action: Callable[[], _T], too_late: Callable[[_T], None]) -> None:
        self.ended = False
        self._told: queue.SimpleQueue[None] = queue.SimpleQueue()  # an Event would cost five times as much
        self._action = action
        self._too_late = too_late
        self._given_up = False
        self._helper: _Helper | None = None
        self._lock = threading.Lock()
        self._results: list[_T] = []
        self._error: BaseException | None = None

    def give_to(self, helper: _Helper) -> None:
        self._helper = helper
        helper.calls.put(self)

    def is_running(self) -> bool:
        """Not so in a forked child, where its helper is none: the child asks for itself."""
        return not self.ended and self._helper is not None and self._helper.is_alive()

    def run(self) -> None:
        try:
            result = self._action()
            with self._lock:
                if not self._given_up:
                    self._results.append(result)
                    return
            self._too_late(result)
        except BaseException as error:
            self._error = error
        finally:
            self.ended = True
            self._told.put(None)

    def wait(self, seconds: float) -> bool:
        """Whether it ended in time. If not, its result is nobody's."""
        try:
            # Where this process was stopped for longer than that, the helper was too: it gets a moment.
            for left in (seconds, _MOMENT_SECONDS):
                with contextlib.suppress(queue.Empty):
                    self._told.get(timeout=left)
                    return True
            return not self._give_up()
        except BaseException:
            # Interrupted. What is read goes into the caller's memory, so a call that is not stuck may end first.
            if not self.ended:
                with contextlib.suppress(queue.Empty):
                    self._told.get(timeout=_MOMENT_SECONDS)
            if not self._give_up():
                for result in self._results:
                    self._too_late(result)
            raise

    def _give_up(self) -> bool:
        with self._lock:
            self._given_up = not self.ended and not self._results
            return self._given_up

    def result(self) -> _T:
        if self._error is not None:
            raise self._error
        return self._results[0]


_IDLE_SECONDS = 1.0
"""A helper stays for the next call of the same look, and not for ever."""

_ABANDONED_SECONDS = 60.0

_MOMENT_SECONDS = 1.0


def _close(file: ReadableFile) -> None:
    with contextlib.suppress(MidstrideError):
        file.close()


class _BoundedFile:
    def __init__(self, reads: BoundedReads, file: ReadableFile, name: str) -> None:
        self._reads = reads
        self._file = file
        self._name = name
        self.size = file.size

    def read_into(self, offset: int, buffer: memoryview) -> int:
        done = 0
        while done < len(buffer):
            # In pieces: the limit is for what makes no progress, and a slow disk makes some.
            piece = buffer[done : done + limits.CHUNK_BYTES]
            at = offset + done
            count = self._reads.within(
                lambda at=at, piece=piece: self._file.read_into(at, piece),  # type: ignore[misc]
                f"reading {self._name}",
            )
            done += count
            if count < len(piece):
                break
        return done

    def close(self) -> None:
        self._file.close()
