"""The right to write in a folder: ``flock`` on a file that is never unlinked, or, without flock, a heartbeat."""

from __future__ import annotations

import errno
import fcntl
import json
import logging
import os
import secrets
import socket
import threading
import time
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

from midstride.errors import Busy
from midstride.limits import HEARTBEAT_SECONDS, LOCK_SECONDS

_log = logging.getLogger("midstride")
_held: weakref.WeakSet[FlockLock] = weakref.WeakSet()


def describe_owner() -> str:
    """This process as a line of JSON: host, boot, pid, start time."""
    pid = os.getpid()
    return json.dumps({"host": socket.gethostname(), "boot": _boot_id(), "pid": pid, "started": _start_time(pid)})


def take_lock(path: str, owner: str) -> FlockLock | HeartbeatLock:
    """Take the lock in the file ``path`` at once, or raise ``Busy`` that says who has it."""
    while True:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o666)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            os.close(descriptor)
            if error.errno in (errno.EAGAIN, errno.EACCES):
                raise Busy(_busy(path)) from error
            if error.errno in (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP):
                _log.warning("%s: this file system has no flock; a heartbeat is used instead", path)
                return HeartbeatLock(path, owner)
            raise
        # The file may have been replaced between the two calls: then what we locked is no lock.
        if _same_file(path, descriptor):
            return FlockLock(path, descriptor, owner)
        os.close(descriptor)


class FlockLock:
    """Held until released, or until every process that has the descriptor is gone."""

    def __init__(self, path: str, descriptor: int, owner: str) -> None:
        self._path = path
        self._descriptor = descriptor
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, owner.encode() + b"\n", 0)
        _held.add(self)

    def check(self) -> None:
        """Raise ``Busy`` if the lock's file was replaced: another run may hold the new one."""
        if self._descriptor < 0 or not _same_file(self._path, self._descriptor):
            raise Busy(f"{self._path} was replaced or removed while this run held it. {_busy(self._path)}")

    def release(self) -> None:
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1


def _leave_to_parent() -> None:
    # A child that kept the descriptor would hold the lock after its parent's death.
    for lock in list(_held):
        lock.release()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_leave_to_parent)


class HeartbeatLock:
    """The same file, made exclusively, its content changed every few seconds.

    A content that stays the same over ``LOCK_SECONDS`` of the waiter's own monotonic clock has no
    living owner, and is taken over.
    """

    def __init__(
        self,
        path: str,
        owner: str,
        clock: Callable[[], float] = time.monotonic,
        pause: Callable[[float], Any] = time.sleep,
    ) -> None:
        self._path = path
        self._owner = owner
        self._token = secrets.token_hex(8)
        self._beats = 0
        self._stop = threading.Event()
        self._take(clock, pause)
        self._thread = threading.Thread(target=self._beat, name="midstride-heartbeat", daemon=True)
        self._thread.start()

    def _take(self, clock: Callable[[], float], pause: Callable[[float], Any]) -> None:
        seen, since = _content(self._path), clock()
        while seen.strip():
            if clock() - since >= LOCK_SECONDS:
                break
            pause(min(1.0, HEARTBEAT_SECONDS))
            if _content(self._path) != seen:
                raise Busy(_busy(self._path))
        self._write()
        # Of two that take over at once, the one whose content stays has it.
        pause(min(1.0, HEARTBEAT_SECONDS))
        self.check()

    def _write(self) -> None:
        self._beats += 1
        draft = f"{self._path}.{self._token}"
        Path(draft).write_text(f"{self._owner}\n{self._token} {self._beats}\n")
        os.replace(draft, self._path)

    def _beat(self) -> None:
        while not self._stop.wait(HEARTBEAT_SECONDS):
            try:
                self.check()
                self._write()
            except (OSError, Busy) as error:
                _log.warning("%s: the heartbeat failed: %s", self._path, error)

    def check(self) -> None:
        """Raise ``Busy`` if another run took the lock over."""
        if self._token not in _content(self._path):
            raise Busy(f"{self._path} was taken over while this run held it. {_busy(self._path)}")

    def release(self) -> None:
        if not self._stop.is_set():
            self._stop.set()
            if self._token in _content(self._path):
                Path(self._path).write_text("")


def _content(path: str) -> str:
    try:
        return Path(path).read_text()
    except FileNotFoundError:
        return ""


def _same_file(path: str, descriptor: int) -> bool:
    try:
        there, ours = os.stat(path, follow_symlinks=False), os.fstat(descriptor)
    except FileNotFoundError:
        return False
    return (there.st_dev, there.st_ino) == (ours.st_dev, ours.st_ino)


def _busy(path: str) -> str:
    folder = os.path.dirname(path)
    return (
        f"{folder} is held by another run: {_who(path)}. Nothing was written. Wait for it, stop it, or choose "
        "another folder"
    )


def _who(path: str) -> str:
    try:
        owner = json.loads(_content(path).splitlines()[0])
        host, boot, pid, started = owner["host"], owner["boot"], int(owner["pid"]), owner["started"]
    except (ValueError, KeyError, IndexError, TypeError, OSError):
        return "it does not say which"
    if pid == os.getpid() and boot == _boot_id():
        return f"this very process (pid {pid}), through another Checkpointer"
    if boot != _boot_id():
        return f"pid {pid} on host {host}"
    alive = _start_time(pid) == started
    return (
        f"pid {pid} on this host ({host}), which is {'alive' if alive else 'dead: something it started holds the lock'}"
    )


def _boot_id() -> str:
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return socket.gethostname()


def _start_time(pid: int) -> str:
    """When a process started, in the system's own count; empty if there is none. A pid alone may be reused."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
    except (OSError, IndexError):
        return ""
