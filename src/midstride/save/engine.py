"""Starts, watches and restarts the writer. Here it is a thread of the trainer's process."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable

from midstride.errors import WriterDied
from midstride.save.messages import Reply, Request, Stop, Stopped
from midstride.save.pending import WRITER_THREAD
from midstride.save.writer import Writer
from midstride.storage.base import Storage


class ThreadEngine:
    """Runs the writer's loop on a daemon thread: a stuck disk must not keep the process for ever.

    Replies come on that thread.
    """

    def __init__(self, storage: Storage, owner: str, on_reply: Callable[[Reply], None]) -> None:
        self._storage = storage
        self._owner = owner
        self._on_reply = on_reply
        self._requests: queue.SimpleQueue[Request] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._serving = False

    @property
    def alive(self) -> bool:
        """Whether a writer is there to take requests."""
        return self._serving and self._thread is not None and self._thread.is_alive()

    def on_writer_thread(self) -> bool:
        """Whether the caller is the writer, who must not wait for itself."""
        return threading.current_thread() is self._thread

    def start(self) -> None:
        """Start a writer if none is alive."""
        if not self.alive:
            self._requests = queue.SimpleQueue()
            self._serving = True
            self._thread = threading.Thread(target=self._serve, args=(self._requests,), name=WRITER_THREAD, daemon=True)
            self._thread.start()

    def send(self, request: Request) -> None:
        """Give the writer something to do. Never blocks."""
        self._requests.put(request)

    def stop(self, timeout: float) -> bool:
        """Ask the writer to end; return whether it did within ``timeout`` seconds."""
        if self._thread is None:
            return True
        self._requests.put(Stop())
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
        self._serving = False
        self._on_reply(Stopped(error))
