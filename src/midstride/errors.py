"""Every error that Midstride raises on purpose.

    MidstrideError
    ├── SaveError                a checkpoint could not be made
    │   ├── StagingError         the state could not be copied out of the caller's memory
    │   ├── TornSnapshot         the copy was found not to be of one moment
    │   ├── WriteError           the bytes did not reach stable storage
    │   ├── CommitError          the bytes are stored, the checkpoint could not be published
    │   ├── WriterDied           the writer ended in the middle of a save
    │   ├── StepExists           this step is saved already, with other content
    │   └── ForeignRun           the folder holds checkpoints that this run neither made nor restored
    ├── RestoreError             a checkpoint could not be used
    │   ├── NothingRestorable    something was saved here, and none of it can be restored
    │   ├── CorruptCheckpoint    bytes are missing or differ from what was saved
    │   ├── StateMismatch        the checkpoint does not fit the state that it should fill
    │   ├── NotCommitted         no committed checkpoint has this step
    │   ├── NewerFormat          written by a newer Midstride
    │   └── Gone                 retired while it was being read
    ├── StorageError             the storage did not do what was asked
    │   ├── NotFound
    │   ├── NoSpace
    │   ├── PermissionDenied
    │   ├── Busy                 another run holds the folder
    │   └── Unavailable          anything else: an I/O error, a lost mount, a timeout
    ├── UnsupportedState         a value in the state cannot be saved; raised before anything is written
    └── CoordinationError        the processes of one job could not agree
        ├── PeerLost
        └── Deadline             a wait made no progress for longer than it may

A message says what happened and where, what is still safe, and what to do next.
Wrong arguments are ``TypeError`` and ``ValueError``, as everywhere in Python.
"""

from __future__ import annotations


class MidstrideError(Exception):
    """The root: ``except MidstrideError`` catches everything that Midstride raises on purpose."""


class SaveError(MidstrideError):
    """A checkpoint could not be made. Earlier checkpoints are untouched."""


class StagingError(SaveError):
    """The state could not be copied out of the caller's memory."""


class TornSnapshot(SaveError):
    """The copy was found not to be of one moment. It was dropped and never published."""


class WriteError(SaveError):
    """The bytes did not reach stable storage. Nothing was published."""


class CommitError(SaveError):
    """The bytes were stored, but the checkpoint could not be published."""


class WriterDied(SaveError):
    """The writer ended in the middle of a save. The next save gets a new one."""


class StepExists(SaveError):
    """This step is already saved in this run, with other content, and ``overwrite`` was not said."""


class ForeignRun(SaveError):
    """The folder holds checkpoints that this run neither made nor restored."""


class RestoreError(MidstrideError):
    """A checkpoint could not be used. Nothing on disk was changed."""


class NothingRestorable(RestoreError):
    """Something was saved here, and none of it can be restored. Not a reason to start at step 0."""


class CorruptCheckpoint(RestoreError):
    """Bytes are missing or differ from what was saved."""


class StateMismatch(RestoreError):
    """The checkpoint does not fit the state it should fill; the message lists every difference."""


class NotCommitted(RestoreError):
    """No committed checkpoint has the step that was asked for."""


class NewerFormat(RestoreError):
    """The checkpoint was written by a newer Midstride. Upgrade to read it."""


class Gone(RestoreError):
    """The checkpoint was retired while it was being read. List again and take another."""


class StorageError(MidstrideError):
    """The storage did not do what was asked."""


class NotFound(StorageError):
    """There is no such file or folder."""


class NoSpace(StorageError):
    """The disk or the quota is full."""


class PermissionDenied(StorageError):
    """The operating system refused access."""


class Busy(StorageError):
    """Another run holds the folder; the message says who."""

    left_at: str | None = None
    """Set where what holds it was left by a dead run, and will end; it changes while that makes progress."""


class Unavailable(StorageError):
    """The storage failed in some other way: an I/O error, a lost mount."""


class UnsupportedState(MidstrideError):
    """A value in the state cannot be saved. Raised by ``save()`` before anything is written."""


class CoordinationError(MidstrideError):
    """The processes of one job could not agree."""


class PeerLost(CoordinationError):
    """Another process of the job is gone."""


class Deadline(CoordinationError, TimeoutError):
    """A wait made no progress for longer than it may; the message says what it waited for."""
