"""Durations and counters of a run's saves."""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass, replace


@dataclass(frozen=True, slots=True)
class Statistics:
    """What saving has done and cost since the ``Checkpointer`` was made."""

    saves_begun: int = 0
    saves_committed: int = 0
    saves_failed: int = 0
    saves_retried: int = 0
    """Attempts that were given up because the storage was unavailable, and made again from the staged snapshot."""
    writer_restarts: int = 0
    """Writer processes that died, in the middle of a save or idle; another one took their place and lost nothing."""
    saves_unchanged: int = 0
    """Saves of a step that was saved already with equal content: nothing was written."""
    saves_skipped: int = 0
    """Calls of ``step()`` at which a save was due and put off because one was in flight."""
    failures_in_a_row: int = 0
    listener_failures: int = 0
    stall_seconds: float = 0.0
    """Time that the training thread spent inside saves, all together."""
    last_stall_seconds: float | None = None
    staging_wait_seconds: float = 0.0
    """Part of the stall spent waiting for the writer to empty staging memory: the budget is too small."""
    last_durable_seconds: float | None = None
    """From the call of the last committed save until it was durable."""
    bytes_committed: int = 0
    staging_bytes: int = 0
    """Staging memory held now."""
    last_commit_age_seconds: float | None = None
    """Since the last commit of this process; None before the first."""
    last_error: str | None = None
    engine: str | None = None
    """Where the writer runs: "process" or "thread"; None before the first save."""
    snapshot: str = "copy"
    """How state is captured."""


class Recorder:
    """Adds up, from any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._now = Statistics()
        self._committed_at: float | None = None

    def add(self, **amounts: float) -> None:
        """Add to counters and durations by name."""
        with self._lock:
            sums = {name: getattr(self._now, name) + amount for name, amount in amounts.items()}
            self._now = replace(self._now, **sums)

    def set(self, **values: object) -> None:
        """Set fields by name."""
        with self._lock:
            self._now = replace(self._now, **values)  # type: ignore[arg-type]

    def committed(self, nbytes: int, durable_seconds: float) -> None:
        """One more checkpoint is durable."""
        self._committed_at = time.monotonic()
        self.add(saves_committed=1, bytes_committed=nbytes)
        self.set(failures_in_a_row=0, last_durable_seconds=durable_seconds)

    def failed(self, error: BaseException) -> None:
        """One more save failed."""
        self.add(saves_failed=1, failures_in_a_row=1)
        self.set(last_error=str(error))

    def read(self) -> Statistics:
        """All figures at this moment."""
        # Without the lock: a signal handler may ask in the middle of add(), a forked child when nobody is left
        # to give it back.
        now, committed_at = self._now, self._committed_at
        if committed_at is None:
            return now
        return replace(now, last_commit_age_seconds=time.monotonic() - committed_at)
