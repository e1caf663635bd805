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
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from midstride.errors import Busy, StorageError
from midstride.forks import let_go_in_children
from midstride.limits import HEARTBEAT_SECONDS, LOCK_SECONDS
from midstride.storage.system_errors import printable, told

_log = logging.getLogger("midstride")
_warned: set[str] = set()
"""Lock files without flock that were warned of."""


def describe_owner() -> str:
    """This process as a line of JSON: host, boot, pid, start time, and since when, for people."""
    pid = os.getpid()
    since = datetime.now(UTC).isoformat(timespec="seconds")
    return json.dumps(
        {"host": socket.gethostname(), "boot": _boot_id(), "pid": pid, "started": _start_time(pid), "since": since}
    )


def take_lock(path: str, owner: str) -> FlockLock | HeartbeatLock:
    """Take the lock in the file ``path`` at once, or raise ``Busy`` that says who has it."""
    owner = _with_writer(owner)
    while True:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o666)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            os.close(descriptor)
            if error.errno in (errno.EAGAIN, errno.EACCES):
                busy = Busy(_busy(path))
                busy.left_at = left_at(path)
                raise busy from error
            if error.errno in (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOTSUP):
                if path not in _warned:
                    _warned.add(path)
                    _log.warning("%s: this file system has no flock; a heartbeat is used instead", printable(path))
                return HeartbeatLock(path, owner)
            raise
        try:
            # The file may have been replaced between the two calls: then what we locked is no lock.
            if _same_file(path, descriptor):
                return FlockLock(path, descriptor, owner)
        except BaseException:
            os.close(descriptor)  # left open it would hold the lock until this process ends
            raise
        os.close(descriptor)


class FlockLock:
    """Held until released, or until every process that has the descriptor is gone."""

    def __init__(self, path: str, descriptor: int, owner: str) -> None:
        self._path = path
        self._descriptor = descriptor
        _write_content(descriptor, f"{owner}\n")
        let_go_in_children(self)  # which would hold the lock after our death

    def check(self) -> None:
        """Raise ``Busy`` if the lock's file was replaced: another run may hold the new one."""
        if self._descriptor < 0:
            raise Busy(f"{printable(self._path)} is not held any more by this process: it was released, or forked")
        with told("look at the lock", self._path):
            if not _same_file(self._path, self._descriptor):
                raise Busy(
                    f"{printable(self._path)} was replaced or removed while this run held it. {_busy(self._path)}"
                )

    def release(self) -> None:
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    leave_to_parent = release


class HeartbeatLock:
    """The same file, its content changed every few seconds, for file systems without flock.

    A content that stays the same over ``LOCK_SECONDS`` of the waiter's own monotonic clock has no
    living owner, and is taken over. Weaker than flock: of two that take over at once one wins and
    the other is told, at the latest by the ``check()`` before it publishes.
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
        self._pid = os.getpid()
        self._released = False
        self._stop = threading.Event()
        self._take(clock, pause)
        self._thread = threading.Thread(target=self._beat, name="midstride-heartbeat", daemon=True)
        self._thread.start()

    def _take(self, clock: Callable[[], float], pause: Callable[[float], Any]) -> None:
        seen, since = _content(self._path), clock()
        while seen.strip() and clock() - since < LOCK_SECONDS:
            pause(min(1.0, HEARTBEAT_SECONDS))
            now = _content(self._path)
            if now.strip() and now != seen:
                raise Busy(_busy(self._path))
            seen = now
        self._write()
        # Of two that take over at once, the one whose content stays has it.
        pause(min(1.0, HEARTBEAT_SECONDS))
        self.check()

    def _write(self) -> None:
        # In place: a draft to rename would be left behind by a kill. The counter has a fixed width, so
        # that a beat changes bytes and never the length, and a reader sees the old or the new one.
        self._beats += 1
        descriptor = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o666)
        try:
            _write_content(descriptor, f"{self._owner}\n{self._token} {self._beats:012d}\n")
            os.fsync(descriptor)  # on a network mount: from our cache to where the waiters look
        finally:
            os.close(descriptor)

    def _beat(self) -> None:
        while not self._stop.wait(HEARTBEAT_SECONDS):
            try:
                with told("renew the lock", self._path):
                    self.check()
                    self._write()
            except Busy as error:
                _log.warning("%s", error)
                return  # never write over the new owner
            except StorageError as error:
                _log.warning("the heartbeat failed and is tried again: %s", error)

    def check(self) -> None:
        """Raise ``Busy`` if another run took the lock over."""
        if self._pid != os.getpid() or self._released:
            raise Busy(f"{printable(self._path)} is not held any more by this process: it was released, or forked")
        with told("look at the lock", self._path):
            if not self._is_ours():
                raise Busy(f"{printable(self._path)} was taken over while this run held it. {_busy(self._path)}")

    def release(self) -> None:
        if self._pid != os.getpid() or self._released:
            return  # in a forked child the lock is the parent's
        self._released = True
        self._stop.set()
        if self._thread is not threading.current_thread():
            self._thread.join(HEARTBEAT_SECONDS)  # or its last beat could follow the release
        with told("release the lock", self._path):
            if self._is_ours():
                os.truncate(self._path, 0)

    def _is_ours(self) -> bool:
        # Only the second line counts: what follows may be the rest of a longer, earlier content.
        lines = _content(self._path).splitlines()
        return len(lines) > 1 and lines[1].startswith(f"{self._token} ")


_CONTENT_LIMIT_BYTES = 4096
"""Ten times what an owner's line and a heartbeat take."""


def _content(path: str) -> str:
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)  # a pipe would wait for a writer
    except FileNotFoundError:
        return ""
    try:
        return os.read(descriptor, _CONTENT_LIMIT_BYTES).decode("utf-8", "replace")
    finally:
        os.close(descriptor)


def _write_content(descriptor: int, content: str) -> None:
    # First over the old content, then cut: never empty in between, and on a full disk the block is there already.
    data = content.encode("utf-8", "replace")
    if os.pwrite(descriptor, data, 0) != len(data):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    os.ftruncate(descriptor, len(data))


def _same_file(path: str, descriptor: int) -> bool:
    try:
        there, ours = os.stat(path, follow_symlinks=False), os.fstat(descriptor)
    except FileNotFoundError:
        return False
    return (there.st_dev, there.st_ino) == (ours.st_dev, ours.st_ino)


def _busy(path: str) -> str:
    folder = printable(os.path.dirname(path))
    return (
        f"{folder} is held by another run: {_who(path)}. Nothing was written. Wait for it, stop it, or choose "
        "another folder"
    )


def left_at(path: str) -> str | None:
    """When the writer process that a dead owner left in charge last showed that it works.

    None where there is none, or none that can be seen from here.
    """
    try:
        owner = json.loads(_content(path).splitlines()[0])
        here = owner["boot"] == _boot_id() and owner["host"] == socket.gethostname()
        if here and not _lives(owner["pid"], owner["started"]) and _lives(owner["writer"], owner["writer_started"]):
            return str(os.stat(path, follow_symlinks=False).st_mtime_ns)
    except (ValueError, KeyError, IndexError, TypeError, OSError):
        pass
    return None


def _lives(pid: int, started: str) -> bool:
    return bool(started) and _start_time(int(pid)) == started


def _with_writer(owner: str) -> str:
    """The owner's line, with the process that holds the lock for it where that is another."""
    try:
        fields = json.loads(owner)
    except ValueError:
        return owner
    if not isinstance(fields, dict) or fields.get("pid") == os.getpid():
        return owner
    return json.dumps({**fields, "writer": os.getpid(), "writer_started": _start_time(os.getpid())})


def _who(path: str) -> str:
    try:
        owner = json.loads(_content(path).splitlines()[0])
        host, boot, pid, started = owner["host"], owner["boot"], int(owner["pid"]), owner["started"]
    except (ValueError, KeyError, IndexError, TypeError, OSError):
        return "it does not say which"
    since = f", since {owner['since']}" if isinstance(owner.get("since"), str) else ""
    # Containers share the boot and have pids of their own: both must fit before a pid means anything here.
    if boot != _boot_id() or host != socket.gethostname():
        return f"pid {pid} on host {host}{since}"
    # A writer in a process of its own asks for its trainer.
    if pid in (os.getpid(), os.getppid()) and started == _start_time(pid):
        return f"this very process (pid {pid}), through another Checkpointer{since}"
    state = "alive" if _is_alive(pid, started) else "dead: something it started holds the lock"
    return f"pid {pid} on this host ({host}){since}, which is {state}"


def _is_alive(pid: int, started: str) -> bool:
    if started:
        return _start_time(pid) == started
    try:  # no /proc: the pid alone, which may have been given to another since
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except OSError:
        pass
    return True


def _boot_id() -> str:
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return socket.gethostname()


def _start_time(pid: int) -> str:
    """When a process started, in the system's own count; empty if it has ended. A pid alone may be reused."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
        return "" if fields[0] in "ZX" else fields[19]  # a zombie has ended, and waits for its parent only
    except (OSError, IndexError):
        return ""
