"""Read a run's folder without writing in it: for evaluation, serving and looking around."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from midstride.errors import Gone, NotFound, NothingRestorable, Unavailable
from midstride.info import CheckpointInfo
from midstride.restore import load as loading
from midstride.restore.catalog import Catalog, scan
from midstride.retention import best_of
from midstride.storage import Storage, open_storage
from midstride.storage.base import ReadableStorage
from midstride.storage.bounded import BoundedReads

_log = logging.getLogger("midstride")


def open(path: str | os.PathLike[str] | Storage) -> RunReader:
    """Open a run for reading. ``NotFound`` where there is no such folder. Nothing is ever written or locked."""
    return RunReader(path)


def newest(*paths: str | os.PathLike[str] | Storage) -> RunReader | None:
    """The run, of several places where one may lie, whose latest usable checkpoint has the highest step.

    For runs that save to a fast disk and to a safe one. Of equals the first named is taken; its
    ``description`` says which it is. None if nothing was ever saved in any. A folder that is not
    there is passed over; one that cannot be looked at raises ``StorageError``, since it may have a
    newer one. ``NothingRestorable`` if something was saved and no place has a usable checkpoint.
    """
    found: tuple[int, RunReader] | None = None
    ruined: NothingRestorable | None = None
    for path in paths:
        try:
            reader = RunReader(path)
            latest = reader.latest()
        except NotFound:
            continue
        except NothingRestorable as error:
            ruined = ruined or error
            continue
        if latest is not None and (found is None or latest.step > found[0]):
            found = latest.step, reader
    if found is not None:
        return found[1]
    if ruined is not None:
        raise ruined
    return None


class RunReader:
    """A run's checkpoints, for reading alone. Every call looks at the folder anew."""

    def __init__(self, path: str | os.PathLike[str] | Storage) -> None:
        self._storage = BoundedReads(open_storage(path))
        self.description = self._storage.description
        self._storage.list_folder("")

    def scan(self) -> Catalog:
        """Everything the folder holds: checkpoints, those that cannot be used and why, debris."""
        return scan(self._storage)

    def checkpoints(self) -> list[CheckpointInfo]:
        """The checkpoints whose manifest is good and whose files are there, by rising ``seq``.

        One that could not be looked at (an I/O error, a link to a disk that is not mounted) is not among them
        and is logged.
        """
        return usable_of(self._storage, self.scan())

    def latest(self) -> CheckpointInfo | None:
        """The newest checkpoint; None if nothing was ever saved here.

        ``NothingRestorable`` if something was, and none can be used; ``Unavailable`` if one that may be newer
        could not be looked at.
        """
        return latest_of(self._storage, self.scan())

    def best(self, metric: str, mode: str) -> CheckpointInfo | None:
        """The checkpoint with the lowest (``mode="min"``) or highest (``"max"``) value of a metric."""
        return best_of(self.checkpoints(), metric, mode)

    def load(self, step: int | None = None, only: str | Sequence[str] | Mapping[str, Any] | None = None) -> Any:
        """The state of the newest checkpoint, or of ``step``, as plain containers with NumPy arrays.

        ``only`` is a name at the top of the state, a JSON pointer (``"/model/fc.weight"``), several of
        these, or a mapping of pointers to slices: ``{"/model/fc.weight": slice(0, 10)}``. A slice of the first
        dimension reads only that part, any other reads the whole array and cuts it. Every byte
        that is read is checked. A bad newest checkpoint is passed over for the one before, and
        logged. ``NotCommitted`` if there is no such step, or nothing at all.
        """
        restored = loading.restore(self._storage, None, step, loading.Options(only=only), fallback=True)
        if restored is None:
            raise loading.nothing_saved(self._storage)
        return restored.state

    def describe(self, step: int | None = None) -> dict[str, Any]:
        """The facts of the newest checkpoint, or of ``step``, without reading its arrays: JSON-ready.

        ``checkpoint`` has the fields of ``CheckpointInfo`` and the versions of libraries, ``arrays``
        a row for each place of the state that is an array, ``values`` the tree as docs/format.md has it.
        """
        catalog = self.scan()
        info = latest_of(self._storage, catalog) if step is None else None
        found = [c for c in catalog.checkpoints if c.step == step] if step is not None else [info] if info else []
        if not found or found[-1] is None:
            raise (
                loading.nothing_saved(self._storage)
                if step is None
                else loading.not_committed(self._storage, catalog, step)
            )
        return loading.describe(self._storage, found[-1])

    def verify(self, step: int | None = None, on_bytes: Callable[[int], None] = lambda _: None) -> dict[str, list[str]]:
        """Read and check every byte of all checkpoints, or of those of ``step``.

        Returns for each step folder what is wrong with it, a line each: an empty list is a good
        checkpoint. ``NotCommitted`` if ``step`` was never committed. ``on_bytes`` is told of bytes
        as they are checked.
        """
        catalog = self.scan()
        entries = [entry for entry in catalog.unusable if step in (None, entry.step)]
        loading.raise_unreadable(entries, catalog.latest if step is None else None)
        result = {entry.folder: [str(entry.problem)] for entry in entries}
        for info in catalog.checkpoints:
            if step in (None, info.step):
                try:
                    result[info.name] = loading.verify(self._storage, info, on_bytes)
                except Gone:
                    continue  # retired meanwhile: it is no checkpoint any more
        if step is not None and not result:
            raise loading.not_committed(self._storage, catalog, step)
        return result


def usable_of(storage: ReadableStorage, catalog: Catalog) -> list[CheckpointInfo]:
    """The usable checkpoints; those that could not be looked at, and may be good, are named in one warning."""
    hidden = [f"{e.folder} ({e.problem})" for e in catalog.unusable if isinstance(e.problem, Unavailable)]
    if hidden:
        _log.warning("%s: not listed, since it could not be looked at: %s", storage.description, "; ".join(hidden))
    return catalog.checkpoints


def latest_of(storage: ReadableStorage, catalog: Catalog) -> CheckpointInfo | None:
    """The newest usable checkpoint, with the three answers kept apart."""
    newest = catalog.latest.seq if catalog.latest is not None else -1
    newer = [e for e in catalog.unusable if e.info is None or e.info.seq > newest]
    loading.raise_unreadable(newer, catalog.latest)
    if catalog.latest is None and catalog.ever_committed:
        raise loading.nothing_restorable(storage, catalog)
    return catalog.latest
