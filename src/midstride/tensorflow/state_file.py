"""The state file of a folder of checkpoints, ``checkpoint``: what names the newest one, and how it is moved on.

TensorFlow's Saver and its CheckpointManager write it, and delete old checkpoints, without a sync in between. Here each
is durable before the next.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from typing import Any

import tensorflow as tf
from tensorflow.python.checkpoint import checkpoint_management

from midstride.errors import MidstrideError
from midstride.storage.local import LocalStorage, sync_file
from midstride.tensorflow.durable import is_local, made_at
from midstride.tensorflow.folder import STATE_FILE, STATE_FILE_DRAFT, sweep_digests
from midstride.tensorflow.leftovers import note_unfinished, remove_files

_log = logging.getLogger("midstride")


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
        latest_filename=STATE_FILE_DRAFT if local else None,
        save_relative_paths=relative,
        all_model_checkpoint_timestamps=timestamps,
        last_preserved_timestamp=last_preserved,
    )
    if local:
        storage = LocalStorage(folder)
        sync_file(os.path.join(folder, STATE_FILE_DRAFT))
        storage.rename(STATE_FILE_DRAFT, STATE_FILE)
        storage.sync_folder("")


def announce(saver: Any, path: str, *, basename: str) -> None:
    """Let the state file name the checkpoint ``path``, which is durable; then let the saver delete old ones."""
    folder = os.path.dirname(path)
    saver._RecordLastCheckpoint(path)
    doomed = _to_be_deleted(saver)
    note_unfinished(folder, basename, [path, *doomed])
    replace(folder, path, saver.last_checkpoints, relative=saver._save_relative_paths)
    try:
        saver._MaybeDeleteOldCheckpoints()
        if is_local(folder):
            # In a folder whose name is a pattern to TensorFlow, it has found none of their files.
            for old in doomed:
                if os.path.dirname(os.path.abspath(old)) == os.path.abspath(folder):
                    remove_files(folder, os.path.basename(old))
            sweep_digests(folder, basename)
    except (OSError, MidstrideError, tf.errors.OpError) as error:
        # What is saved is saved; TensorFlow ignores what cannot be deleted too.
        _log.warning("%s: what is not kept could not be deleted: %s", folder, error)
        return
    note_unfinished(folder, basename, [])


def _to_be_deleted(saver: Any) -> list[str]:
    return [path for path, made in saver._checkpoints_to_be_deleted[:1] if made <= saver._next_checkpoint_time]


def recall(saver: Any, folder: str) -> None:
    """Tell a saver of the checkpoints that an earlier run left here: they count for ``max_to_keep``.

    By their names: the folder may have been moved or copied, and those of another folder are not its to delete.
    """
    known = list(saver.last_checkpoints)
    if not known:
        state = tf.train.get_checkpoint_state(folder)
        known = [] if state is None else list(state.all_model_checkpoint_paths)
    here = [os.path.join(folder, os.path.basename(path)) for path in known]
    if here == saver.last_checkpoints:
        return
    if is_local(folder):
        made = {path: made_at(folder, os.path.basename(path)) for path in here}
        saver.set_last_checkpoints_with_time([(path, seconds) for path, seconds in made.items() if seconds])
    else:
        saver.recover_last_checkpoints(here)
