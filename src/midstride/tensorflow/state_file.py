"""The state file of a folder of checkpoints, ``checkpoint``: what names the newest one, and how it is moved on.

TensorFlow's Saver and its CheckpointManager write it, and delete old checkpoints, without a sync in between. Here each
is durable before the next.
"""

from __future__ import annotations

import contextlib
import filecmp
import logging
import os
import re
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any

import tensorflow as tf
from tensorflow.python.checkpoint import checkpoint_management

from midstride.errors import MidstrideError, NotFound
from midstride.info import CheckpointInfo
from midstride.storage.local import LocalStorage, sync_file
from midstride.tensorflow.folder import DIGESTS_SUFFIX, STATE_FILE, is_file_of, record_digests, sweep_digests

_log = logging.getLogger("midstride")

_UNFINISHED_SUFFIX = ".midstride-unfinished"
"""Of the file that names the checkpoints that are being written, or deleted."""
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
    for pattern in ("-*", "-*_temp/*"):
        for path in tf.io.gfile.glob(_literal(os.path.join(folder, basename)) + pattern):
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


def aside(path: str) -> str | None:
    """Where to write the checkpoint ``path`` if there is one already: the one that there is must not be harmed.

    A run that is restarted begins with a save of the step that it was restored from, and the state file names it.
    """
    if not is_local(path):
        return None
    folder, prefix = os.path.split(os.path.abspath(path))
    if not any(is_file_of(prefix, entry.name) for entry in LocalStorage(folder).list_folder("")):
        return None
    made = f"{path}.midstride_temp"
    with contextlib.suppress(tf.errors.NotFoundError):
        tf.io.gfile.rmtree(made)
    tf.io.gfile.makedirs(made)
    return os.path.join(made, prefix)


def move_in(saver: Any, written: str, path: str) -> None:
    """Put the checkpoint that was written ``aside`` in the place of the one that is there, if it says anything else."""
    folder, prefix = os.path.split(os.path.abspath(path))
    made = os.path.dirname(os.path.abspath(written))

    def files(where: str, *, meta: bool) -> list[str]:
        names = (entry.name for entry in LocalStorage(where).list_folder("") if is_file_of(prefix, entry.name))
        return sorted(name for name in names if meta or not name.endswith(".meta"))

    names = files(made, meta=False)
    same = names == files(folder, meta=False) and all(
        filecmp.cmp(os.path.join(made, name), os.path.join(folder, name), shallow=False) for name in names
    )
    there = files(folder, meta=True)
    new = [name for name in files(made, meta=True) if name not in there] if same else files(made, meta=True)
    if not same:
        for name in new:
            sync_file(os.path.join(made, name))
        # Between the renames the place holds neither the old checkpoint nor the new one.
        others = [other for other in saver.last_checkpoints if os.path.abspath(other) != os.path.abspath(path)]
        if others:
            replace(os.path.dirname(path), others[-1], others, relative=saver._save_relative_paths)
    for name in new:
        os.replace(os.path.join(made, name), os.path.join(folder, name))
    tf.io.gfile.rmtree(made)


def announce(saver: Any, path: str, *, basename: str) -> None:
    """Let the state file name the checkpoint ``path``, which is durable; then let the saver delete old ones."""
    folder = os.path.dirname(path)
    saver._RecordLastCheckpoint(path)
    note_unfinished(folder, basename, [path, *_to_be_deleted(saver)])
    replace(folder, path, saver.last_checkpoints, relative=saver._save_relative_paths)
    try:
        saver._MaybeDeleteOldCheckpoints()
        if is_local(folder):
            sweep_digests(folder, basename)
    except (OSError, MidstrideError, tf.errors.OpError) as error:
        # What is saved is saved; TensorFlow ignores what cannot be deleted too.
        _log.warning("%s: what is not kept could not be deleted: %s", folder, error)
        return
    note_unfinished(folder, basename, [])


def _to_be_deleted(saver: Any) -> list[str]:
    return [path for path, made in saver._checkpoints_to_be_deleted[:1] if made <= saver._next_checkpoint_time]


def note_unfinished(folder: str, basename: str, paths: Sequence[str]) -> None:
    """Write down which checkpoints are being written or deleted, for ``sweep`` after a kill."""
    if not is_local(folder):
        return
    note = os.path.join(folder, basename + _UNFINISHED_SUFFIX)
    if not paths:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(note)
        return
    # Need not be durable: without it something stays, and nothing is lost.
    with open(note, "w", encoding="utf-8", errors="surrogateescape") as file:
        file.writelines(f"{os.path.basename(path)}\n" for path in paths)


def forget(saver: Any, path: str, *, basename: str) -> None:
    """Remove what a failed save left: on a disk that is full nobody else would, and it was never named."""
    folder, prefix = os.path.split(path)
    sweep(folder, basename)
    if not is_local(path) or prefix in _listed(folder):
        return
    saver.set_last_checkpoints_with_time([known for known in saver._last_checkpoints if known[0] != path])
    _remove_files(folder, prefix)


def _listed(folder: str) -> set[str]:
    state = tf.train.get_checkpoint_state(folder)
    return {os.path.basename(path) for path in state.all_model_checkpoint_paths} if state else set()


def _remove_files(folder: str, prefix: str) -> None:
    storage = LocalStorage(folder)
    for entry in storage.list_folder(""):
        if is_file_of(prefix, entry.name) or entry.name == prefix + DIGESTS_SUFFIX:
            storage.remove_file(entry.name)


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
    """Remove what a killed run left of checkpoints in the making or in deletion; the state file does not name them."""
    drafts = re.compile(
        rf"{re.escape(basename)}-\d+(\..+)?(\.tempstate\d*|_temp|\.tmp[0-9a-f]*)"
        rf"|({re.escape(_DRAFT)}|{STATE_FILE}|graph\.pbtxt)\.tmp[0-9a-f]*|{re.escape(_DRAFT)}"
    )
    try:
        names = tf.io.gfile.listdir(folder)
    except tf.errors.NotFoundError:
        return
    for name in names:
        if drafts.fullmatch(name.rstrip("/")):
            path = os.path.join(folder, name)
            # A draft of another's that is gone meanwhile is no matter.
            with contextlib.suppress(tf.errors.NotFoundError, NotFound):
                remove = tf.io.gfile.rmtree if tf.io.gfile.isdir(path) else tf.io.gfile.remove
                remove(path)
    if is_local(folder):
        _sweep_unfinished(folder, basename)


def _sweep_unfinished(folder: str, basename: str) -> None:
    try:
        with open(
            os.path.join(folder, basename + _UNFINISHED_SUFFIX), encoding="utf-8", errors="surrogateescape"
        ) as file:
            lines = file.readlines()
    except FileNotFoundError:
        return
    listed = _listed(folder)
    for line in lines:
        prefix = line.rstrip("\n")
        # A line without its end was torn, and would be another checkpoint's name.
        if line.endswith("\n") and re.fullmatch(rf"{re.escape(basename)}-\d+", prefix) and prefix not in listed:
            _remove_files(folder, prefix)
    note_unfinished(folder, basename, [])


def _literal(path: str) -> str:
    """A path in a pattern that matches nothing else."""
    return "".join(f"[{c}]" if c in "*?[" else c for c in path)
