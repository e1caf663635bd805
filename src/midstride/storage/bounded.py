"""Reads that end: a mount that no longer answers becomes an error, where the system would wait for ever."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from typing import Generic, TypeVar

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
        self._hanging: set[_Call[object]] = set()

    def list_folder(self, folder: str) -> list[Entry]:
        return self.within(lambda: self._storage.list_folder(folder), f"listing {folder or self.description}")

    def open_file(self, name: str) -> ReadableFile:
        return _BoundedFile(self, self.within(lambda: self._storage.open_file(name), f"opening {name}", _close), name)

    def within(self, action: Callable[[], _T], what: str, too_late: Callable[[_T], None] = lambda _: None) -> _T:
        """The result of ``action``. ``too_late`` gets one that comes when nobody waits for it any more."""
        if isinstance(threading.current_thread(), SupervisedThread) or not room_for_threads():
            return action()
        if hanging := [call for call in list(self._hanging) if not call.ended.is_set()]:
            raise Unavailable(f"{self.description} does not answer: {hanging[0].what} still hangs. Look at the mount")
        self._hanging.clear()
        call: _Call[_T] = _Call(action, what, too_late)
        if not call.wait(limits.STORAGE_SECONDS):
            self._hanging.add(call)  # type: ignore[arg-type]
            raise Unavailable(
                f"{self.description} does not answer: {what} took more than {limits.STORAGE_SECONDS:g} s. "
                "Nothing was changed; look at the mount"
            )
        return call.result()


class _Call(Generic[_T]):
    """One call on a thread of its own, made anew each time: a pool would be empty in a forked child."""

    def __init__(self, action: Callable[[], _T], what: str, too_late: Callable[[_T], None]) -> None:
        self.what = what
        self.ended = threading.Event()
        self._action = action
        self._too_late = too_late
        self._given_up = False
        self._lock = threading.Lock()
        self._results: list[_T] = []
        self._error: BaseException | None = None
        try:
            SupervisedThread(self._run, "midstride-read").start()
        except RuntimeError:  # no thread to be had: unbounded is better than not at all
            self._run()

    def _run(self) -> None:
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
            self.ended.set()

    def wait(self, seconds: float) -> bool:
        """Whether it ended in time. If not, its result is nobody's."""
        try:
            if self.ended.wait(seconds):
                return True
        except BaseException:
            # Interrupted. What is read goes into the caller's memory, so a call that is not stuck may end first.
            self.ended.wait(_INTERRUPTED_SECONDS)
            self._give_up()
            raise
        return not self._give_up()

    def _give_up(self) -> bool:
        with self._lock:
            self._given_up = not self.ended.is_set() and not self._results
            return self._given_up

    def result(self) -> _T:
        self.ended.wait()
        if self._error is not None:
            raise self._error
        return self._results[0]


_INTERRUPTED_SECONDS = 1.0


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
