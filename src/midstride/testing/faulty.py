"""A storage that numbers every operation and can fail or stop at any of them."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from midstride.storage.base import Entry, Lock, ReadableFile, Storage, WritableFile
from midstride.storage.system_errors import storage_error


class Crash(BaseException):
    """The machine stopped here. Not an ``Exception``: no error handling may survive a crash."""


@dataclass(frozen=True, slots=True)
class Operation:
    """One call into the storage."""

    number: int
    """From 1, over the life of the ``FaultyStorage``."""
    name: str
    """The method, such as ``rename``; of a file ``write``, ``sync``, ``close`` or ``read``; of a lock ``check``."""
    target: str
    """The file or folder, relative to the root; of a rename the new name."""
    arguments: tuple[object, ...] = ()
    """The old name of a rename, the size of a new file, offset and bytes of a write or read."""


class Fault:
    """What is done before and after each operation. The default does nothing."""

    def before(self, operation: Operation) -> None:
        """Raise to keep the operation from happening."""

    def after(self, operation: Operation) -> None:
        """Called when the operation has taken effect."""


class _At(Fault):
    def __init__(self, chosen: Callable[[Operation], bool], action: Callable[[Operation], None], *, late: bool) -> None:
        self._chosen, self._action, self._late = chosen, action, late

    def before(self, operation: Operation) -> None:
        if not self._late and self._chosen(operation):
            self._action(operation)

    def after(self, operation: Operation) -> None:
        if self._late and self._chosen(operation):
            self._action(operation)


class _Stop(Fault):
    """From the chosen operation on nothing reaches the storage any more."""

    def __init__(self, number: int, *, late: bool) -> None:
        self._number, self._late, self._stopped = number, late, False

    def before(self, operation: Operation) -> None:
        if self._stopped or (not self._late and operation.number >= self._number):
            self._stopped = True
            raise Crash(f"stopped before operation {operation.number}")

    def after(self, operation: Operation) -> None:
        if self._late and operation.number >= self._number:
            self._stopped = True
            raise Crash(f"stopped after operation {operation.number}")


class Gate(Fault):
    """A storage that hangs: the operations that ``chosen`` says wait until ``open()``.

    ``reached`` is set when the first of them has come.
    """

    def __init__(self, chosen: Callable[[Operation], bool]) -> None:
        self._chosen, self._opened = chosen, threading.Event()
        self.reached = threading.Event()

    def before(self, operation: Operation) -> None:
        if not self._opened.is_set() and self._chosen(operation):
            self.reached.set()
            self._opened.wait()

    def open(self) -> None:
        """Let those that wait, and all later ones, go on."""
        self._opened.set()


def _raise(code: int) -> Callable[[Operation], None]:
    def act(operation: Operation) -> None:
        error = OSError(code, os.strerror(code))
        raise storage_error(error, f"{operation.name} (injected)", operation.target) from error

    return act


def fail_at(number: int, code: int, *, late: bool = False) -> Fault:
    """Operation ``number`` fails with an errno, as ``LocalStorage`` would tell it.

    ``late``: it took effect all the same, as on a network mount whose answer was lost.
    """
    return _At(lambda operation: operation.number == number, _raise(code), late=late)


def fail_from(number: int, code: int) -> Fault:
    """Operation ``number`` and all after it fail, as on a disk that is gone."""
    return _At(lambda operation: operation.number >= number, _raise(code), late=False)


def stop_before(number: int) -> Fault:
    """The process stops before operation ``number``: it and all later ones raise ``Crash``."""
    return _Stop(number, late=False)


def stop_after(number: int) -> Fault:
    """The process stops when operation ``number`` has taken effect: all later ones raise ``Crash``."""
    return _Stop(number, late=True)


def kill_at(number: int, *, late: bool = False) -> Fault:
    """A real SIGKILL of this process before (or, ``late``, after) operation ``number``."""
    return _At(lambda o: o.number == number, lambda _: os.kill(os.getpid(), signal.SIGKILL), late=late)


class _Struck(Fault):
    def __init__(self, number: int, action: Callable[[], object], mark: str | None, *, late: bool) -> None:
        self._number, self._action, self._mark, self._late = number, action, mark, late

    def _strike(self, operation: Operation) -> None:
        if operation.number != self._number:
            return
        if self._mark is not None:
            try:
                os.close(os.open(self._mark, os.O_CREAT | os.O_EXCL))
            except FileExistsError:
                return  # it was another's turn before
        self._action()

    def before(self, operation: Operation) -> None:
        if not self._late:
            self._strike(operation)

    def after(self, operation: Operation) -> None:
        if self._late:
            self._strike(operation)


class FaultyStorage:
    """Wraps any storage. ``operations`` is the log; ``fault`` may be replaced at any time.

    Not numbered, and never failing: closing what is read and releasing a lock. They change nothing
    that is stored, and a process that is dead has done both.
    """

    def __init__(self, inner: Storage, fault: Fault | None = None) -> None:
        self._inner = inner
        self._guard = threading.Lock()
        self.fault = fault or Fault()
        self.operations: list[Operation] = []
        self.description = inner.description
        self.block_bytes = inner.block_bytes

    def _do(self, name: str, target: str, action: Callable[[], Any], *arguments: object) -> Any:
        with self._guard:
            operation = Operation(len(self.operations) + 1, name, target, arguments)
            self.operations.append(operation)
        self.fault.before(operation)
        result = action()
        try:
            self.fault.after(operation)
        except BaseException:
            _let_go(result)
            raise
        return result

    def make_root(self) -> None:
        self._do("make_root", "", self._inner.make_root)

    def list_folder(self, folder: str) -> list[Entry]:
        found: list[Entry] = self._do("list_folder", folder, lambda: self._inner.list_folder(folder))
        return found

    def make_folder(self, folder: str) -> None:
        self._do("make_folder", folder, lambda: self._inner.make_folder(folder))

    def create_file(self, name: str, size: int) -> WritableFile:
        file = self._do("create_file", name, lambda: self._inner.create_file(name, size), size)
        return _FaultyWriter(self, name, file)

    def open_file(self, name: str) -> ReadableFile:
        return _FaultyReader(self, name, self._do("open_file", name, lambda: self._inner.open_file(name)))

    def rename(self, old: str, new: str) -> None:
        self._do("rename", new, lambda: self._inner.rename(old, new), old)

    def sync_folder(self, folder: str) -> None:
        self._do("sync_folder", folder, lambda: self._inner.sync_folder(folder))

    def remove_file(self, name: str) -> None:
        self._do("remove_file", name, lambda: self._inner.remove_file(name))

    def remove_folder(self, folder: str) -> None:
        self._do("remove_folder", folder, lambda: self._inner.remove_folder(folder))

    def lock(self, name: str, owner: str) -> Lock:
        return _FaultyLock(self, name, self._do("lock", name, lambda: self._inner.lock(name, owner)))


def _let_go(result: object) -> None:
    # Nobody will get what the operation gave: it must not stay open, or locked, in this process.
    for name in ("close", "release"):
        if callable(release := getattr(result, name, None)):
            release()


class _FaultyWriter:
    def __init__(self, storage: FaultyStorage, name: str, file: WritableFile) -> None:
        self._storage, self._name, self._file = storage, name, file

    def write(self, offset: int, data: memoryview) -> None:
        self._storage._do("write", self._name, lambda: self._file.write(offset, data), offset, data.nbytes)

    def sync(self) -> None:
        self._storage._do("sync", self._name, self._file.sync)

    def close(self) -> None:
        self._storage._do("close", self._name, self._file.close)


class _FaultyReader:
    def __init__(self, storage: FaultyStorage, name: str, file: ReadableFile) -> None:
        self._storage, self._name, self._file = storage, name, file
        self.size = file.size

    def read_into(self, offset: int, buffer: memoryview) -> int:
        count: int = self._storage._do(
            "read", self._name, lambda: self._file.read_into(offset, buffer), offset, buffer.nbytes
        )
        return count

    def close(self) -> None:
        self._file.close()


class _FaultyLock:
    def __init__(self, storage: FaultyStorage, name: str, lock: Lock) -> None:
        self._storage, self._name, self._lock = storage, name, lock

    def check(self) -> None:
        self._storage._do("check", self._name, self._lock.check)

    def release(self) -> None:
        self._lock.release()


class StruckStorage(FaultyStorage):
    """Sends a signal to the writer process that uses it, or to another, at its operation ``number``.

    ``inner`` must be one that another process can open. Without a signal, that operation hangs. ``mark`` is a file
    that is made when it happens, and while it is there the next writers are spared; None spares none. ``pid``
    is the process that gets the signal; by default it is the writer.
    """

    shared = True

    def __init__(
        self,
        inner: Storage,
        number: int,
        signum: int | None,
        mark: str | None,
        *,
        late: bool = False,
        pid: int | None = None,
    ) -> None:
        super().__init__(inner)
        self._inner_and_strike = (inner, number, signum, mark, late, pid)
        self.root = getattr(inner, "root", None)

    def __reduce__(self) -> tuple[object, ...]:
        return _in_the_writer, self._inner_and_strike


def _in_the_writer(
    inner: Storage, number: int, signum: int | None, mark: str | None, late: bool, pid: int | None
) -> StruckStorage:
    storage = StruckStorage(inner, number, signum, mark, late=late, pid=pid)

    def action() -> None:
        if signum is None:
            threading.Event().wait()
        else:
            os.kill(os.getpid() if pid is None else pid, signum)

    storage.fault = _Struck(number, action, mark, late=late)
    return storage
