"""Files of TensorFlow checkpoints: on which file systems, how much of them is there, and when they are durable."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Iterator
from datetime import UTC, datetime

import tensorflow as tf

from midstride.errors import Deadline
from midstride.info import CheckpointInfo
from midstride.storage.local import LocalStorage, sync_file
from midstride.tensorflow.folder import is_file_of, record_digests

_PASSING = (tf.errors.UnavailableError, tf.errors.AbortedError, tf.errors.DeadlineExceededError, tf.errors.UnknownError)


def is_local(path: str) -> bool:
    """Whether a path is in a file system of this machine, where files can be synced, and not ``gs://`` or the like."""
    return "://" not in path


def may_pass(error: BaseException) -> bool:
    """Whether an error of TensorFlow's writing may be over when it is tried again."""
    return isinstance(error, _PASSING)


def what_is_safe(folder: str) -> str:
    """After a write that failed: what became of the checkpoints before it, for the message."""
    with contextlib.suppress(tf.errors.OpError):
        if not tf.io.gfile.isdir(folder):
            return f"{folder} is gone: put it back where it was moved, or make it, and save again"
    return "Earlier ones are untouched"


def written_bytes(prefix: str) -> int:
    """Of the files of all checkpoints of this name, also of those in the making: it grows while TensorFlow writes."""
    total = 0
    folder, basename = os.path.split(prefix)
    for pattern in ("-*", "-*_temp/*"):
        for path in tf.io.gfile.glob(literal(os.path.join(folder, basename)) + pattern):
            with contextlib.suppress(tf.errors.OpError):  # gone meanwhile
                total += tf.io.gfile.stat(path).length
    return total


def literal(path: str) -> str:
    """A path in a pattern that matches nothing else."""
    return "".join(f"[{c}]" if c in "*?[" else f"\\{c}" if c == "\\" else c for c in path)


_writing: dict[str, threading.RLock] = {}


@contextlib.contextmanager
def sole_writer(folder: str, seconds: float = -1) -> Iterator[None]:
    """One at a time in a folder, of all hooks and managers of this process: their drafts have the same names.

    ``Deadline`` after so many seconds; less than none is for ever.
    """
    lock = _writing.setdefault(os.path.realpath(folder) if is_local(folder) else folder, threading.RLock())
    if not lock.acquire(timeout=seconds):
        raise Deadline(f"another saver has been writing into {folder} for {seconds:g} s. Look at the disk or the mount")
    try:
        yield
    finally:
        lock.release()


def make_folder(folder: str) -> None:
    """Make a folder and those above it, where they are missing, and their names durable."""
    if is_local(folder):
        LocalStorage(folder).make_root()
    else:
        tf.io.gfile.makedirs(folder)


def made_at(folder: str, prefix: str) -> float | None:
    """When a checkpoint was written, in seconds since the epoch; None if it is not there. The folder is local."""
    names = [entry.name for entry in LocalStorage(folder).list_folder("") if is_file_of(prefix, entry.name)]
    times = [os.stat(os.path.join(folder, name)).st_mtime for name in names if not name.endswith(".meta")]
    return max(times, default=None)


def make_durable(path: str, step: int) -> CheckpointInfo:
    """Return when the files of the checkpoint ``path`` are on stable storage, with their digests beside them.

    Nothing is done where the folder is not of this machine: what closes a file there makes it durable.
    """
    if not is_local(path):
        return without_digests(path, step)
    folder, prefix = os.path.split(os.path.abspath(path))
    storage = LocalStorage(folder)
    for entry in storage.list_folder(""):
        if is_file_of(prefix, entry.name):
            sync_file(os.path.join(folder, entry.name))
    info = record_digests(folder, prefix, step)
    # Before the state file names them: it could survive a crash that their names do not.
    storage.sync_folder("")
    return info


def without_digests(path: str, step: int) -> CheckpointInfo:
    """What can be told of a checkpoint that nobody looked at."""
    created = datetime.now(UTC).isoformat(timespec="microseconds")
    return CheckpointInfo(step, step, None, "", os.path.basename(path), created)
