"""The newest checkpoint of a folder whose bytes are those that were written."""

from __future__ import annotations

import os
from collections.abc import Iterator

import tensorflow as tf

from midstride.errors import NotFound
from midstride.tensorflow.folder import CheckpointFolder


def latest_checkpoint(checkpoint_dir: str | os.PathLike[str]) -> str | None:
    """Like ``tf.train.latest_checkpoint``, but every byte was checked. None if there is no checkpoint that is good.

    Checkpoints that are damaged are passed over for the one before, and logged by name with what is wrong.
    One that Midstride did not write has no digests beside it: it is read whole, which compares TensorFlow's own
    checksums. A folder that cannot be looked at raises ``StorageError``.
    """
    path = os.fspath(checkpoint_dir)
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


def _by_reading(path: str) -> Iterator[str]:
    try:
        reader = tf.train.load_checkpoint(path)
        for name in reader.get_variable_to_shape_map():
            reader.get_tensor(name)
    except (tf.errors.OpError, ValueError) as error:
        yield f"it cannot be read: {error}"
