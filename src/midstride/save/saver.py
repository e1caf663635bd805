"""The trainer's side of the way out: one save in flight, staged here and handed to the writer."""

from __future__ import annotations

import contextlib
import logging
import platform
import sys
import threading
import time
import traceback
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import numpy as np

from midstride import limits
from midstride.errors import Busy, Deadline, SaveError, StagingError, WriterDied
from midstride.info import CheckpointInfo
from midstride.retention import Retention
from midstride.save.arena import Arena, budget_bytes, chunk_bytes
from midstride.save.capture import Captured
from midstride.save.engine import Engine, ThreadEngine, make_engine
from midstride.save.messages import (
    Abort,
    Committed,
    Emptied,
    Failed,
    Job,
    Opened,
    OpenRun,
    Refused,
    Reply,
    Restarted,
    Retired,
    Retrying,
    RunView,
    Seal,
    Staged,
    Stopped,
    Working,
)
from midstride.save.pending import PendingSave
from midstride.save.plan import Plan, Planner
from midstride.save.stage import Stager
from midstride.storage.base import Storage
from midstride.telemetry import Recorder
from midstride.waiting import StallWatch, stalled, wait_for

_log = logging.getLogger("midstride")


class Outcome(Protocol):
    """Called on the writer's thread when a save is committed or has failed, before its handle says so."""

    def __call__(self, pending: PendingSave, reply: Committed | Failed, seconds: float) -> None: ...


@dataclass(slots=True)
class _InFlight:
    number: int
    pending: PendingSave
    began: float

    @property
    def what(self) -> str:
        """What is waited for."""
        if self.pending.done():
            return f"the retirement of older checkpoints after step {self.pending.step}"
        return f"the save of step {self.pending.step} to become durable"

    @property
    def safe(self) -> str:
        """What is safe, whatever comes."""
        done = self.pending.done()
        return f"The checkpoint of step {self.pending.step} is durable" if done else "Earlier checkpoints are untouched"


class Saver:
    """Stages snapshots and follows the writer. Used by one thread at a time; replies come on another."""

    def __init__(
        self,
        storage: Storage,
        owner: str,
        *,
        staging_bytes: int | None,
        engine: Literal["process", "thread"] | None = None,
        retention: Retention | None,
        recorder: Recorder,
        on_end: Outcome,
    ) -> None:
        self._engine: Engine = make_engine(engine, storage, owner, retention, self._on_reply)
        # Where the choice was left to us, a thread does what no process can be had for.
        chosen = engine is None and self._engine.name == "process"
        self._spare = ThreadEngine(storage, owner, self._on_reply) if chosen else None
        self._budget = budget_bytes(staging_bytes)
        self._retention = retention
        self._recorder = recorder
        self._on_end = on_end
        self._planner = Planner()
        self._arena: Arena | None = None
        self._stager: Stager | None = None
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        self._in_flight: _InFlight | None = None
        self._stall = StallWatch()
        self._free_places: deque[int] = deque()
        self._opening: RunView | BaseException | None = None
        self._openings = 0
        self._opening_signs = 0
        self._jobs = 0
        self.view: RunView | None = None
        """The run as the writer last saw it; None until it was opened, and after a writer died."""
        self.what: str = storage.description

    # Opening.

    def open_run(self, restored: CheckpointInfo | None, *, adopt: bool) -> RunView:
        """Start the writer and take the folder. Raises what ``RunFolder`` raises."""
        try:
            view = self._open(restored, adopt=adopt)
        except WriterDied as error:
            if self._spare is None:
                raise
            _log.warning("%s. The writer runs on a thread from here on", error)
            self._engine.stop(0.1)
            self._engine = self._spare
            view = self._open(restored, adopt=adopt)
        self._spare = None
        self._recorder.set(engine=self._engine.name)
        self.view = view
        return view

    def start_early(self) -> None:
        """Have the writer start meanwhile; what is wrong with that is told when it is needed."""
        with contextlib.suppress(WriterDied):
            self._engine.start()

    def _open(self, restored: CheckpointInfo | None, *, adopt: bool) -> RunView:
        self._engine.start()
        with self._lock:
            self._opening = None
            self._openings += 1
            self._engine.send(OpenRun(self._openings, restored, adopt))
            wait_for(
                self._changed,
                lambda: self._opening is not None,
                what=lambda: f"the writer to open {self.what}",
                progress=lambda: self._opening_signs,
                stall_seconds=limits.STORAGE_SECONDS,
            )
            answer = self._opening
        if isinstance(answer, BaseException):
            self._engine.stop(limits.WRITER_SECONDS)
            raise answer
        assert answer is not None
        return answer

    # Saving.

    @property
    def pending(self) -> PendingSave | None:
        """The save in flight."""
        flight = self._in_flight
        return flight.pending if flight is not None else None

    def on_writer_thread(self) -> bool:
        return self._engine.on_writer_thread()

    def prepare(self, captured: Captured) -> None:
        """Plan, and make staging memory present in the background, before the first save needs it."""
        self._arena_for(self._plan(captured))

    def begin(
        self,
        captured: Captured,
        step: int,
        metrics: Mapping[str, Any],
        *,
        began: float,
        compare_with: CheckpointInfo | None = None,
        replaces: CheckpointInfo | None = None,
        bad: frozenset[int] = frozenset(),
    ) -> PendingSave:
        """Stage a snapshot and hand it to the writer. Nothing is in flight when this is called.

        Returns when the caller's memory is no longer needed.
        """
        plan = self._plan(captured)
        arena = self._arena_for(plan)
        self._jobs += 1
        pending = PendingSave(step, plan.total_bytes, announced=compare_with is None)
        job = Job(
            number=self._jobs,
            step=step,
            plan=plan,
            tree_json=captured.tree_json,
            metrics=metrics,
            versions=library_versions(),
            memory=arena,
            retention=self._retention,
            newest=max((info.seq for info in self.view.checkpoints), default=0) if self.view is not None else 0,
            compare_with=compare_with,
            replaces=replaces,
            bad=bad,
        )
        try:
            with self._lock:
                self._in_flight = _InFlight(job.number, pending, began)
            self._engine.send(job)
            self._stage(plan, captured, job.number, pending)
            self._engine.send(Seal(job.number))
            self._engine.hand_over()
        except BaseException as error:
            pending._reported = True  # by this very exception
            self._engine.send(Abort(job.number))
            if isinstance(error, Exception) and not isinstance(error, SaveError | Deadline):
                raise StagingError(
                    f"step {step} could not be staged: {error}. Nothing was published, nothing older was touched"
                ) from error
            raise
        return pending

    def _plan(self, captured: Captured) -> Plan:
        return self._planner.plan(captured.leaves, chunk_bytes(self._budget))

    def _arena_for(self, plan: Plan) -> Arena:
        piece = chunk_bytes(self._budget)
        wanted = min(plan.arena_bytes, max(piece, self._budget // piece * piece))
        if self._arena is None or self._arena.nbytes < wanted:
            if self._arena is not None:
                old, self._arena, self._stager = self._arena, None, None
                old.close()
            arena = Arena(wanted)
            self._arena, self._stager = arena, Stager(arena)
            # Also when the copy begins at once: making pages present beside it halved the first stall.
            arena.prefault()
            self._recorder.set(staging_bytes=arena.nbytes)
        return self._arena

    def _stage(self, plan: Plan, captured: Captured, job: int, pending: PendingSave) -> None:
        assert self._arena is not None
        assert self._stager is not None

        def deliver(chunk: int, place: int) -> None:
            pending._advance(staged=plan.chunks[chunk].nbytes)
            self._engine.send(Staged(job, chunk, place))

        if plan.arena_bytes <= self._arena.nbytes:
            self._stager.stage_whole(plan, captured.leaves, deliver)
        else:
            piece = chunk_bytes(self._budget)
            with self._lock:
                self._free_places = deque(range(0, self._arena.nbytes - piece + 1, piece))
            self._stager.stage_through(plan, captured.leaves, lambda: self._take_place(pending), deliver)

    def _take_place(self, pending: PendingSave) -> int:
        began = time.perf_counter()
        with self._lock:
            wait_for(
                self._changed,
                lambda: bool(self._free_places) or self._in_flight is None,
                what=lambda: "the writer to empty staging memory",
                progress=lambda: len(self._free_places),
                stall_seconds=limits.STORAGE_SECONDS,
            )
            self._recorder.add(staging_wait_seconds=time.perf_counter() - began)
            if self._in_flight is None:
                ended = "the writer ended while the state was staged. The next save gets a new one"
                raise WriterDied(ended if pending._error is None else str(pending._error)) from pending._error
            return self._free_places.popleft()

    def wait_idle(self, timeout: float | None, stall_seconds: float | None = None) -> None:
        """Wait until nothing is in flight, well or badly ended. By default a storage's time without progress."""
        with self._lock:
            if (flight := self._in_flight) is None:
                return
            wait_for(
                self._changed,
                lambda: self._in_flight is not flight,
                what=lambda: flight.what,
                safe=lambda: flight.safe,
                progress=flight.pending._progress_or_life,
                stall_seconds=limits.STORAGE_SECONDS if stall_seconds is None else stall_seconds,
                timeout=timeout,
            )

    def raise_if_stalled(self) -> None:
        """Raise ``Deadline``, once, where the save in flight has made no progress for a storage's time."""
        flight = self._in_flight
        if flight is None:
            return
        if self._stall.stalled(lambda: (flight.number, flight.pending.done(), flight.pending._progress_or_life())):
            error = stalled(flight.what, limits.STORAGE_SECONDS, flight.safe)
            _log.error("%s", error)
            raise error

    def close(self, timeout: float) -> bool:
        """End the writer and give the memory back; return whether it ended."""
        ended = self._engine.stop(timeout)
        if ended and self._arena is not None:
            self._stager = None
            self._arena.close()
            self._arena = None
            self._recorder.set(staging_bytes=0)
        return ended

    # Replies, on the writer's thread.

    def _on_reply(self, reply: Reply) -> None:
        match reply:
            case Opened(number, view) if number == self._openings:  # not the late answer to one that was given up
                self._answer(view)
            case Refused(number, error) if number == self._openings:
                self._answer(error)
            case Emptied():
                self._emptied(reply)
            case Working():
                self._worked(reply)
            case Retrying():
                self._recorder.add(saves_retried=1)
                self._written_again(reply)
            case Restarted():
                self._recorder.add(writer_restarts=1)
                self._written_again(reply)
            case Committed() | Failed():
                self._ended(reply)
            case Retired():
                self._retired(reply)
            case Stopped(error):
                self._stopped(error)

    def _answer(self, answer: RunView | BaseException) -> None:
        with self._lock:
            self._opening = answer
            self._changed.notify_all()

    def _emptied(self, reply: Emptied) -> None:
        with self._lock:
            if self._in_flight is not None and self._in_flight.number == reply.job:
                self._free_places.append(reply.place)
                self._in_flight.pending._advance(written=reply.nbytes)
                self._changed.notify_all()

    def _worked(self, reply: Working) -> None:
        with self._lock:
            self._opening_signs += reply.job == 0
            if self._in_flight is not None and self._in_flight.number == reply.job:
                self._in_flight.pending._beat()
                self._changed.notify_all()

    def _written_again(self, reply: Retrying | Restarted) -> None:
        with self._lock:
            if self._in_flight is not None and self._in_flight.number == reply.job:
                self._in_flight.pending._write_again()
                self._changed.notify_all()

    def _ended(self, reply: Committed | Failed) -> None:
        flight = self._in_flight
        if flight is None or flight.number != reply.job:
            return
        seconds = time.perf_counter() - flight.began
        if isinstance(reply, Committed):
            self.view = reply.view
        elif isinstance(reply.error.__cause__, Busy):
            self.view = None  # the lock was lost: the folder must be opened again
        self._tell(flight.pending, reply, seconds)
        with self._lock:
            # In this order: who sees the handle of a failed save done must find the next save free to begin.
            if isinstance(reply, Failed):
                self._in_flight = None
                flight.pending._end(None, reply.error)
            else:
                flight.pending._end(reply.info, None)
            self._changed.notify_all()

    def _tell(self, pending: PendingSave, reply: Committed | Failed, seconds: float) -> None:
        with pending._in_listeners():
            try:
                self._on_end(pending, reply, seconds)
            except BaseException:  # a log handler's, say: whatever it is, the save has ended
                with contextlib.suppress(Exception):
                    traceback.print_exc()

    def _retired(self, reply: Retired) -> None:
        with self._lock:
            if self._in_flight is not None and self._in_flight.number == reply.job:
                self.view = reply.view
                self._in_flight = None
                self._changed.notify_all()

    def _stopped(self, error: BaseException | None) -> None:
        # The lock went with the writer, so the folder must be opened again before the next save.
        self.view = None
        # Before the save in flight is ended: after that the next one may be waiting for its own answer.
        if error is not None:
            self._answer(error)
        flight = self._in_flight
        if flight is not None and not flight.pending.done():
            self._ended(Failed(flight.number, error or WriterDied("the writer was stopped in the middle of a save")))
        elif flight is not None and error is not None:
            self._died_afterwards(flight, error)
        with self._lock:
            if self._in_flight is flight:  # not the next save's, which may have begun
                self._in_flight = None
                self._changed.notify_all()

    def _died_afterwards(self, flight: _InFlight, cause: BaseException) -> None:
        # The handle has said "durable", and that stays true: the death is told by one of its own.
        error = WriterDied(f"while older checkpoints were retired: {cause}. {flight.safe}")
        error.__cause__ = cause
        ghost = PendingSave(flight.pending.step, 0, announced=False)
        self._tell(ghost, Failed(flight.number, error), time.perf_counter() - flight.began)
        ghost._end(None, error)


def library_versions() -> dict[str, str]:
    """Versions of what had a part in the state, for people who look into a checkpoint later."""
    versions = {"python": platform.python_version(), "numpy": np.__version__}
    for name in ("midstride", "torch", "tensorflow", "keras"):
        version = getattr(sys.modules.get(name), "__version__", None)
        if version is not None:
            versions[name] = str(version)
    return versions
