"""Where the writer runs: on a thread of the trainer's process, or in a process of its own."""

from __future__ import annotations

import os
import queue
import sys
import threading
from collections.abc import Callable
from typing import Literal, Protocol

from midstride.errors import WriterDied
from midstride.retention import Retention, UnionOf
from midstride.save.messages import Failed, Job, Reply, Request, Stop, Stopped
from midstride.save.pending import WRITER_THREAD
from midstride.save.process_engine import ProcessEngine
from midstride.save.writer import Writer
from midstride.storage.base import Storage


class Engine(Protocol):
    """Runs the writer's loop. Replies come on a thread of its own, which is named like a writer."""

    name: str

    def start(self) -> None:
        """Start a writer if none is there."""
        ...

    def send(self, request: Request) -> None:
        """Give the writer something to do. Never blocks."""
        ...

    def hand_over(self) -> None:
        """Return when what was sent is the writer's: where it has a process of its own, it outlives this one."""
        ...

    def stop(self, timeout: float) -> bool:
        """Ask the writer to end; return whether it did within ``timeout`` seconds."""
        ...

    def on_writer_thread(self) -> bool:
        """Whether the caller is the thread on which replies come, which must not wait for them."""
        ...


def make_engine(
    wanted: Literal["process", "thread"] | None,
    storage: Storage,
    owner: str,
    retention: Retention | None,
    on_reply: Callable[[Reply], None],
) -> Engine:
    """The engine that the caller named; by default a process, where one can do the work.

    Raises ``ValueError`` where a process was asked for and cannot do it.
    """
    if wanted != "thread":
        obstacle = _no_process_here() or _not_for_a_process(storage, retention)
        if obstacle is None and (wanted == "process" or not _interactive()):
            return ProcessEngine(storage, owner, on_reply)
        if wanted == "process":
            raise ValueError(f"engine='process': {obstacle}. Leave engine out, or pass engine='thread'")
    return ThreadEngine(storage, owner, on_reply)


def _no_process_here() -> str | None:
    if not (hasattr(os, "pidfd_open") and hasattr(os, "memfd_create")):
        return "a writer process needs Linux"
    if getattr(sys, "frozen", False) or not sys.executable:
        return "this program has no Python interpreter that could run a writer"
    return None


def _not_for_a_process(storage: Storage, retention: Retention | None) -> str | None:
    if not vars(type(storage)).get("shared", False):  # not inherited: a subclass may be code of the script's own
        return (
            f"another process cannot open this storage ({type(storage).__name__}); "
            "one that can be pickled, and is the same storage then, says so by an attribute shared = True"
        )
    rules = retention.rules if isinstance(retention, UnionOf) else (retention,)
    for rule in rules:
        if rule is not None and type(rule).__module__ != Retention.__module__:
            # Its module may be the training script itself, with a framework and all that it does.
            return f"the rule {type(rule).__name__} in keep= is your own code, which the writer does not load"
    return None


def _interactive() -> bool:
    """A notebook or a prompt, whose restarts leave processes behind that nobody looks for."""
    return hasattr(sys, "ps1") or bool(sys.flags.interactive) or "ipykernel" in sys.modules


class ThreadEngine:
    """Runs the writer's loop on a daemon thread: a stuck disk must not keep the process for ever.

    Replies come on that thread.
    """

    name = "thread"

    def __init__(self, storage: Storage, owner: str, on_reply: Callable[[Reply], None]) -> None:
        self._storage = storage
        self._owner = owner
        self._on_reply = on_reply
        self._requests: queue.SimpleQueue[Request] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._serving = False
        self._lock = threading.Lock()

    def on_writer_thread(self) -> bool:
        return threading.current_thread() is self._thread

    def start(self) -> None:
        if not (self._serving and self._thread is not None and self._thread.is_alive()):
            self._requests = queue.SimpleQueue()
            self._thread = threading.Thread(target=self._serve, args=(self._requests,), name=WRITER_THREAD, daemon=True)
            self._serving = True
            self._thread.start()

    def send(self, request: Request) -> None:
        with self._lock:
            if self._serving:
                self._requests.put(request)
                return
        if isinstance(request, Job):
            self._on_reply(Failed(request.number, WriterDied("the writer thread ended. The next save gets a new one")))

    def hand_over(self) -> None:
        """Nothing to wait for: nothing of it outlives this process."""

    def stop(self, timeout: float) -> bool:
        if self._thread is None:
            return True
        self.send(Stop())
        if not self.on_writer_thread():
            self._thread.join(timeout)
        return not self._thread.is_alive()

    def _serve(self, requests: queue.SimpleQueue[Request]) -> None:
        error: BaseException | None = None
        try:
            Writer(self._storage, self._owner, requests.get, self._on_reply).run()
        except BaseException as unexpected:  # SystemExit too: nobody else would hear of it
            error = WriterDied(f"the writer thread ended with {unexpected!r}. The next save gets a new one")
            error.__cause__ = unexpected
        # Before anybody is told: the next save, which may come at once, must not count on this thread.
        with self._lock:
            self._serving = False
        self._on_reply(Stopped(error))
