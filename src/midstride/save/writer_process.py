"""The writer process: the writer's loop at the other end of a socket. No framework is loaded here.

It outlives its trainer by as long as it takes to finish a snapshot that was staged whole: sealed,
it is committed, else dropped.
"""

from __future__ import annotations

import contextlib
import logging
import mmap
import os
import select
import signal
import socket
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import replace

import numpy as np

from midstride import limits
from midstride.format import layout
from midstride.save.channel import Channel
from midstride.save.messages import (
    Alive,
    Begin,
    Job,
    Logged,
    NewMemory,
    NewPlan,
    Reply,
    Request,
    Stop,
)
from midstride.save.plan import Plan
from midstride.save.writer import Writer

_log = logging.getLogger("midstride")

_BEAT_SECONDS = 1.0
_LOG_LIMIT_BYTES = 256 * 1024


def main(descriptor: int) -> None:
    """Serve the trainer at the other end of the socket ``descriptor`` until it says so, or is dead."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # meant for the trainer, which tells us when to end
    trainer = _Trainer(socket.socket(fileno=descriptor))
    begin = trainer.first()
    if begin is None:
        return
    limits.set_to(begin.limits)
    root = getattr(begin.storage, "root", None)
    if root is not None:
        trainer.on_sign = lambda: _touch(os.path.join(root, layout.LOCK))
    _log.addHandler(_Log(trainer, root))
    _log.setLevel(logging.INFO)
    threading.Thread(target=trainer.show_life, name="midstride-life", daemon=True).start()
    try:
        Writer(begin.storage, begin.owner, trainer.receive, trainer.send).run()
    except BaseException:
        _log.exception("the writer process ends")
        raise


def _touch(path: str) -> None:
    """Show the run that waits for the lock that the work goes on."""
    with contextlib.suppress(OSError):
        os.utime(path)


class _SharedMemory:
    """The trainer's staging memory, seen from here."""

    descriptor: int | None = None

    def __init__(self, descriptor: int, nbytes: int) -> None:
        try:
            self.bytes = np.frombuffer(mmap.mmap(descriptor, nbytes), np.uint8)
        finally:
            os.close(descriptor)


class _Trainer:
    """The process that this one writes for."""

    def __init__(self, end: socket.socket) -> None:
        self._channel = Channel(end)
        self._sending = threading.Lock()
        self._parent = os.getppid()
        self._ended: int | None = None
        self._requests: deque[Request] = deque()
        self._plan: Plan | None = None
        self._memory: _SharedMemory | None = None
        self._signs = 0
        self.is_dead = False
        self.on_sign: Callable[[], None] = lambda: None
        """Called with each reply that the trainer does not hear any more."""

    def first(self) -> Begin | None:
        """What we are to do; None where the trainer died before it could say."""
        while True:
            _poll({self._channel.fileno(): select.POLLIN}, _BEAT_SECONDS)
            for message in self._channel.take():
                assert isinstance(message, Begin)
                self._watch(message.trainer)
                return message
            if self._channel.ended or os.getppid() != self._parent:
                return None

    def _watch(self, pid: int) -> None:
        # The end of the socket tells nothing where a forked child of the trainer holds it open.
        with contextlib.suppress(OSError):
            self._ended = os.pidfd_open(pid)
        self.is_dead = os.getppid() != pid  # before, and the descriptor may be of another process

    def receive(self) -> Request:
        """The next request; ``Stop`` once the trainer is dead and all that it said is done."""
        while not self._requests:
            dead = self._look(select.POLLIN, _BEAT_SECONDS)
            self._take()
            if not self._requests and (dead or self._channel.ended):
                return Stop()
        return self._requests.popleft()

    def _look(self, events: int = 0, seconds: float = 0.0) -> bool:
        """Whether the trainer is dead; wait for that, or for ``events`` of the socket, for ``seconds`` at most."""
        if not self.is_dead:
            watched = {self._channel.fileno(): events} if events else {}
            if self._ended is not None:
                watched[self._ended] = select.POLLIN
            ready = _poll(watched, seconds)
            self.is_dead = self._ended in ready if self._ended is not None else os.getppid() != self._parent
        return self.is_dead

    def _take(self) -> None:
        for message in self._channel.take():
            match message:
                case NewPlan(plan):
                    self._plan = plan
                case NewMemory(nbytes):
                    self._memory = _SharedMemory(self._channel.take_descriptor(), nbytes)
                case Job():
                    assert self._plan is not None
                    assert self._memory is not None
                    self._requests.append(replace(message, plan=self._plan, memory=self._memory))
                case _:
                    self._requests.append(message)

    def send(self, reply: Reply) -> None:
        """Tell the trainer; nobody, once it is dead."""
        moves = not isinstance(reply, Alive | Logged)
        self._signs += moves
        with self._sending:
            if self.is_dead:
                if moves:
                    self.on_sign()
                return
            self._channel.put(reply)
            self._channel.flush()
            while self._channel.has_unsent and not self._look(select.POLLOUT, _BEAT_SECONDS):
                self._channel.flush()

    def show_life(self) -> None:
        """Say that we are here, whatever the disk does; once the trainer is dead, end where nothing moves."""
        signs, since = self._signs, time.monotonic()
        while True:
            time.sleep(_BEAT_SECONDS)
            if self._signs != signs or not self._look():
                signs, since = self._signs, time.monotonic()
            elif time.monotonic() - since > limits.STORAGE_SECONDS:
                _log.error("the trainer is dead and the storage makes no progress: the save is given up")
                os._exit(1)
            self.send(Alive())


def _poll(events: dict[int, int], seconds: float) -> set[int]:
    poll = select.poll()
    for descriptor, wanted in events.items():
        poll.register(descriptor, wanted)
    return {descriptor for descriptor, _ in poll.poll(seconds * 1000)}


class _Log(logging.Handler):
    """Lines go to the trainer's log; once it is dead, to a file in the run's folder, which stays small."""

    def __init__(self, trainer: _Trainer, root: str | None) -> None:
        super().__init__()
        self._trainer = trainer
        self._path = os.path.join(root, layout.WRITER_LOG) if root is not None else None
        self.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))

    def emit(self, record: logging.LogRecord) -> None:
        if not self._trainer.is_dead:
            text = record.getMessage()
            if record.exc_info:
                text += "\n" + logging.Formatter().formatException(record.exc_info)
            self._trainer.send(Logged(record.levelno, text))
        elif self._path is not None:
            with contextlib.suppress(OSError), open(self._path, "a", encoding="utf-8", errors="replace") as file:
                if file.tell() > _LOG_LIMIT_BYTES:
                    file.truncate(0)
                file.write(self.format(record) + "\n")
