"""A storage that knows what was synced, and can lose the rest.

The model of a crash of the machine: of the operations on a folder's names (made, renamed, removed)
since the folder was synced, any first few have become durable, each folder for itself. Of a file's
bytes since the file was synced, all, none or some sectors have, whatever became of its name. A
rename is one operation: the old name or the new one is there, never neither. Bytes that are lost
read as zeros, or as the end of the file.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from midstride.errors import NotFound, StorageError
from midstride.limits import PAGE_BYTES
from midstride.storage.base import Entry, Lock, ReadableFile, WritableFile
from midstride.storage.memory import MemoryStorage

_SECTOR_BYTES = 512

Names = dict[str, "_File | _Folder"]
Change = Callable[[Names], None]


@dataclass(eq=False)
class _File:
    now: bytearray
    synced: bytes | None = None
    """Its bytes when it was last synced; None: never."""


@dataclass(eq=False)
class _Folder:
    now: Names = field(default_factory=dict)
    synced: Names = field(default_factory=dict)
    pending: list[Change] = field(default_factory=list)

    def change(self, apply: Change) -> None:
        apply(self.now)
        self.pending.append(apply)

    def after_crash(self, kept: int) -> Names:
        names = dict(self.synced)
        for apply in self.pending[:kept]:
            apply(names)
        return names


class VolatileStorage:
    """``storage.base.Storage`` in memory, with a memory of what is durable."""

    block_bytes = PAGE_BYTES

    def __init__(self, description: str = "volatile") -> None:
        self.description = description
        self._root: _Folder | None = None
        self._locks = MemoryStorage(description)
        self._locks.make_root()

    # The storage.

    def make_root(self) -> None:
        self._root = self._root or _Folder()

    def list_folder(self, folder: str) -> list[Entry]:
        return [
            Entry(name, "file" if isinstance(item, _File) else "folder")
            for name, item in list(self._folder(folder).now.items())
        ]

    def make_folder(self, folder: str) -> None:
        self._add(folder, _Folder())

    def create_file(self, name: str, size: int) -> WritableFile:
        file = _File(bytearray(size))
        self._add(name, file)
        return _Handle(file)

    def open_file(self, name: str) -> ReadableFile:
        return _Handle(self._file(name))

    def rename(self, old: str, new: str) -> None:
        parent, last, new_last = self._parent(old), _last(old), _last(new)
        file = self._file(old)

        def apply(names: Names) -> None:
            names.pop(last, None)
            names[new_last] = file

        parent.change(apply)

    def sync_folder(self, folder: str) -> None:
        place = self._folder(folder)
        place.synced, place.pending = dict(place.now), []

    def remove_file(self, name: str) -> None:
        self._file(name)
        last = _last(name)
        self._parent(name).change(lambda names: _drop(names, last))

    def remove_folder(self, folder: str) -> None:
        if self._folder(folder).now:
            raise StorageError(f"{self.description}/{folder} is not empty")
        last = _last(folder)
        self._parent(folder).change(lambda names: _drop(names, last))

    def lock(self, name: str, owner: str) -> Lock:
        return self._locks.lock(name, owner)

    def _add(self, name: str, item: _File | _Folder) -> None:
        parent, last = self._parent(name), _last(name)
        if last in parent.now:
            raise StorageError(f"{self.description}/{name} exists already")

        def apply(names: Names) -> None:
            names[last] = item

        parent.change(apply)

    def _folder(self, folder: str) -> _Folder:
        place = self._root
        for part in folder.split("/") if folder else ():
            found = place.now.get(part) if place is not None else None
            place = found if isinstance(found, _Folder) else None
        if place is None:
            raise NotFound(f"{self.description}/{folder}: there is no such folder")
        return place

    def _parent(self, name: str) -> _Folder:
        return self._folder(name.rpartition("/")[0])

    def _file(self, name: str) -> _File:
        found = self._parent(name).now.get(_last(name))
        if not isinstance(found, _File):
            raise NotFound(f"{self.description}/{name}: there is no such file")
        return found

    # The crash.

    def crashes(self, seeds: int = 8) -> Iterator[MemoryStorage]:
        """What a crash now may leave: the four extremes, then ``seeds`` random mixes."""
        for names_kept in (False, True):
            for bytes_kept in (False, True):
                yield self._image(
                    lambda n, kept=names_kept: n if kept else 0,  # type: ignore[misc]
                    lambda file, kept=bytes_kept: bytes(file.now) if kept else _lost(file, cut=False),  # type: ignore[misc]
                )
        for seed in range(seeds):
            chance = random.Random(seed)
            yield self._image(lambda n, c=chance: c.randint(0, n), lambda file, c=chance: _torn(file, c))  # type: ignore[misc]

    def _image(self, names_kept: Callable[[int], int], content: Callable[[_File], bytes]) -> MemoryStorage:
        image = MemoryStorage(f"{self.description} after a crash")
        if self._root is None:
            return image
        image.make_root()

        def copy(folder: _Folder, prefix: str) -> None:
            for name, item in folder.after_crash(names_kept(len(folder.pending))).items():
                if isinstance(item, _Folder):
                    image.make_folder(prefix + name)
                    copy(item, f"{prefix}{name}/")
                else:
                    data = content(item)
                    image.create_file(prefix + name, len(data)).write(0, memoryview(data))

        copy(self._root, "")
        return image


def _lost(file: _File, *, cut: bool) -> bytes:
    if file.synced is not None:
        return file.synced
    return b"" if cut else bytes(len(file.now))


def _torn(file: _File, chance: random.Random) -> bytes:
    choice = chance.random()
    if choice < 0.4:
        return bytes(file.now)
    if choice < 0.7 or len(file.now) == 0:
        return _lost(file, cut=choice < 0.5)
    old = _lost(file, cut=False).ljust(len(file.now), b"\0")
    sectors = range(0, len(file.now), _SECTOR_BYTES)
    return b"".join(bytes((file.now if chance.random() < 0.5 else old)[at : at + _SECTOR_BYTES]) for at in sectors)


class _Handle:
    def __init__(self, file: _File) -> None:
        self._file = file
        self.size = len(file.now)

    def write(self, offset: int, data: memoryview) -> None:
        self._file.now[offset : offset + len(data)] = data

    def sync(self) -> None:
        self._file.synced = bytes(self._file.now)

    def read_into(self, offset: int, buffer: memoryview) -> int:
        piece = self._file.now[offset : offset + len(buffer)]
        buffer[: len(piece)] = piece
        return len(piece)

    def close(self) -> None:
        pass


def _drop(names: Names, name: str) -> None:
    names.pop(name, None)


def _last(name: str) -> str:
    return name.rpartition("/")[2]


def materialise(image: MemoryStorage, path: Path) -> None:
    """Write what a crash left into a real folder, for another process to look at."""
    pending = [""]
    while pending:
        folder = pending.pop()
        (path / folder).mkdir(parents=True, exist_ok=True)
        for entry in image.list_folder(folder):
            name = f"{folder}/{entry.name}" if folder else entry.name
            if entry.kind == "folder":
                pending.append(name)
                continue
            file = image.open_file(name)
            data = bytearray(file.size)
            file.read_into(0, memoryview(data))
            (path / name).write_bytes(data)
