"""The newest checkpoint of a folder whose bytes are those that were written."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator

import tensorflow as tf

from midstride.errors import NotFound
from midstride.tensorflow.folder import CheckpointFolder

_log = logging.getLogger("midstride")


def latest_checkpoint(checkpoint_dir: str | os.PathLike[str]) -> str | None:
    """Like ``tf.train.latest_checkpoint``, but every byte was checked. None if there is no checkpoint that is good.

    Checkpoints that are damaged are passed over for the one before, and logged by name with what is wrong.
    One that Midstride did not write has no digests beside it: it is read whole, which compares TensorFlow's own
    checksums. A folder that cannot be looked at raises ``StorageError``.
    """
    path = os.fspath(checkpoint_dir)
    if "://" in path:
        return _latest_elsewhere(path)
    try:
        folder = CheckpointFolder(path)
    except NotFound:
        return None

    def problems(prefix: str) -> Iterator[str]:
        try:
            folder.digests(prefix)
        except NotFound:
            yield from _by_reading(os.path.join(path, prefix))
            return
        yield from folder.problems(prefix)

    prefix = folder.latest(problems)
    return None if prefix is None else os.path.join(path, prefix)


def _latest_elsewhere(path: str) -> str | None:
    """Of a folder that only TensorFlow can look into: nothing there has digests."""
    state = tf.train.get_checkpoint_state(path)
    listed = [] if state is None else [*state.all_model_checkpoint_paths, state.model_checkpoint_path]
    for newest in dict.fromkeys(reversed(listed)):
        problems = list(_by_reading(newest))
        if not problems:
            return str(newest)
        _log.warning("%s was passed over: %s", newest, "; ".join(problems))
    return None


def _by_reading(path: str) -> Iterator[str]:
    try:
        reader = tf.compat.v1.train.NewCheckpointReader(path)
        for name in reader.get_variable_to_shape_map():
            reader.get_tensor(name)
    except (tf.errors.OpError, ValueError) as error:
        yield f"it cannot be read: {error}"
