"""The handle of one save."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Iterator

from midstride import limits
from midstride.errors import SaveError
from midstride.info import CheckpointInfo, Progress
from midstride.waiting import wait_for

WRITER_THREAD = "midstride-writer"


class PendingSave:
    """A save that was begun. It holds nothing of the state, and may be kept or dropped at will."""

    def __init__(self, step: int, total_bytes: int, *, announced: bool = True) -> None:
        self.step = step
        self._total_bytes = total_bytes
        self._staged_bytes = 0
        self._written_bytes = 0
        self._beats = 0
        self._with_listeners = False
        self._announced = announced  # to listeners; a comparison is not
        self._info: CheckpointInfo | None = None
        self._error: BaseException | None = None
        self._stall_seconds: float | None = None
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        self._process = os.getpid()
        self._reported = False

    def done(self) -> bool:
        """True once the checkpoint is durable, or the save has failed."""
        return self._info is not None or self._error is not None

    def staged(self) -> bool:
        """True once everything is copied: the caller's memory is no longer needed."""
        return self._staged_bytes >= self._total_bytes

    def progress(self) -> Progress:
        """How far it is."""
        if self._error is not None:
            phase = "failed"
        elif self._info is not None:
            phase = "committed"
        else:
            phase = "writing" if self.staged() else "staging"
        return Progress(phase, self._staged_bytes, self._written_bytes, self._total_bytes)

    def result(self, timeout: float | None = None) -> CheckpointInfo:
        """Wait until the checkpoint is durable, and return it. Older ones may be retired after that.

        ``timeout`` is in seconds. Raises what made the save fail, or ``Deadline`` (a
        ``TimeoutError``) if it has not ended in time or the storage makes no progress.
        """
        if os.getpid() != self._process and not self.done():
            raise SaveError("this is a forked child: the save goes on in the parent, and cannot be awaited here")
        if not self.done() and threading.current_thread().name == WRITER_THREAD:
            raise SaveError("result() was called by a listener on the writer's thread, which would wait for itself")
        if not self.done():
            with self._lock:
                wait_for(
                    self._changed,
                    self.done,
                    what=lambda: f"the save of step {self.step} to become durable",
                    progress=self._progress_or_life,
                    stall_seconds=limits.STORAGE_SECONDS,
                    timeout=timeout,
                )
        if self._error is not None:
            self._reported = True
            raise self._error
        assert self._info is not None
        return self._info

    # The saver's side.

    def _progress_or_life(self) -> object:
        """Changes whenever the save does anything."""
        if self._with_listeners:
            return time.monotonic()  # what a listener takes is its own affair
        return self._staged_bytes, self._written_bytes, self._beats

    @contextlib.contextmanager
    def _in_listeners(self) -> Iterator[None]:
        self._with_listeners = True
        try:
            yield
        finally:
            self._with_listeners = False

    def _beat(self) -> None:
        with self._lock:
            self._beats += 1
            self._changed.notify_all()

    def _write_again(self) -> None:
        with self._lock:
            self._beats += 1
            self._written_bytes = 0
            self._changed.notify_all()

    def _advance(self, *, staged: int = 0, written: int = 0) -> None:
        with self._lock:
            self._staged_bytes += staged
            self._written_bytes += written
            self._changed.notify_all()

    def _end(self, info: CheckpointInfo | None, error: BaseException | None) -> None:
        with self._lock:
            if not self.done():
                self._info, self._error = info, error
            self._changed.notify_all()
