"""The state file of a folder of checkpoints, ``checkpoint``: what names the newest one, and how it is moved on.

TensorFlow's Saver writes it, and deletes old checkpoints, without a sync in between. Here each is durable before the
next; what is kept, and what the file says, stays the Saver's business.
"""

from __future__ import annotations

import contextlib
import os
from typing import Any

import tensorflow as tf
from tensorflow.python.checkpoint import checkpoint_management

from midstride.errors import NotFound
from midstride.info import CheckpointInfo
from midstride.storage.local import LocalStorage, sync_file
from midstride.tensorflow.folder import STATE_FILE, is_file_of, record_digests, sweep_digests

_DRAFT = f"{STATE_FILE}.midstride-draft"


def is_local(path: str) -> bool:
    """Whether a path is in a file system of this machine, where files can be synced, and not ``gs://`` or the like."""
    return "://" not in path


def make_durable(path: str, step: int) -> CheckpointInfo | None:
    """Return when the files of the checkpoint ``path`` are on stable storage, with their digests beside them.

    None, and nothing is done, where the folder is not of this machine: what closes a file there makes it durable.
    """
    if not is_local(path):
        return None
    folder, prefix = os.path.split(os.path.abspath(path))
    storage = LocalStorage(folder)
    for entry in storage.list_folder(""):
        if is_file_of(prefix, entry.name):
            sync_file(os.path.join(folder, entry.name))
    info = record_digests(folder, prefix, step)
    # Before the state file names them: it could survive a crash that their names do not.
    storage.sync_folder("")
    return info


def announce(saver: Any, path: str, *, basename: str) -> None:
    """Let the state file name the checkpoint ``path``, which is durable; then let the saver delete old ones."""
    folder = os.path.dirname(path)
    saver._RecordLastCheckpoint(path)
    local = is_local(folder)
    checkpoint_management.update_checkpoint_state_internal(
        save_dir=folder,
        model_checkpoint_path=path,
        all_model_checkpoint_paths=saver.last_checkpoints,
        latest_filename=_DRAFT if local else None,
        save_relative_paths=saver._save_relative_paths,
    )
    if local:
        storage = LocalStorage(folder)
        sync_file(os.path.join(folder, _DRAFT))
        storage.rename(_DRAFT, STATE_FILE)
        storage.sync_folder("")
    saver._MaybeDeleteOldCheckpoints()
    if local:
        sweep_digests(folder, basename)


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
