"""Which checkpoints a folder has, which is the latest, and what else lies there.

A checkpoint exists if and only if its manifest does. There is no pointer file and no clock: the
latest is the one with the highest ``seq``. Nothing is deleted here, whatever it is.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field

from midstride.errors import (
    CorruptCheckpoint,
    Gone,
    MidstrideError,
    NewerFormat,
    NotFound,
    PermissionDenied,
    StorageError,
    Unavailable,
)
from midstride.format import layout
from midstride.format.manifest import TAIL_BYTES, Manifest, check_tail, decode_manifest
from midstride.format.values import decode_metrics
from midstride.info import CheckpointInfo
from midstride.limits import CHUNK_BYTES, MANIFEST_LIMIT_BYTES
from midstride.storage.base import Entry, ReadableStorage


@dataclass(frozen=True, slots=True)
class Unusable:
    """A checkpoint that was published and cannot be used as it lies there."""

    folder: str
    step: int
    info: CheckpointInfo | None
    """None where the manifest itself cannot be read."""
    problem: MidstrideError


@dataclass(slots=True)
class Catalog:
    """What a run's folder holds."""

    run: str | None = None
    """The run's id; None where nothing was ever committed."""
    marked: bool = False
    """Whether ``midstride.json`` is there: something was committed once, whatever is left of it."""
    checkpoints: list[CheckpointInfo] = field(default_factory=list)
    """The usable ones, by rising ``seq``."""
    unusable: list[Unusable] = field(default_factory=list)
    debris: list[str] = field(default_factory=list)
    """Step folders without a manifest: what a save or a retirement that never ended left."""
    links: set[str] = field(default_factory=set)
    """Step folders that are links: read like any other, never deleted."""

    @property
    def latest(self) -> CheckpointInfo | None:
        return self.checkpoints[-1] if self.checkpoints else None

    @property
    def ever_committed(self) -> bool:
        """Whether anything was ever saved here: what decides if a run may start at step 0."""
        return bool(self.marked or self.checkpoints or self.unusable)

    @property
    def last_seq(self) -> int:
        """A ``seq`` that no manifest here is above, be it readable or not."""
        readable = [info.seq for info in self.checkpoints]
        readable += [entry.info.seq for entry in self.unusable if entry.info is not None]
        hidden = any(entry.info is None for entry in self.unusable)
        return max(readable, default=0) + (_LEAP if hidden else 0)


_LEAP = 1_000_000
"""More saves than any run makes between two checkpoints that it keeps: so far ahead at most is a manifest
that cannot be read for now, and must not be the newest when it can be read again."""

_LOOKS = 5
"""Looks through a folder whose checkpoints are retired meanwhile, before that is said."""

Known = dict[str, CheckpointInfo]
"""What manifests said that were read before, by folder. A folder's name is never used again, so it stays true."""


def scan(storage: ReadableStorage, known: Known | None = None) -> Catalog:
    """Look through a run's folder. ``StorageError`` if it cannot be listed, ``NotFound`` if it is not there.

    Every manifest is read, and every data file opened to see that it has its size. With ``known``
    only manifests that are new to it are read, and no files are opened: enough for the holder of
    the lock to number the next one.
    """
    empty: set[str] | None = None
    for _ in range(_LOOKS):
        entries = storage.list_folder("")
        catalog = _look_through(storage, entries, known)
        if catalog.checkpoints or not catalog.ever_committed:
            return catalog
        # A trainer that keeps few may have retired what was the newest while it was looked at, and committed
        # a newer one just after that was looked at. Not so twice with the same folders: between the two
        # it would have begun another.
        names = _folders(entries)
        if names == empty == _folders(storage.list_folder("")):
            return catalog
        empty = names
    raise Gone(f"the checkpoints of {storage.description} were retired as fast as they were looked at. Look again")


def _folders(entries: list[Entry]) -> set[str]:
    return {entry.name for entry in entries if entry.kind != "file"}


def _look_through(storage: ReadableStorage, entries: list[Entry], known: Known | None) -> Catalog:
    catalog = Catalog()
    catalog.run, catalog.marked = _read_marker(storage, entries)
    for entry in entries:
        folder = layout.parse_step_folder(entry.name)
        if folder is not None and entry.kind != "file":
            _look_at(storage, catalog, folder, entry, known)
    catalog.checkpoints.sort(key=lambda info: info.seq)
    if catalog.run is None and catalog.checkpoints:
        catalog.run = catalog.checkpoints[-1].run
    return catalog


def _look_at(
    storage: ReadableStorage,
    catalog: Catalog,
    folder: layout.StepFolder,
    entry: Entry,
    known: Known | None,
) -> None:
    info = known.get(folder.name) if known is not None else None
    try:
        if info is None:
            manifest = read_manifest(storage, folder.name)
            info = info_of(manifest, folder.name)
            if known is None:
                check_sizes(storage, folder.name, manifest)
            else:
                known[folder.name] = info
    except NotFound as error:
        if info is None and entry.kind == "other" and _leads_nowhere(storage, folder.name):
            away = Unavailable(f"{folder.name} is a link that leads nowhere: is its disk not mounted?")
            away.__cause__ = error
            catalog.unusable.append(Unusable(folder.name, folder.step, None, away))
        elif info is None:
            catalog.debris.append(folder.name)
    except PermissionDenied:
        raise
    except MidstrideError as problem:
        catalog.unusable.append(Unusable(folder.name, folder.step, info, problem))
    else:
        catalog.checkpoints.append(info)
    if entry.kind == "other":
        catalog.links.add(folder.name)


def _leads_nowhere(storage: ReadableStorage, folder: str) -> bool:
    try:
        storage.list_folder(folder)
    except StorageError:
        return True
    return False


def read_manifest(storage: ReadableStorage, folder: str) -> Manifest:
    """Read and check a manifest. ``NotFound`` if the folder has none: then it is no checkpoint."""
    name = f"{folder}/{layout.MANIFEST}"
    file = storage.open_file(name)
    try:
        if file.size > MANIFEST_LIMIT_BYTES:
            raise CorruptCheckpoint(f"a manifest of {file.size} bytes is not ours")
        if file.size > CHUNK_BYTES:
            # Before memory is taken for it: most of what is that large and no manifest ends in another way.
            tail = bytearray(TAIL_BYTES)
            file.read_into(file.size - TAIL_BYTES, memoryview(tail))
            check_tail(bytes(tail))
        raw = bytearray(file.size)
        count = file.read_into(0, memoryview(raw))
        manifest = decode_manifest(bytes(raw[:count]))
    except (CorruptCheckpoint, NewerFormat) as error:
        raise type(error)(f"{storage.description}/{name}: {error}") from error
    finally:
        file.close()
    named = layout.parse_step_folder(folder)
    if named is not None and (named.step, named.attempt) != (manifest.step, manifest.attempt):
        raise CorruptCheckpoint(f"{storage.description}/{name}: the manifest of another checkpoint")
    return manifest


def info_of(manifest: Manifest, folder: str) -> CheckpointInfo:
    """What people are told of a checkpoint."""
    return manifest.info(folder, decode_metrics(manifest.metrics))


def check_sizes(storage: ReadableStorage, folder: str, manifest: Manifest) -> None:
    """See that every file is there with its size. ``CorruptCheckpoint`` names the one that is not."""
    for record in manifest.files:
        name = f"{folder}/{record.name}"
        try:
            file = storage.open_file(name)
        except NotFound as error:
            # Retired between two looks: the manifest goes first, so it is gone too.
            still_there = any(entry.name == layout.MANIFEST for entry in storage.list_folder(folder))
            if not still_there:
                raise
            raise CorruptCheckpoint(f"{storage.description}/{name} is missing") from error
        size = file.size
        file.close()
        if size != record.size:
            raise CorruptCheckpoint(f"{storage.description}/{name} has {size} bytes, it was saved with {record.size}")


def _read_marker(storage: ReadableStorage, entries: list[Entry]) -> tuple[str | None, bool]:
    """The run's id and whether the marker is there; a damaged marker still says that something was committed."""
    if not any(entry.name == layout.MARKER for entry in entries):
        return None, False
    try:
        file = storage.open_file(layout.MARKER)
        try:
            raw = bytearray(min(file.size, 4096))
            file.read_into(0, memoryview(raw))
        finally:
            file.close()
        data = json.loads(raw.decode())
        return (data["run"] if isinstance(data["run"], str) else None), True
    except PermissionDenied:
        raise
    except (StorageError, ValueError, KeyError, TypeError, RecursionError):
        return None, True


def lineage(checkpoints: list[CheckpointInfo], head: int | None) -> Iterator[CheckpointInfo]:
    """The checkpoints that the one with ``seq`` ``head`` grew from, itself first.

    It ends at a parent that was retired: what lies before that may be of a line that was left.
    """
    by_seq = {info.seq: info for info in checkpoints}
    info = by_seq.get(head) if head is not None else None
    while info is not None:
        yield info
        older = info.parent is not None and info.parent < info.seq
        info = by_seq.get(info.parent) if info.parent is not None and older else None


def describe_problems(catalog: Catalog) -> str:
    """The unusable checkpoints, a clause each, the newest step first."""
    entries = sorted(catalog.unusable, key=lambda entry: entry.step, reverse=True)
    return "; ".join(f"step {entry.step} ({entry.folder}): {entry.problem}" for entry in entries)
