"""What a save or a deletion leaves that did not come to its end, and how it goes.

TensorFlow's drafts have names of their own. Of whole files a note tells which checkpoints are being written or deleted;
what the note names and the state file does not is removed.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from midstride.errors import NotFound
from midstride.storage.local import LocalStorage
from midstride.tensorflow.durable import is_local, literal
from midstride.tensorflow.folder import DIGESTS_SUFFIX, STATE_FILE, STATE_FILE_DRAFT, is_file_of, sweep_digests

_UNFINISHED_SUFFIX = ".midstride-unfinished"
"""Of the file that names the checkpoints that are being written, or deleted."""


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


def sweep(folder: str, basename: str) -> None:
    """Remove what a killed run left of checkpoints in the making or in deletion; the state file does not name them."""
    drafts = re.compile(
        rf"{re.escape(basename)}-\d+(\..+)?(\.tempstate\d*|_temp|\.tmp[0-9a-f]*)"
        rf"|({re.escape(STATE_FILE_DRAFT)}|{STATE_FILE}|graph\.pbtxt)\.tmp[0-9a-f]*|{re.escape(STATE_FILE_DRAFT)}"
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
            remove_files(folder, prefix)
    note_unfinished(folder, basename, [])


def forget(saver: Any, path: str, *, basename: str) -> None:
    """Remove what a failed save left: on a disk that is full nobody else would, and it was never named."""
    folder, prefix = os.path.split(path)
    sweep(folder, basename)
    if not is_local(path) or prefix in _listed(folder):
        return
    saver.set_last_checkpoints_with_time([known for known in saver._last_checkpoints if known[0] != path])
    remove_files(folder, prefix)


def delete(path: str) -> None:
    """Delete the files of a checkpoint that the state file does not name as the newest."""
    folder, prefix = os.path.split(path)
    # The index first: without it nobody takes the rest for a checkpoint.
    for name in (f"{prefix}.index", f"{prefix}.data-?????-of-?????"):
        for found in tf.io.gfile.glob(os.path.join(literal(folder), name)):
            with contextlib.suppress(tf.errors.NotFoundError):
                tf.io.gfile.remove(found)
    if is_local(folder):
        with contextlib.suppress(NotFound):  # the folder is gone
            sweep_digests(folder, prefix.rpartition("-")[0])


def remove_files(folder: str, prefix: str) -> None:
    """Remove all files of a checkpoint, its digests too, whatever they are. The folder is local."""
    storage = LocalStorage(folder)
    for entry in storage.list_folder(""):
        if is_file_of(prefix, entry.name) or entry.name == prefix + DIGESTS_SUFFIX:
            storage.remove_file(entry.name)


def _listed(folder: str) -> set[str]:
    state = tf.train.get_checkpoint_state(folder)
    return {os.path.basename(path) for path in state.all_model_checkpoint_paths} if state else set()
