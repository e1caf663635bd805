"""The commit: from files that are written to a checkpoint that exists; and back, when one is retired.

The order, each step before the next (docs/commit.md names the crash that each prevents):

1. the data files are synced                             (``writer``)
2. the step folder and the root are synced
3. ``manifest.json.tmp`` is written and synced
4. it is renamed to ``manifest.json``                    the commit
5. the step folder is synced                             now "saved" may be said
6. on the first commit, ``midstride.json`` the same way
"""

from __future__ import annotations

import contextlib
import json
import logging
from collections.abc import Callable, Sequence

from midstride.errors import CommitError, CorruptCheckpoint, NewerFormat, NotFound, StorageError
from midstride.format import layout
from midstride.format.manifest import FORMAT, MAX_SEQ, Manifest, encode_manifest
from midstride.format.values import decode_tree
from midstride.limits import MANIFEST_LIMIT_BYTES
from midstride.storage.base import Lock, Storage

_log = logging.getLogger("midstride")


def publish_manifest(storage: Storage, lock: Lock, folder: str, manifest: Manifest, tree_json: str) -> None:
    """Make the checkpoint in ``folder`` exist. Every data file is synced already."""
    # Without these two the manifest could survive a crash that the files' names, or the folder's, do not.
    storage.sync_folder(folder)
    storage.sync_folder("")
    # Another run may have taken the folder over while the bytes were written: then nothing is published.
    lock.check()
    document = encode_manifest(manifest, tree_json)
    _read_back(manifest, tree_json, len(document))
    _write_whole(storage, f"{folder}/{layout.MANIFEST_DRAFT}", document)
    storage.rename(f"{folder}/{layout.MANIFEST_DRAFT}", f"{folder}/{layout.MANIFEST}")
    # Without this "saved" could be said, older checkpoints deleted, and the new name lost with the power.
    storage.sync_folder(folder)


def _read_back(manifest: Manifest, tree_json: str, nbytes: int) -> None:
    """What a reader would refuse must not be published: older checkpoints are retired on the strength of it.

    Of the manifest, the tree is what callers' values make; the rest is made here and in the plan.
    """
    try:
        if nbytes > MANIFEST_LIMIT_BYTES:
            raise CorruptCheckpoint(f"it has {nbytes} bytes; put large values into arrays")
        if manifest.seq > MAX_SEQ:
            raise CorruptCheckpoint(f"seq {manifest.seq} is out of range: a manifest in this folder is not ours")
        decode_tree(json.loads(tree_json))
    except (CorruptCheckpoint, NewerFormat, ValueError, RecursionError) as error:
        raise CommitError(f"the manifest could not be read back: {error}") from error


def mark_run(storage: Storage, run: str) -> None:
    """Write ``midstride.json``, after the first manifest and before anybody is told.

    From then on an empty-looking folder is a loss, not a fresh start.
    """
    replace_whole(storage, layout.MARKER, json.dumps({"format": FORMAT, "run": run}).encode() + b"\n")
    storage.sync_folder("")


def replace_whole(storage: Storage, name: str, data: bytes) -> None:
    """Write a file that at every moment is the old one or the new one, whole. Its name still needs a sync."""
    draft = f"{name}.tmp"
    _remove_if_there(storage, draft)
    _write_whole(storage, draft, data)
    storage.rename(draft, name)


def _write_whole(storage: Storage, name: str, data: bytes) -> None:
    file = storage.create_file(name, len(data))
    try:
        file.write(0, memoryview(data))
        # Before the rename: a name that survives must not stand for bytes that do not.
        file.sync()
    finally:
        file.close()


def withdraw(storage: Storage, folder: str) -> None:
    """Make a checkpoint not exist. Its bytes are still there; somebody may have removed it whole."""
    _remove_if_there(storage, f"{folder}/{layout.MANIFEST}")


def remove_step_folder(storage: Storage, folder: str) -> None:
    """Remove a step folder that is no checkpoint, and in it only what this library makes.

    Anything else in it is somebody's: then it and the folder stay.
    """
    entries = storage.list_folder(folder)
    if any(entry.name == layout.MANIFEST for entry in entries):
        raise StorageError(f"{storage.description}/{folder} has a manifest: it is a checkpoint, and was not removed")
    # A manifest that went with a dead process, or whose going could not be synced, could come back with
    # a crash, its files gone.
    storage.sync_folder(folder)
    ours = [e for e in entries if e.name == layout.MANIFEST_DRAFT or layout.is_data_file(e.name)]
    for entry in ours:
        if entry.kind == "file":
            storage.remove_file(f"{folder}/{entry.name}")
    if len(ours) == len(entries):
        storage.remove_folder(folder)
    else:
        _log.warning("%s/%s holds files that Midstride did not make: left alone", storage.description, folder)


def sweep(storage: Storage, folders: Sequence[str], alive: Callable[[], None] = lambda: None) -> list[str]:
    """Remove debris; return what could not be removed, which is logged: it does no harm but take space.

    ``alive`` is called before each one.
    """
    left = []
    for folder in folders:
        alive()
        try:
            remove_step_folder(storage, folder)
        except NotFound:
            continue
        except Exception as error:  # a storage's own too: no save fails because of debris
            _log.warning("debris %s/%s could not be removed: %s", storage.description, folder, error)
            left.append(folder)
    return left


def _remove_if_there(storage: Storage, name: str) -> None:
    with contextlib.suppress(NotFound):
        storage.remove_file(name)
