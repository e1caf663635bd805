"""The state file of a folder of checkpoints, ``checkpoint``: what names the newest one, and how it is moved on.

TensorFlow's Saver and its CheckpointManager write it, and delete old checkpoints, without a sync in between. Here each
is durable before the next.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any

import tensorflow as tf
from tensorflow.python.checkpoint import checkpoint_management

from midstride.errors import NotFound
from midstride.info import CheckpointInfo
from midstride.storage.local import LocalStorage, sync_file
from midstride.tensorflow.folder import STATE_FILE, is_file_of, record_digests, sweep_digests

_DRAFT = f"{STATE_FILE}.midstride-draft"
_PASSING = (tf.errors.UnavailableError, tf.errors.AbortedError, tf.errors.DeadlineExceededError, tf.errors.UnknownError)


def is_local(path: str) -> bool:
    """Whether a path is in a file system of this machine, where files can be synced, and not ``gs://`` or the like."""
    return "://" not in path


def may_pass(error: BaseException) -> bool:
    """Whether an error of TensorFlow's writing may be over when it is tried again."""
    return isinstance(error, _PASSING)


def written_bytes(prefix: str) -> int:
    """Of the files of all checkpoints of this name, also of those in the making: it grows while TensorFlow writes."""
    total = 0
    folder, basename = os.path.split(prefix)
    for pattern in (f"{basename}-*", f"{basename}-*_temp/*"):
        for path in tf.io.gfile.glob(os.path.join(_literal(folder), pattern)):
            with contextlib.suppress(tf.errors.OpError):  # gone meanwhile
                total += tf.io.gfile.stat(path).length
    return total


def make_folder(folder: str) -> None:
    """Make a folder and those above it, where they are missing, and their names durable."""
    if is_local(folder):
        LocalStorage(folder).make_root()
    else:
        tf.io.gfile.makedirs(folder)


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


def announce(saver: Any, path: str, *, basename: str) -> None:
    """Let the state file name the checkpoint ``path``, which is durable; then let the saver delete old ones."""
    folder = os.path.dirname(path)
    saver._RecordLastCheckpoint(path)
    replace(folder, path, saver.last_checkpoints, relative=saver._save_relative_paths)
    saver._MaybeDeleteOldCheckpoints()
    if is_local(folder):
        sweep_digests(folder, basename)


def replace(
    folder: str,
    newest: str,
    kept: Sequence[str],
    *,
    relative: bool,
    timestamps: Sequence[float] | None = None,
    last_preserved: float | None = None,
) -> None:
    """Let the state file of ``folder`` name these checkpoints from now on, also after a crash.

    The timestamps are those of a ``tf.train.CheckpointManager``, in seconds since the epoch.
    """
    local = is_local(folder)
    checkpoint_management.update_checkpoint_state_internal(
        save_dir=folder,
        model_checkpoint_path=newest,
        all_model_checkpoint_paths=kept,
        latest_filename=_DRAFT if local else None,
        save_relative_paths=relative,
        all_model_checkpoint_timestamps=timestamps,
        last_preserved_timestamp=last_preserved,
    )
    if local:
        storage = LocalStorage(folder)
        sync_file(os.path.join(folder, _DRAFT))
        storage.rename(_DRAFT, STATE_FILE)
        storage.sync_folder("")


def delete(path: str) -> None:
    """Delete the files of a checkpoint that the state file does not name as the newest."""
    folder, prefix = os.path.split(path)
    # The index first: without it nobody takes the rest for a checkpoint.
    for name in (f"{prefix}.index", f"{prefix}.data-?????-of-?????"):
        for found in tf.io.gfile.glob(os.path.join(_literal(folder), name)):
            with contextlib.suppress(tf.errors.NotFoundError):
                tf.io.gfile.remove(found)
    if is_local(folder):
        with contextlib.suppress(NotFound):  # the folder is gone
            sweep_digests(folder, prefix.rpartition("-")[0])


def recall(saver: Any, folder: str) -> None:
    """Tell a new saver of the checkpoints that an earlier run left: they count for ``max_to_keep``."""
    state = tf.train.get_checkpoint_state(folder)
    if state is not None and not saver.last_checkpoints:
        saver.recover_last_checkpoints(list(state.all_model_checkpoint_paths))


def sweep(folder: str, basename: str) -> None:
    """Remove what a killed run left of a checkpoint in the making; it was never named anywhere."""
    for pattern in (
        f"{basename}-*.tempstate*",
        f"{basename}-*_temp",
        f"{basename}-*.tmp*",
        f"{_DRAFT}*",
        f"{STATE_FILE}.tmp*",
    ):
        for path in tf.io.gfile.glob(os.path.join(_literal(folder), pattern)):
            # A draft of another's that is gone meanwhile is no matter.
            with contextlib.suppress(tf.errors.NotFoundError, NotFound):
                remove = tf.io.gfile.rmtree if tf.io.gfile.isdir(path) else tf.io.gfile.remove
                remove(path)


def _literal(folder: str) -> str:
    """A folder's path in a pattern that matches nothing else."""
    return "".join(f"[{c}]" if c in "*?[" else c for c in folder)
