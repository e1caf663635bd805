"""Saves in the background, one at a time, for those who write in TensorFlow's format: the hook and the manager."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from midstride import exit_guard, limits
from midstride.errors import MidstrideError, SaveError, StorageError, WriteError
from midstride.failures import Failures
from midstride.info import CheckpointInfo
from midstride.listeners import Listener, Listeners, RunBegan, RunEnded, SaveBegan, SaveCommitted, SaveFailed
from midstride.save.pending import WRITER_THREAD, PendingSave
from midstride.telemetry import Recorder, Statistics
from midstride.waiting import StallWatch, stalled, wait_for, with_retries
from midstride.worker import Worker

_log = logging.getLogger("midstride")


class Saves:
    """One worker thread, at most one save on it, and what became of the saves.

    Used by one thread, the training thread, except where a method says otherwise.
    """

    def __init__(
        self,
        *,
        what: str,
        max_failures: int,
        listeners: Callable[[], Sequence[Listener]],
        may_pass: Callable[[BaseException], bool],
        what_is_safe: Callable[[], str],
    ) -> None:
        """``may_pass``: whether an error may be over when the write is tried again.

        ``what_is_safe`` says it of the checkpoints before one that failed, or what to do.
        """
        self._what = what
        self._max_failures = max_failures
        self._listeners = listeners
        self._may_pass = may_pass
        self._what_is_safe = what_is_safe
        self.recorder = Recorder()
        self._failures = Failures(lambda: self.recorder.read().failures_in_a_row)
        self._worker = Worker(WRITER_THREAD)
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        self._tasks = 0
        self._progress: Callable[[], object] = lambda: None
        self._pending: PendingSave | None = None
        self._stall = StallWatch()
        self._with_listeners = False
        self._process = os.getpid()
        self._stop = False
        self._open = False
        self._last: CheckpointInfo | None = None

    def statistics(self) -> Statistics:
        """Counts and durations, from any thread."""
        return self.recorder.read()

    @property
    def stop_requested(self) -> bool:
        """Whether a listener asked training to stop."""
        return self._stop

    def request_stop(self) -> None:
        """From any thread: ask training to stop."""
        self._stop = True

    def begin_anew(self) -> None:
        """Another run begins: what stopped the one before does not stop it."""
        self._stop = False

    def busy(self, seconds: float) -> bool:
        """Whether a save is running, after waiting ``seconds`` at most for its end."""
        with self._lock:
            return not self._changed.wait_for(self._is_free, seconds)

    def _is_free(self) -> bool:
        return self._pending is None or self._pending.done()

    def begin(self, step: int) -> float:
        """Before a snapshot is taken: tell listeners. Returns when that was, for ``start``."""
        if os.getpid() != self._process:
            raise SaveError("this is a forked child: only the process that made the session saves")
        self._tell("before_save", SaveBegan(step))
        return time.perf_counter()

    def give_up(self, step: int, error: BaseException) -> None:
        """After ``begin``: there will be nothing to write."""
        self._tell("save_failed", SaveFailed(step, error))

    def _tell(self, method: str, event: object) -> Any:
        listeners = Listeners(self._listeners())
        try:
            return getattr(listeners, method)(event)
        finally:
            self.recorder.add(listener_failures=listeners.failures)

    def start(
        self,
        step: int,
        began: float,
        write: Callable[[], CheckpointInfo],
        *,
        here: bool,
        progress: Callable[[], object],
        afterwards: Callable[[], None],
        release: Callable[[], None],
    ) -> PendingSave:
        """Write a snapshot that was taken, on the worker, or ``here`` and now.

        ``write`` is called again after an error that may pass. ``progress`` changes while it gets on.
        ``afterwards`` is called when the checkpoint is durable, ``release`` when the snapshot is no longer needed.
        """
        pending = PendingSave(step, 0)
        self._pending, self._progress = pending, progress
        self.recorder.add(saves_begun=1)

        def save() -> None:
            try:
                info = with_retries(write, limits.RETRY_SECONDS, self._may_pass, self._retrying)
            except BaseException as error:
                self._failed(pending, self._as_write_error(error, step))
                return
            finally:
                release()
            self._committed(pending, info, began, afterwards)

        if here:
            save()
            stall = time.perf_counter() - began
        else:
            stall = time.perf_counter() - began
            self.run(save)
        pending._stall_seconds = stall
        self.recorder.add(stall_seconds=stall)
        self.recorder.set(last_stall_seconds=stall)
        return pending

    def run(self, task: Callable[[], None]) -> None:
        """Let the worker do something, after what it was given before. ``task`` sees to its own errors."""
        with self._lock:
            self._tasks += 1

        def counted() -> None:
            try:
                task()
            finally:
                with self._lock:
                    self._tasks -= 1
                    self._changed.notify_all()

        self._worker.run(counted)

    def failed(self, step: int, error: BaseException) -> None:
        """From the worker: something besides a save went wrong that the training thread must be told of."""
        pending = PendingSave(step, 0, announced=False)
        pending._end(None, error)
        self._failures.add(pending)

    def _retrying(self, error: BaseException, pause: float) -> None:
        self.recorder.add(saves_retried=1)
        _log.warning("%s: a checkpoint could not be written: %s. Trying again in %g s", self._what, error, pause)

    def _committed(
        self, pending: PendingSave, info: CheckpointInfo, began: float, afterwards: Callable[[], None]
    ) -> None:
        seconds = time.perf_counter() - began
        self.recorder.committed(info.nbytes, seconds)
        if self._max_failures:
            self._failures.clear()
        self._with_listeners = True
        try:
            stall = pending._stall_seconds if pending._stall_seconds is not None else seconds
            self._last = info
            if self._tell("after_save", SaveCommitted(info, stall, seconds)):
                self._stop = True
            afterwards()
        except BaseException as error:
            _log.exception("%s: after the checkpoint of step %d was saved", self._what, info.step)
            self.failed(info.step, error)
        finally:
            self._with_listeners = False
            self._end(pending, info, None)

    def _failed(self, pending: PendingSave, error: BaseException) -> None:
        self.recorder.failed(error)
        self._failures.add(pending)
        _log.error("%s: %s", self._what, error)
        self._with_listeners = True
        try:
            self._tell("save_failed", SaveFailed(pending.step, error))
        finally:
            self._with_listeners = False
            self._end(pending, None, error)

    def _as_write_error(self, error: BaseException, step: int) -> BaseException:
        if isinstance(error, MidstrideError) and not isinstance(error, TimeoutError | StorageError):
            return error
        failure = WriteError(f"the checkpoint of step {step} could not be written: {error}. {self._what_is_safe()}")
        failure.__cause__ = error
        return failure

    def _end(self, pending: PendingSave, info: CheckpointInfo | None, error: BaseException | None) -> None:
        with self._lock:
            pending._end(info, error)
            self._changed.notify_all()

    def _progress_or_life(self) -> object:
        """Changes whenever something is done."""
        if self._with_listeners:
            return time.monotonic()  # what a listener takes is its own affair
        return self._tasks, self._progress()

    def wait(self, timeout: float | None = None, stall_seconds: float | None = None) -> None:
        """Wait until the worker has nothing left to do. ``Deadline`` after ``timeout`` seconds, or without progress."""
        if self._worker.is_current():
            raise SaveError("called by a listener on the writer's thread, which would wait for itself")
        if os.getpid() != self._process:
            return
        with self._lock:
            wait_for(
                self._changed,
                lambda: not self._tasks and self._is_free(),
                what=lambda: f"what is being written into {self._what}",
                progress=self._progress_or_life,
                stall_seconds=limits.STORAGE_SECONDS if stall_seconds is None else stall_seconds,
                timeout=timeout,
            )

    def raise_if_stalled(self) -> None:
        """Raise ``Deadline``, once, where what is being written has made no progress for a storage's time."""
        if self._stall.stalled(self._progress_or_life):
            error = stalled(
                f"what is being written into {self._what}", limits.STORAGE_SECONDS, "Earlier checkpoints are untouched"
            )
            _log.error("%s", error)
            raise error

    def check(self, tolerated: int | None = None) -> None:
        """Raise the failure of a save that nobody was told of yet, if more came in a row than are tolerated."""
        self._failures.surface(self._max_failures if tolerated is None else tolerated)

    def open(self) -> None:
        """Have what is running finished when the interpreter exits."""
        if not self._open:
            self._open = True
            self._tell("begin", RunBegan(self._what))
        exit_guard.add(self)

    def close(self, timeout: float | None = None, *, wait: bool = True) -> None:
        """Wait for what is running, end the worker, and raise a failure that nobody was told of.

        ``wait=False``: it was waited for in vain.
        """
        exit_guard.discard(self)
        if os.getpid() != self._process:
            return
        try:
            if wait:
                self.wait(timeout, limits.EXIT_SECONDS)
            if not self._worker.stop(limits.WRITER_SECONDS):
                _log.warning("the thread that writes into %s hangs", self._what)
        finally:
            if self._open:
                self._open = False
                self._tell("end", RunEnded(self._last))
            self._failures.surface(0)
