"""What the trainer and the writer say to each other: small records of plain data.

They cross a queue today; nothing in them depends on sharing a process except ``Job.memory``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from midstride.info import CheckpointInfo
from midstride.retention import Retention
from midstride.save.plan import Chunk, FilePlan

# From the trainer to the writer.


@dataclass(frozen=True, slots=True)
class OpenRun:
    """Take the lock and look at the folder. Answered by ``Opened`` or ``Refused``."""

    number: int
    restored: CheckpointInfo | None
    adopt: bool
    """Whether the caller may write beside checkpoints that are here already."""


@dataclass(frozen=True, slots=True)
class Job:
    """Begin a save. Its chunks follow as ``Staged``, then ``Seal`` or ``Abort``."""

    number: int
    step: int
    files: tuple[FilePlan, ...]
    chunks: tuple[Chunk, ...]
    arrays: tuple[tuple[str, tuple[int, ...], str], ...]
    """dtype, shape and library of each array."""
    tree_json: str
    metrics: Mapping[str, Any]
    versions: Mapping[str, str]
    memory: np.ndarray
    """The arena's bytes."""
    retention: Retention | None
    compare_with: CheckpointInfo | None = None
    """Write nothing: only tell whether the content equals this checkpoint's."""
    replaces: CheckpointInfo | None = None
    """Retire this one, whatever the retention says, once the new one is committed."""
    bad: frozenset[int] = frozenset()
    """``seq`` of checkpoints that a restore found bad: they take no place in the retention, and stay."""

    @property
    def staged_whole(self) -> bool:
        """Whether every chunk keeps a place of its own in the arena until the save has ended."""
        return all(chunk.place + chunk.nbytes <= self.memory.size for chunk in self.chunks[-1:])


@dataclass(frozen=True, slots=True)
class Staged:
    """A chunk of the current job lies at ``place`` in the arena."""

    job: int
    chunk: int
    place: int


@dataclass(frozen=True, slots=True)
class Seal:
    """Every chunk of the job was staged, and the snapshot is whole: commit it."""

    job: int


@dataclass(frozen=True, slots=True)
class Abort:
    """The snapshot was given up while it was staged: drop it."""

    job: int


@dataclass(frozen=True, slots=True)
class Stop:
    """Release the lock and end."""


Request = OpenRun | Job | Staged | Seal | Abort | Stop


# From the writer to the trainer.


@dataclass(frozen=True, slots=True)
class RunView:
    """The run as the writer last saw it."""

    run: str
    head: int | None
    """``seq`` of the checkpoint that the next one grows from."""
    line: frozenset[int]
    """``seq`` of those that it grew from, itself included, as far as is known."""
    checkpoints: tuple[CheckpointInfo, ...]


@dataclass(frozen=True, slots=True)
class Opened:
    number: int
    view: RunView


@dataclass(frozen=True, slots=True)
class Refused:
    number: int
    error: BaseException


@dataclass(frozen=True, slots=True)
class Emptied:
    """A chunk is written and digested: its place in the arena may be used again."""

    job: int
    place: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class Working:
    """Something that moves no bytes was done: a file was synced, the manifest published, a checkpoint deleted."""

    job: int


@dataclass(frozen=True, slots=True)
class Retrying:
    """An attempt failed, and the snapshot that is still staged will be written again."""

    job: int
    error: BaseException


@dataclass(frozen=True, slots=True)
class Committed:
    """The checkpoint exists and is durable. ``Retired`` follows."""

    job: int
    info: CheckpointInfo
    view: RunView
    fresh: bool
    """False where an equal checkpoint was there already and nothing was written."""


@dataclass(frozen=True, slots=True)
class Retired:
    """What the retention gives up is deleted, as far as it could be: the save has ended."""

    job: int
    view: RunView


@dataclass(frozen=True, slots=True)
class Failed:
    """The save failed or was given up; nothing was published."""

    job: int
    error: BaseException


@dataclass(frozen=True, slots=True)
class Stopped:
    """The writer ended. ``error`` is set if it did not mean to."""

    error: BaseException | None


Reply = Opened | Refused | Emptied | Working | Retrying | Committed | Retired | Failed | Stopped
