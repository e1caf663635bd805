"""Writing a checkpoint again that is there already, without harm to the one that is there.

A run that is restarted begins with a save of the step that it was restored from, and the state file names it.
"""

from __future__ import annotations

import contextlib
import filecmp
import os
from typing import Any

import tensorflow as tf

from midstride.storage.local import LocalStorage, sync_file
from midstride.tensorflow.durable import is_local
from midstride.tensorflow.folder import is_file_of
from midstride.tensorflow.state_file import replace


def place_aside(path: str) -> str | None:
    """Where to write the checkpoint ``path`` if there is one already; else None."""
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
    """Put the checkpoint that was written aside in the place of the one that is there, if it says anything else."""
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
