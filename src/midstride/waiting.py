"""Waiting with a deadline that counts only while nothing progresses, and threads that are waited for so."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable
from typing import TypeVar

from midstride import limits
from midstride.errors import Deadline

try:
    import resource
except ImportError:  # no such limits on this system
    resource = None  # type: ignore[assignment]

_sleep = time.sleep
_T = TypeVar("_T")


def wait_for(
    changed: threading.Condition,
    ready: Callable[[], bool],
    *,
    what: Callable[[], str],
    progress: Callable[[], object],
    stall_seconds: float,
    timeout: float | None = None,
    safe: Callable[[], str] = lambda: "Earlier checkpoints are untouched",
) -> None:
    """Wait, holding the lock of ``changed``, until ``ready()``.

    Take the lock by ``with lock``: a condition's own ``__enter__`` and ``__exit__`` are Python code, where Ctrl-C
    can come between the lock and the block, and then nobody gives it back.

    Raises ``Deadline`` when ``timeout`` seconds have passed, or when ``progress()`` has given the
    same answer for ``stall_seconds``, not counting any in which this process was stopped; its message says
    ``what`` was waited for and what is ``safe``.
    """
    start = looked = time.monotonic()
    idle = 0.0
    last = progress()
    while not ready():
        now = time.monotonic()
        if progress() != last:
            last, idle = progress(), 0.0
        else:
            idle += min(now - looked, 2 * _LOOK_SECONDS)  # more: we were stopped, and what we wait for was too
        looked = now
        if timeout is not None and now - start >= timeout:
            raise Deadline(f"waited {timeout:g} s for {what()}; it goes on")
        if idle >= stall_seconds:
            raise stalled(what(), stall_seconds, safe())
        left = min(stall_seconds - idle, _LOOK_SECONDS if timeout is None else start + timeout - now, _LOOK_SECONDS)
        changed.wait(max(left, 0.001))


_LOOK_SECONDS = 1.0


def stalled(what: str, seconds: float, safe: str) -> Deadline:
    """The error for something that makes no progress."""
    return Deadline(
        f"waited for {what}, which has made no progress for {seconds:g} s. {safe}; look at the disk or the mount"
    )


class StallWatch:
    """Notices work that makes no progress, for those who do not wait for it but look now and then."""

    def __init__(self) -> None:
        self._seen: object = None
        self._since = 0.0
        self._told = False

    def stalled(self, progress: Callable[[], object]) -> bool:
        """True, once, when ``progress()`` has given the same answer for ``limits.STORAGE_SECONDS``."""
        now, current = time.monotonic(), progress()
        if current != self._seen:
            self._seen, self._since, self._told = current, now, False
        if self._told or now - self._since < limits.STORAGE_SECONDS:
            return False
        # Where the whole process was stopped, what works in it needs a moment to show that it moves.
        _sleep(_MOMENT_SECONDS)
        self._told = progress() == current
        return self._told


_MOMENT_SECONDS = 1.0


def with_retries(
    action: Callable[[], _T],
    pauses: Iterable[float],
    may_pass: Callable[[BaseException], bool],
    told: Callable[[BaseException, float], None],
) -> _T:
    """What ``action`` returns; called again after each of ``pauses``, in seconds, while its error may pass.

    ``told`` is called with each such error and the pause that follows.
    """
    for pause in pauses:
        try:
            return action()
        except Exception as error:
            if not may_pass(error):
                raise
            told(error, pause)
        _sleep(pause)
    return action()


class SupervisedThread(threading.Thread):
    """A daemon whose progress another thread watches: what it calls may hang, and needs no limit of its own."""

    def __init__(self, work: Callable[[], None], name: str) -> None:
        super().__init__(target=work, name=name, daemon=True)


def room_for_threads() -> bool:
    """Whether threads may be started for convenience: each reserves some 70 MiB of address space, which a
    process with a limit on that (``ulimit -v``) needs for its data."""
    return resource is None or resource.getrlimit(resource.RLIMIT_AS)[0] == resource.RLIM_INFINITY
