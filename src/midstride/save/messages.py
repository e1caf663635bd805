"""What the trainer and the writer say to each other: small records of plain data.

They cross a queue, or a socket to another process, where ``Job.plan`` and ``Job.memory`` go once each
and are then known.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from midstride.info import CheckpointInfo
from midstride.retention import Retention
from midstride.save.plan import Plan
from midstride.storage.base import Storage


class Memory(Protocol):
    """The staging memory."""

    bytes: np.ndarray
    descriptor: int | None
    """By which another process can map it."""


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
    plan: Plan
    tree_json: str
    metrics: Mapping[str, Any]
    versions: Mapping[str, str]
    memory: Memory
    retention: Retention | None
    newest: int = 0
    """``seq`` of the newest checkpoint when the job was made. A later one of the same step was published by a
    writer that died before it could say so."""
    compare_with: CheckpointInfo | None = None
    """Write nothing: only tell whether the content equals this checkpoint's."""
    adopts: bool = False
    """Whether the comparison is the writer's own, with what a writer before it published for this job."""
    replaces: CheckpointInfo | None = None
    """Retire this one, whatever the retention says, once the new one is committed."""
    bad: frozenset[int] = frozenset()
    """``seq`` of checkpoints that a restore found bad: they take no place in the retention, and stay."""

    @property
    def staged_whole(self) -> bool:
        """Whether every chunk keeps a place of its own in the arena until the save has ended."""
        return self.plan.arena_bytes <= self.memory.bytes.size


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


# To a writer process, besides.


@dataclass(frozen=True, slots=True)
class Begin:
    """The first of all: what to write to, and for whom."""

    storage: Storage
    owner: str
    trainer: int
    """Its process id."""
    limits: dict[str, object]


@dataclass(frozen=True, slots=True)
class NewPlan:
    """The plan of the jobs that follow, which come without."""

    plan: Plan


@dataclass(frozen=True, slots=True)
class NewMemory:
    """The staging memory of the jobs that follow, by the descriptor that comes with this."""

    nbytes: int


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
    """0 while the folder is opened."""


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
class Logged:
    """A line for the trainer's log."""

    level: int
    text: str


@dataclass(frozen=True, slots=True)
class Alive:
    """The writer process runs, whatever its disk does."""


# From what watches the writer.


@dataclass(frozen=True, slots=True)
class Restarted:
    """The writer died, and another one does the job from the beginning. 0: there was none to do."""

    job: int


@dataclass(frozen=True, slots=True)
class Stopped:
    """The writer ended. ``error`` is set if something is lost by that."""

    error: BaseException | None


Reply = (
    Opened
    | Refused
    | Emptied
    | Working
    | Retrying
    | Committed
    | Retired
    | Failed
    | Logged
    | Alive
    | Restarted
    | Stopped
)
