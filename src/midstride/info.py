"""What the library tells about a checkpoint and about a save in flight: plain frozen records."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class CheckpointInfo:
    """One committed checkpoint, as its manifest tells it."""

    step: int
    """The training step that the caller named."""
    seq: int
    """Place in the order of commits in this folder: 1 is the first; the highest is the latest."""
    parent: int | None
    """``seq`` of the checkpoint this one grew from; None for the first of a run."""
    run: str
    """Id of the run that made it."""
    name: str
    """Its folder, relative to the run's folder."""
    created: str
    """UTC time of publication, ISO 8601. For people: nothing is ordered by it."""
    metrics: Mapping[str, float | int | None] = field(default_factory=dict)
    nbytes: int = 0
    """Bytes of its data files together."""


@dataclass(frozen=True, slots=True)
class Progress:
    """How far a save is. ``phase`` is one of "staging", "writing", "committed", "failed"."""

    phase: str
    staged_bytes: int
    written_bytes: int
    total_bytes: int

    @property
    def fraction(self) -> float:
        """Written part, 0.0 to 1.0; 1.0 only once the checkpoint is committed."""
        if self.phase == "committed":
            return 1.0
        return min(0.999, self.written_bytes / self.total_bytes) if self.total_bytes else 0.0
