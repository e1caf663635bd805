"""``Checkpointer``: the only module that sees the whole path."""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from types import TracebackType
from typing import Any, Literal, Self

from midstride import exit_guard, limits
from midstride.errors import RestoreError, SaveError, StagingError, StepExists
from midstride.failures import Failures
from midstride.format import layout
from midstride.info import CheckpointInfo
from midstride.listeners import Listener, Listeners, RunBegan, RunEnded, SaveBegan, SaveCommitted, SaveFailed
from midstride.reader import latest_of, usable_of
from midstride.restore import load as loading
from midstride.restore.load import Restored
from midstride.retention import Retention, as_retention, best_of
from midstride.save.capture import capture, collection_paused, encode_metrics, exact_step
from midstride.save.messages import Committed, Failed
from midstride.save.pending import PendingSave
from midstride.save.predecessor import Patience
from midstride.save.saver import Saver
from midstride.storage import Storage, open_storage
from midstride.storage.bounded import BoundedReads
from midstride.storage.lock import describe_owner
from midstride.telemetry import Recorder, Statistics
from midstride.triggers import Trigger, as_trigger

_log = logging.getLogger("midstride")


class Checkpointer:
    """Saves a training run's state while it trains, and restores it.

    One object for one run's folder. Use it as a context manager: leaving the block finishes the
    save in flight. Methods are called from one thread, the training thread; ``should_stop``,
    ``request_stop()``, ``statistics()`` and the methods that only read may be called from any.
    """

    def __init__(
        self,
        path: str | os.PathLike[str] | Storage,
        *,
        every: int | str | Trigger | None = None,
        keep: int | Retention | None = None,
        busy: Literal["skip", "wait"] = "skip",
        staging_bytes: int | None = None,
        engine: Literal["process", "thread"] | None = None,
        snapshot: Literal["copy"] = "copy",
        listeners: Iterable[Listener] = (),
        existing: Literal["error", "continue"] = "error",
        fallback: bool = True,
        max_failures: int = 0,
    ) -> None:
        """Nothing is written, locked or even looked at before the first call that needs it.

        path: the run's folder, or a Storage.
        every: when ``step()`` saves: a number of steps, a time such as "10min", or triggers joined by ``|``.
        keep: which checkpoints stay: a number of newest ones, or rules joined by ``|``. None keeps all.
        busy: what ``step()`` does when a save is due while one is in flight: put it off, or wait.
        staging_bytes: memory for snapshots. Default: as much as one takes, at most half of what is available.
        engine: where the writer runs: in a process of its own ("process", the default on Linux), which finishes a
            save though this process dies, or on a thread ("thread", the default elsewhere, in notebooks, and
            where ``path`` or ``keep`` is code of yours that another process does not have).
        snapshot: how state is captured; one choice for now.
        listeners: told of every save.
        existing: whether a folder with checkpoints that were not restored is an error or is written beside.
        fallback: whether ``restore()`` passes over a bad checkpoint for the one before.
        max_failures: failed saves in a row that ``step()`` and ``save()`` tolerate without raising. A save
            fails when its storage stayed unavailable over several attempts, or at once when it cannot succeed.
        """
        _choice("busy", busy, ("skip", "wait"))
        if engine is not None:
            _choice("engine", engine, ("process", "thread"))
        _choice("snapshot", snapshot, ("copy",))
        _choice("existing", existing, ("error", "continue"))
        _whole("max_failures", max_failures, 0)
        if staging_bytes is not None:
            _whole("staging_bytes", staging_bytes, MIN_STAGING_BYTES)
        self._storage = open_storage(path)
        self._reads = BoundedReads(self._storage)
        self._busy, self._adopt, self._fallback = busy, existing == "continue", fallback
        self._max_failures = max_failures
        self._recorder = Recorder()
        self._listeners = Listeners(listeners)
        retention = as_retention(keep)
        self._saver = Saver(
            self._storage,
            describe_owner(),
            staging_bytes=staging_bytes,
            engine=engine,
            retention=retention,
            recorder=self._recorder,
            on_end=self._on_end,
        )
        self._process = os.getpid()
        self._restored: CheckpointInfo | None = None
        self._bad: set[int] = set()
        self._prepared = False
        self._closed = False
        self._stop = False
        self._torn: list[object] = []  # the ``only`` of each restore that began to overwrite and did not end
        self._failures = Failures(lambda: self._recorder.read().failures_in_a_row)
        self._calls = threading.RLock()  # a signal handler may interrupt the thread that is about to enter
        self._caller: int | None = None
        trigger = as_trigger(every)
        self._watch = trigger.start(0) if trigger is not None else None
        self._listeners.begin(RunBegan(self._storage.description))
        exit_guard.add(self)

    # Saving.

    def step(self, step: int, state: Any, metrics: Mapping[str, Any] | None = None) -> PendingSave | None:
        """Say that training is at ``step``; save if it is time to.

        Call it after every step, with the same arguments as ``save()``. Returns the handle if a save
        was begun. Raises what ``save()`` raises, and an earlier save's failure (after a save that is
        due has been begun). Metrics are only read when a save is due.
        """
        with self._one_call("step()"):
            return self._step(exact_step(step), state, metrics)

    def _step(self, step: int, state: Any, metrics: Mapping[str, Any] | None) -> PendingSave | None:
        if not self._prepared:
            captured = capture(state)  # what cannot be saved is told before anything is made
            self._open_run()
            self._saver.prepare(captured)
            self._prepared = True
        self._open_run()
        pending = None
        due = self._watch is not None and self._watch.observe(step)
        stopping = due and self._watch is not None and self._watch.stop_requested
        try:
            if due:
                if self._busy == "skip" and self._saver.pending is not None and not stopping:
                    self._recorder.add(saves_skipped=1)
                    self._saver.raise_if_stalled()
                else:
                    pending = self._save(step, state, metrics, overwrite=False)
            if stopping and pending is not None:
                pending.result()
            self._failures.surface(self._max_failures, besides=pending)
        finally:
            # Whatever became of the save: who sent the signal wants an end.
            self._stop = self._stop or stopping
        return pending

    def save(
        self, step: int, state: Any, metrics: Mapping[str, Any] | None = None, overwrite: bool = False
    ) -> PendingSave:
        """Save ``state`` as the checkpoint of ``step``.

        Waits for the save before it, copies the state, and returns: from then on the caller may
        change or delete anything. The checkpoint exists when the handle's ``result()`` returns.

        A step that this run has saved already: with equal content (metrics do not count) the existing
        checkpoint is the result and nothing is written; with other content ``StepExists`` is raised,
        unless ``overwrite`` is said: then the old one is retired after the new one is committed.

        Raises ``UnsupportedState`` (with the path of the value) before anything is written; ``Busy``
        where another run holds the folder; ``ForeignRun`` where it holds checkpoints that this run
        neither made nor restored; and an earlier save's failure, once this save has been begun.
        """
        with self._one_call("save()"):
            step = exact_step(step)
            if self._saver.view is None:
                capture(state)  # what cannot be saved is told before anything is made
            self._open_run()
            pending = self._save(step, state, metrics, overwrite=overwrite)
            self._failures.surface(self._max_failures, besides=pending)
            return pending

    def _save(self, step: int, state: Any, metrics: Mapping[str, Any] | None, *, overwrite: bool) -> PendingSave:
        began = time.perf_counter()
        self._saver.wait_idle(None)
        self._open_run()  # again, if the writer died with the save that was waited for
        existing = self._saved_before(step)
        compare = existing if not overwrite else None
        if compare is None:
            self._listeners.before_save(SaveBegan(step))
        with collection_paused():
            try:
                encoded = encode_metrics(metrics)
                captured = capture(state)
            except BaseException as error:
                if compare is None:
                    self._listeners.save_failed(SaveFailed(step, error))
                raise
            if self._watch is not None:
                self._watch.taken(step)
            self._recorder.add(saves_begun=0 if compare is not None else 1)
            pending = self._saver.begin(
                captured, step, encoded, began=began, compare_with=compare,
                replaces=existing if overwrite else None, bad=frozenset(self._bad),
            )  # fmt: skip
        self._prepared = True
        stall = pending._stall_seconds = time.perf_counter() - began
        self._recorder.add(stall_seconds=stall)
        self._recorder.set(last_stall_seconds=stall)
        if compare is not None:
            try:
                pending.result()
            except RestoreError:
                # What was saved of this step is damaged by now: it is superseded, without being asked.
                self._bad.add(compare.seq)
                return self._save(step, state, metrics, overwrite=overwrite)
        return pending

    def _saved_before(self, step: int) -> CheckpointInfo | None:
        """The checkpoint of this step in this run's own line, if it was not found bad."""
        view = self._saver.view
        assert view is not None
        found = [info for info in view.checkpoints if info.step == step and info.seq in view.line - self._bad]
        return found[-1] if found else None

    def _open_run(self) -> None:
        if self._saver.view is None:
            self._saver.open_run(self._restored, adopt=self._adopt)
            # What this run writes from here on is its own.
            self._adopt = True

    @contextlib.contextmanager
    def _one_call(self, what: str) -> Iterator[None]:
        """One call at a time: a second thread waits, the same one (a signal handler, a listener) is refused."""
        self._may_wait(what)
        self._may_write(what)  # before the lock: in a forked child nobody would ever give it back
        with self._calls:
            self._caller = threading.get_ident()
            try:
                self._may_write(what)
                yield
            finally:
                self._caller = None

    def _may_wait(self, what: str) -> None:
        if self._saver.on_writer_thread():
            raise SaveError(f"{what} was called by a listener on the writer's thread, which would wait for itself")
        if self._caller == threading.get_ident():
            raise SaveError(
                f"{what} was called inside step() or save() (by a signal handler?): it would wait for itself"
            )

    def _may_write(self, what: str) -> None:
        if self._closed:
            raise SaveError(f"{what}: this Checkpointer is closed")
        if os.getpid() != self._process:
            raise SaveError(f"{what}: this is a forked child; only the process that made the Checkpointer saves")
        if self._torn:
            raise StagingError(
                f"{what}: the state is not whole, nothing was saved: a restore into it did not come to its end. "
                "Build its objects anew and restore again"
            )

    def _on_end(self, pending: PendingSave, reply: Committed | Failed, seconds: float) -> None:
        """On the writer's thread, when a save has ended."""
        if isinstance(reply, Committed):
            if not reply.fresh:
                self._recorder.add(saves_unchanged=1)
                return
            self._restored = reply.info  # should the folder have to be opened again, this is where the run is
            self._recorder.committed(reply.info.nbytes, seconds)
            if self._max_failures:
                self._failures.clear()  # tolerated, logged and counted; and it is over
            _log.info("saved step %d as %s in %.2f s", reply.info.step, reply.info.name, seconds)
            # A fast writer may be done before save() has returned: then all of it was stall.
            stall = pending._stall_seconds if pending._stall_seconds is not None else seconds
            if self._listeners.after_save(SaveCommitted(reply.info, stall, seconds)):
                self._stop = True
        elif isinstance(reply.error, StepExists | RestoreError):
            return  # the answer to a comparison: the save() that asked knows what to do
        else:
            self._recorder.failed(reply.error)
            self._failures.add(pending)
            _log.error("step %d: %s", pending.step, reply.error)
            if pending._announced:
                self._listeners.save_failed(SaveFailed(pending.step, reply.error))
        self._recorder.set(listener_failures=self._listeners.failures)

    def check(self) -> None:
        """Raise the failure of a save in the background that nobody was told of yet, if there is one."""
        self._failures.surface(0)

    def wait(self, timeout: float | None = None) -> None:
        """Wait until the save in flight has ended; raise if it, or one before it, failed.

        ``timeout`` is in seconds. ``Deadline`` (a ``TimeoutError``) if it has not ended in time, or
        the storage has made no progress for a while.
        """
        if os.getpid() == self._process:
            self._may_wait("wait()")
            self._saver.wait_idle(timeout)
            self._failures.surface(0)

    # Stopping.

    @property
    def should_stop(self) -> bool:
        """True once a signal was answered with a save, a listener asked to stop, or ``request_stop()`` was called."""
        return self._stop

    def request_stop(self) -> None:
        """Ask the training loop to stop: sets ``should_stop``. May be called from any thread or signal handler."""
        self._stop = True

    # Reading.

    def restore(
        self,
        state: Any = None,
        step: int | None = None,
        *,
        only: str | Sequence[str] | Mapping[str, Any] | None = None,
        rename: Mapping[str, str] | None = None,
        cast: bool = False,
        strict: bool = True,
    ) -> Restored | None:
        """Restore the latest checkpoint, or the one of ``step``, into ``state``. None: nothing was ever saved here.

        Objects with ``load_state_dict`` are loaded in place; everything else comes back in
        ``.state``, arrays in the kind of the template's. Without ``state``: plain containers with
        NumPy arrays.

        only: names of top-level items (or, without ``state``, JSON pointers; see ``RunReader.load``).
        rename: pointer in the checkpoint -> pointer in the state.
        cast: convert arrays to the state's dtype, within floats, ints or complex numbers.
        strict: False lets names be missing or left over; they are listed in ``.warnings``.

        Raises ``StateMismatch`` with all differences at once, before anything is changed;
        ``NothingRestorable`` where something was saved and nothing can be read; ``NotCommitted``
        where ``step`` was not committed; ``StorageError`` where the folder, or a checkpoint in it that may be
        the newest, could not be looked at.
        """
        if os.getpid() == self._process:
            self._may_wait("restore()")
            if not self._closed:
                self._saver.wait_idle(None)
                if self._watch is not None:  # a run that will save, and not one that only looks
                    self._saver.start_early()
                self._wait_for_predecessor()
        options = loading.Options(only, rename or {}, cast, strict, on_touch=lambda: self._torn.append(only))
        wanted = exact_step(step) if step is not None else None
        restored = loading.restore(self._reads, state, wanted, options, fallback=self._fallback)
        # Only a restore of the same, or of all, makes whole what one before it left in halves.
        if restored is not None and state is not None:
            self._torn = [] if only is None and strict else [torn for torn in self._torn if torn != only]
        self._adopt = True
        if restored is not None:
            self._resume_from(restored)
        return restored

    def _wait_for_predecessor(self) -> None:
        """What a run that died a moment ago had staged is being committed: it is the one to go on from."""
        left_at = getattr(self._storage, "left_at", None)
        patience = Patience(self._storage.description)
        while left_at is not None and self._saver.view is None:
            sign = self._reads.within(
                lambda: left_at(layout.LOCK), f"looking at the lock of {self._storage.description}"
            )
            if sign is None or not patience.wait(sign):
                break

    def _resume_from(self, restored: Restored) -> None:
        self._restored = restored.info
        self._bad.update(restored.bad)
        if self._watch is not None:
            self._watch.rewind(restored.step)
        if self._saver.view is not None and not self._closed and os.getpid() == self._process:
            self._saver.open_run(self._restored, adopt=True)

    def latest(self) -> CheckpointInfo | None:
        """The newest checkpoint; None if nothing was ever saved here, ``NothingRestorable`` if nothing can be used."""
        return latest_of(self._reads, loading.find(self._reads))

    def best(self, metric: str, mode: Literal["min", "max"]) -> CheckpointInfo | None:
        """The checkpoint with the best finite value of a metric, the newer one of equals; None if none has it."""
        return best_of(self.checkpoints(), metric, mode)

    def checkpoints(self) -> list[CheckpointInfo]:
        """The usable checkpoints in the folder, by rising ``seq``. One that could not be looked at is logged."""
        return usable_of(self._reads, loading.find(self._reads))

    def statistics(self) -> Statistics:
        """Counts and durations since this object was made."""
        return self._recorder.read()

    # The end.

    def close(self, timeout: float | None = None) -> None:
        """Finish the save in flight, release the folder, and raise a failure that nobody was told of.

        ``timeout`` in seconds; by default 60 without progress. Idempotent.
        """
        if self._closed or os.getpid() != self._process:
            return
        self._may_wait("close()")
        self._closed = True
        exit_guard.discard(self)
        try:
            self._saver.wait_idle(timeout, limits.EXIT_SECONDS)
        finally:
            self._finish()
        self._failures.surface(0)

    def _finish(self) -> None:
        if self._watch is not None:
            self._watch.close()
        idle = self._saver.pending is None
        view = self._saver.view  # it goes with the writer
        if not self._saver.close(limits.WRITER_SECONDS if idle else 0.1):
            _log.warning("the writer of %s hangs; the folder stays locked while it does", self._storage.description)
        last = view.checkpoints[-1] if view is not None and view.checkpoints else None
        self._listeners.end(RunEnded(last))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        exit_guard.leave(self.close, error)


MIN_STAGING_BYTES = 256 * 1024
"""Four pieces of the smallest size."""


def _choice(name: str, value: str, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise ValueError(f"{name} must be one of {', '.join(map(repr, allowed))}, not {value!r}")


def _whole(name: str, value: int, least: int) -> None:
    if type(value) is not int:
        raise TypeError(f"{name} must be an int, not {value!r}")
    if value < least:
        raise ValueError(f"{name} must be at least {least}, not {value}")
