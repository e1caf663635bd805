"""The writer in a process of its own: started, watched, and started again when it dies.

One thread of the trainer's process speaks with it. Requests are kept until they are answered, so a
writer that dies costs nothing but time: the next one gets the same requests, and the snapshot
still lies in the staging memory. Where that memory is smaller than the state, that save is lost.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import cast

from midstride import limits
from midstride.errors import WriterDied
from midstride.forks import let_go_in_children
from midstride.save.channel import Channel
from midstride.save.messages import (
    Abort,
    Alive,
    Begin,
    Committed,
    Failed,
    Job,
    Logged,
    Memory,
    NewMemory,
    NewPlan,
    Opened,
    OpenRun,
    Refused,
    Reply,
    Request,
    Restarted,
    Retired,
    Seal,
    Staged,
    Stop,
    Stopped,
)
from midstride.save.pending import WRITER_THREAD
from midstride.save.plan import Plan
from midstride.storage.base import Storage
from midstride.waiting import wait_for

_log = logging.getLogger("midstride")

_RESTARTS = 2
"""Of the writer in one save, before that save is given up."""
_LOOK_SECONDS = 1.0


class ProcessEngine:
    """Runs the writer's loop in a process of its own. Replies come on the thread that watches it."""

    name = "process"

    def __init__(self, storage: Storage, owner: str, on_reply: Callable[[Reply], None]) -> None:
        self._storage = storage
        self._owner = owner
        self._on_reply = on_reply
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        self._requests: list[Request] = []
        """What is not answered yet, in order."""
        self._given = 0
        """How many of these the present writer has been given."""
        self._restarts = 0
        self._stopping = False
        self._run: OpenRun | None = None
        """How another writer opens the run where this one is; None before it is open."""
        self._refusal: BaseException | None = None
        """Why the run could not be opened again by another writer."""
        self._committed = False
        """Whether the job in ``_requests`` has been committed: what is left of it is the retirement."""
        self._writer: _Process | None = None
        self._thread: threading.Thread | None = None
        let_go_in_children(self)

    def on_writer_thread(self) -> bool:
        return threading.current_thread() is self._thread

    @property
    def pid(self) -> int | None:
        """The writer's process id."""
        return self._writer.pid if self._writer is not None else None

    def start(self) -> None:
        """Start a writer if none is there. ``WriterDied`` where the system gives no process or thread."""
        if self._writer is not None:
            return
        self._requests, self._given, self._restarts = [], 0, 0
        self._stopping, self._run, self._refusal, self._committed = False, None, None, False
        try:
            self._writer = _Process(self._storage, self._owner)
            self._thread = threading.Thread(target=self._watch, name=WRITER_THREAD, daemon=True)
            self._thread.start()
        except (OSError, RuntimeError) as error:
            if self._writer is not None:
                self._writer.close()
            self._writer = self._thread = None
            raise WriterDied(f"the writer process could not be started: {error}. Nothing was written") from error

    def send(self, request: Request) -> None:
        with self._lock:
            if self._writer is not None:
                if isinstance(request, Job):
                    self._committed, self._restarts = False, 0
                self._requests.append(request)
                self._writer.wake()
                return
        if isinstance(request, Job):
            self._on_reply(Failed(request.number, WriterDied("the writer process ended. The next save gets a new one")))

    def hand_over(self) -> None:
        with self._lock:
            wait_for(
                self._changed,
                lambda: self._writer is None or (self._given >= len(self._requests) and not self._writer.has_unsent),
                what=lambda: "the writer process to take the snapshot",
                progress=lambda: (self._given, self._restarts),
                stall_seconds=limits.STORAGE_SECONDS,
            )

    def stop(self, timeout: float) -> bool:
        thread = self._thread
        if thread is None:
            return True
        with self._lock:
            self._stopping = True
            self.send(Stop())
        if not self.on_writer_thread():
            thread.join(timeout)
        return not thread.is_alive()

    def leave_to_parent(self) -> None:
        """In a forked child: the writer is the parent's."""
        if self._writer is not None:
            self._writer.close()
        self._writer = self._thread = None

    # On the thread that watches.

    def _watch(self) -> None:
        error: BaseException | None
        try:
            error = self._serve()
        except BaseException as unexpected:  # nobody else would hear of it
            error = WriterDied(f"the watch over the writer ended with {unexpected!r}. The next save gets a new one")
            error.__cause__ = unexpected
        with self._lock:
            # Before anybody is told: the next save, which may come at once, starts another.
            writer, self._writer = self._writer, None
            nothing_lost = self._committed or all(isinstance(request, Stop) for request in self._requests)
            self._changed.notify_all()
        if nothing_lost and not self._stopping:
            _log.warning("%s. No checkpoint is lost by that; the next save starts another writer", error)
        self._on_reply(Stopped(None if nothing_lost else error))
        if writer is not None:
            writer.close()
            writer.reap()

    def _serve(self) -> BaseException:
        """Until the writer has ended for good; return why."""
        while True:
            writer = self._writer
            assert writer is not None
            self._give(writer)
            writer.wait_for_news()
            is_alive = writer.is_alive()  # before the last look at what it said
            for reply in writer.replies():
                self._answered(reply)
            if self._refusal is not None:
                return self._refusal
            if not is_alive:
                death = WriterDied(f"the writer process {writer.pid} ended {writer.how_it_ended()}")
                if not self._is_replaced(writer, death):
                    return death
            elif writer.is_silent():
                _log.warning("the writer process %d gives no sign of life, and is killed", writer.pid)
                if not writer.kill():
                    return WriterDied(
                        f"the writer process {writer.pid} gives no sign of life and cannot be ended; the folder stays "
                        "locked while it is there. Look at the disk or the mount"
                    )

    def _give(self, writer: _Process) -> None:
        with self._lock:
            requests = self._requests[self._given :]
        for request in requests:
            writer.send(request)
        writer.flush()
        with self._lock:
            # Only now: who waits in hand_over() relies on it.
            self._given += len(requests)
            self._changed.notify_all()

    def _answered(self, reply: Reply) -> None:
        match reply:
            case Alive():
                return
            case Logged(level, text):
                _log.log(level, "%s", text)
                return
            case Opened(0):
                return  # ours, by which the run was opened again
            case Refused(0, error):
                self._refusal = error
                return
            case Opened(number) | Refused(number):
                opening = next((r for r in self._requests if isinstance(r, OpenRun) and r.number == number), None)
                if opening is not None and isinstance(reply, Opened):
                    self._run = replace(opening, number=0, adopt=True)
                self._forget(lambda request: request is not opening)
            case Committed(info=info):
                if self._run is not None:
                    self._run = replace(self._run, restored=info)
                if self._committed:
                    return  # told already by a writer that died in the retirement
                self._committed = True
            case Retired(job) | Failed(job):
                self._forget(lambda request: isinstance(request, OpenRun | Stop) or _job_of(request) != job)
        self._on_reply(reply)

    def _forget(self, stays: Callable[[Request], bool]) -> None:
        with self._lock:
            self._given -= sum(not stays(request) for request in self._requests[: self._given])
            self._requests = [request for request in self._requests if stays(request)]

    def _is_replaced(self, writer: _Process, death: WriterDied) -> bool:
        """Start another writer, which opens the run again and gets all that is not answered, where that can be done."""
        job = next((request for request in self._requests if isinstance(request, Job)), None)
        ends = self._stopping and all(isinstance(request, Stop) for request in self._requests)
        if ends or self._restarts >= _RESTARTS or (job is not None and not job.staged_whole):
            return False
        self._restarts += 1
        try:
            another = _Process(self._storage, self._owner)
        except OSError as failure:
            death.__cause__ = failure
            return False
        _log.warning("%s. Another one takes its place", death)
        if self._run is not None:
            another.send(self._run)
        with self._lock:
            self._writer, self._given = another, 0
        writer.close()
        self._on_reply(Restarted(job.number if job is not None else 0))
        return True


def _job_of(request: Job | Staged | Seal | Abort) -> int:
    return request.number if isinstance(request, Job) else request.job


class _Process:
    """One writer process, as the trainer sees it."""

    def __init__(self, storage: Storage, owner: str) -> None:
        ours, theirs = socket.socketpair()
        with theirs:
            try:
                self._process = _spawn(theirs.fileno(), storage.description)
            except BaseException:
                ours.close()
                raise
        self._channel = Channel(ours)
        self._ended = os.pidfd_open(self._process.pid)
        self._news = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._poll = select.poll()
        self._poll.register(self._ended, select.POLLIN)
        self._poll.register(self._news, select.POLLIN)
        self._plan: Plan | None = None
        self._memory: Memory | None = None
        self._looked = time.monotonic()
        self._silent_seconds = 0.0
        self.pid = self._process.pid
        self._channel.put(Begin(storage, owner, os.getpid(), limits.as_they_are()))

    @property
    def has_unsent(self) -> bool:
        return self._channel.has_unsent

    def wake(self) -> None:
        """End ``wait_for_news``, from any thread."""
        with contextlib.suppress(OSError):  # closed meanwhile
            os.eventfd_write(self._news, 1)

    def send(self, request: Request) -> None:
        if isinstance(request, Job):
            if request.plan is not self._plan:
                self._plan = request.plan
                self._channel.put(NewPlan(request.plan))
            if request.memory is not self._memory:
                assert request.memory.descriptor is not None
                self._memory = request.memory
                self._channel.put(NewMemory(request.memory.bytes.size), [request.memory.descriptor])
            request = replace(request, plan=cast(Plan, None), memory=cast(Memory, None))  # both are known there
        self._channel.put(request)

    def flush(self) -> None:
        self._channel.flush()

    def wait_for_news(self) -> None:
        """Until there is a reply, room for a request, a call of ``wake()`` or the end; for a second at most."""
        ends = 0 if self._channel.ended else select.POLLIN
        self._poll.register(self._channel, ends | (select.POLLOUT if self._channel.has_unsent else 0))
        self._poll.poll(_LOOK_SECONDS * 1000)
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self._news)

    def replies(self) -> list[Reply]:
        found = list(self._channel.take())
        if found:
            self._silent_seconds = 0.0
        return found

    def is_alive(self) -> bool:
        return self._process.poll() is None

    def is_silent(self) -> bool:
        """Whether it has said nothing for ``limits.WRITER_SECONDS``."""
        now = time.monotonic()
        # More than two looks take: we were stopped ourselves, and it perhaps with us.
        self._silent_seconds += min(now - self._looked, 2 * _LOOK_SECONDS)
        self._looked = now
        return self._silent_seconds >= limits.WRITER_SECONDS

    def kill(self) -> bool:
        """Whether it ended: one that waits for a dead disk does not."""
        self._process.send_signal(signal.SIGKILL)
        self.reap()
        return not self.is_alive()

    def reap(self) -> None:
        """Wait for its end, so that it does not stay as a zombie."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(limits.WRITER_SECONDS)

    def how_it_ended(self) -> str:
        code = self._process.returncode
        if code is not None and code < 0:
            return f"by signal {-code} ({signal.strsignal(-code)})"
        return f"with exit code {code}"

    def close(self) -> None:
        """Let go of it; it ends by itself when what it has been given is done."""
        self._channel.close()
        for descriptor in (self._ended, self._news):
            with contextlib.suppress(OSError):
                os.close(descriptor)


_BOOT = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[3]); "
    "from midstride.save.writer_process import main; main(int(sys.argv[4]))"
)


def _spawn(end: int, description: str) -> subprocess.Popen[bytes]:
    # The script's own folder comes last: a file in it that is named like a module of Python's must not be taken for it.
    first, *others = [os.path.abspath(path) for path in sys.path] or [""]
    paths = [*others, first, str(Path(__file__).parents[2])]
    return subprocess.Popen(
        [sys.executable, "-I", "-S", "-c", _BOOT, "midstride-writer", description, json.dumps(paths), str(end)],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,  # `train | tee` waits for whoever holds the pipe
        stderr=subprocess.DEVNULL,
        pass_fds=(end,),
        start_new_session=True,  # Ctrl-C is the trainer's business
        cwd="/",
        env={**os.environ, "OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"},  # it computes nothing with them
    )
