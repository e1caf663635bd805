"""Failed saves that nobody was told of yet: each is raised once, to whoever asks first."""

from __future__ import annotations

import threading
from collections.abc import Callable

from midstride.save.pending import PendingSave

_KEPT = 8
"""Untold failures kept besides the last one: a disk that is gone for good must not fill the memory."""


class Failures:
    """Added to on the writer's thread, raised on the training thread."""

    def __init__(self, in_a_row: Callable[[], int]) -> None:
        """``in_a_row``: how many saves have failed since the last one that did not."""
        self._in_a_row = in_a_row
        self._untold: list[PendingSave] = []
        self._lock = threading.Lock()

    def add(self, pending: PendingSave) -> None:
        """A save that has failed, or is about to say so."""
        with self._lock:
            self._untold[_KEPT:] = [pending]

    def clear(self) -> None:
        """They were tolerated, and it is over."""
        with self._lock:
            self._untold.clear()

    def surface(self, tolerated: int, besides: PendingSave | None = None) -> None:
        """Raise the first failure that nobody was told of, if more than ``tolerated`` came in a row.

        ``besides``: the save that the caller is about to get the handle of, which tells for itself.
        """
        with self._lock:
            self._untold = [pending for pending in self._untold if not pending._reported]
            waiting = [pending for pending in self._untold if pending.done() and pending is not besides]
            if not waiting or 0 < self._in_a_row() <= tolerated:
                return
            self._untold = [pending for pending in self._untold if pending not in waiting]
        for pending in waiting:
            pending._reported = True
        error = waiting[0]._error
        assert error is not None
        if len(waiting) > 1:
            error.add_note(f"{len(waiting) - 1} more saves failed after this one, the last of step {waiting[-1].step}")
        raise error
