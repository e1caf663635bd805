"""A thread of the library's own that does one task after the other."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable

from midstride.waiting import SupervisedThread


class Worker:
    """Runs tasks in order on one thread, started with the first. A daemon: a stuck disk must not keep the process."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._tasks: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def run(self, task: Callable[[], None]) -> Callable[[], None]:
        """Start a task; call what is returned to wait for its end and to get its error."""
        if self._thread is None:
            thread = SupervisedThread(self._work, self._name)
            thread.start()
            self._thread = thread
        done = threading.Event()
        errors: list[BaseException] = []

        def execute() -> None:
            try:
                task()
            except BaseException as error:
                errors.append(error)
            finally:
                done.set()

        def wait() -> None:
            done.wait()
            if errors:
                raise errors[0]

        self._tasks.put(execute)
        return wait

    def is_current(self) -> bool:
        """Whether the caller runs on this thread."""
        return threading.current_thread() is self._thread

    def _work(self) -> None:
        while (task := self._tasks.get()) is not None:
            task()
            del task  # what it holds, such as staged memory, may be replaced while we wait

    def stop(self, timeout: float | None = None) -> bool:
        """End the thread when its tasks are done; return whether it ended within ``timeout`` seconds."""
        thread, self._thread = self._thread, None
        if thread is not None:
            self._tasks.put(None)
            if thread is not threading.current_thread():
                thread.join(timeout)
        return thread is None or not thread.is_alive()
