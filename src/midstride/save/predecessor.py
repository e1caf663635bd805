"""The writer that a dead run left in the folder: it finishes what was staged, and is worth waiting for."""

from __future__ import annotations

import logging
import time

from midstride import limits

_log = logging.getLogger("midstride")

_BETWEEN_LOOKS_SECONDS = 0.2


class Patience:
    """Waits for a dead run's writer for as long as it moves, and says so once."""

    def __init__(self, description: str) -> None:
        """``description`` is the folder, for the message."""
        self._description = description
        self._left_at: str | None = None
        self._since = 0.0

    def wait(self, left_at: str) -> bool:
        """A moment. False, at once, when ``left_at`` has been the same for ``limits.LOCK_SECONDS``."""
        if self._left_at is None:
            _log.warning("the writer of a run that died still works in %s: waiting for it", self._description)
        if left_at != self._left_at:
            self._left_at, self._since = left_at, time.monotonic()
        elif time.monotonic() - self._since > limits.LOCK_SECONDS:
            return False
        time.sleep(_BETWEEN_LOOKS_SECONDS)
        return True
