"""A storage that knows what was synced, and can lose the rest.

The model of a crash of the machine: of the operations on a folder's names (made, renamed, removed)
since the folder was synced, any may have become durable, in any order, each folder for itself. Of a file's
bytes since the file was synced, all, none or some sectors have, whatever became of its name. A
rename is one operation: the old name or the new one is there, never neither. Bytes that are lost
read as zeros, or as the end of the file.
"""

from __future__ import annotations

import functools
import random
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from midstride.errors import NotFound, StorageError
from midstride.limits import PAGE_BYTES
from midstride.storage.base import Entry, Lock, ReadableFile, WritableFile
from midstride.storage.memory import MemoryStorage
from midstride.storage.names import check_name

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

    def after_crash(self, kept: Sequence[bool]) -> Names:
        names = dict(self.synced)
        for apply, durable in zip(self.pending, kept, strict=True):
            if durable:
                apply(names)
        return names


class VolatileStorage:
    """``storage.base.Storage`` in memory, with a memory of what is durable. Thread-safe."""

    block_bytes = PAGE_BYTES

    def __init__(self, description: str = "volatile") -> None:
        self.description = description
        self._guard = threading.RLock()
        self._root: _Folder | None = None
        self._locks = MemoryStorage(description)
        self._locks.make_root()

    # The storage.

    def make_root(self) -> None:
        self._root = self._root or _Folder()

    def list_folder(self, folder: str) -> list[Entry]:
        with self._guard:
            items = self._folder(folder).now.items()
            return [Entry(name, "file" if isinstance(item, _File) else "folder") for name, item in items]

    def make_folder(self, folder: str) -> None:
        self._add(folder, _Folder())

    def create_file(self, name: str, size: int) -> WritableFile:
        file = _File(bytearray(size))
        self._add(name, file)
        return _Handle(f"{self.description}/{name}", file)

    def open_file(self, name: str) -> ReadableFile:
        with self._guard:
            return _Handle(f"{self.description}/{name}", self._file(name))

    def rename(self, old: str, new: str) -> None:
        with self._guard:
            parent, last, new_last = self._parent(old), _last(old), _last(new)
            file = self._file(old)
            if self._parent(new) is not parent or isinstance(parent.now.get(new_last), _Folder):
                raise StorageError(f"{self.description}/{old} cannot be renamed to {new}: another folder, or a folder")

            def apply(names: Names) -> None:
                names.pop(last, None)
                names[new_last] = file

            parent.change(apply)

    def sync_folder(self, folder: str) -> None:
        with self._guard:
            place = self._folder(folder)
            place.synced, place.pending = dict(place.now), []

    def remove_file(self, name: str) -> None:
        with self._guard:
            self._file(name)
            last = _last(name)
            self._parent(name).change(lambda names: _drop(names, last))

    def remove_folder(self, folder: str) -> None:
        with self._guard:
            if self._folder(folder).now:
                raise StorageError(f"{self.description}/{folder} is not empty")
            last = _last(folder)
            self._parent(folder).change(lambda names: _drop(names, last))

    def lock(self, name: str, owner: str) -> Lock:
        with self._guard:
            self._parent(name)
            return self._locks.lock(name, owner)

    def _add(self, name: str, item: _File | _Folder) -> None:
        with self._guard:
            parent, last = self._parent(name), _last(name)
            if last in parent.now:
                raise StorageError(f"{self.description}/{name} exists already")

            def apply(names: Names) -> None:
                names[last] = item

            parent.change(apply)

    def _folder(self, folder: str) -> _Folder:
        check_name(folder, self.description)
        place = self._root
        for part in folder.split("/") if folder else ():
            found = place.now.get(part) if place is not None else None
            place = found if isinstance(found, _Folder) else None
        if place is None:
            raise NotFound(f"{self.description}/{folder}: there is no such folder")
        return place

    def _parent(self, name: str) -> _Folder:
        check_name(name, self.description)
        return self._folder(name.rpartition("/")[0])

    def _file(self, name: str) -> _File:
        found = self._parent(name).now.get(_last(name))
        if isinstance(found, _Folder):
            raise StorageError(f"{self.description}/{name} is not a regular file")
        if found is None:
            raise NotFound(f"{self.description}/{name}: there is no such file")
        return found

    # The crash.

    def crashes(self, seeds: int = 8) -> Iterator[MemoryStorage]:
        """What a crash now may leave: the extremes, then ``seeds`` random mixes.

        The extremes: of names nothing, everything, or only the last change that was not synced is
        kept, and of bytes everything, nothing (zeros), or nothing (files cut short).
        """
        for names_kept in (lambda n: [False] * n, lambda n: [True] * n, lambda n: [at == n - 1 for at in range(n)]):
            for content in (lambda f: bytes(f.now), lambda f: _lost(f, cut=False), lambda f: _lost(f, cut=True)):
                yield self._image(names_kept, content)
        for seed in range(seeds):
            chance = random.Random(seed)
            yield self._image(functools.partial(_some, chance=chance), functools.partial(_torn, chance=chance))

    def _image(self, names_kept: Callable[[int], Sequence[bool]], content: Callable[[_File], bytes]) -> MemoryStorage:
        image = MemoryStorage(f"{self.description} after a crash")

        def copy(folder: _Folder, prefix: str) -> None:
            for name, item in folder.after_crash(names_kept(len(folder.pending))).items():
                if isinstance(item, _Folder):
                    image.make_folder(prefix + name)
                    copy(item, f"{prefix}{name}/")
                else:
                    data = content(item)
                    image.create_file(prefix + name, len(data)).write(0, memoryview(data))

        with self._guard:
            if self._root is not None:
                image.make_root()
                copy(self._root, "")
        return image


def _some(count: int, chance: random.Random) -> list[bool]:
    return [chance.random() < 0.5 for _ in range(count)]


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
    def __init__(self, where: str, file: _File) -> None:
        self._where = where
        self._file = file
        self.size = len(file.now)

    def write(self, offset: int, data: memoryview) -> None:
        if offset + data.nbytes > self.size:
            raise StorageError(f"{self._where}: a write ends at {offset + data.nbytes}, the file at {self.size}")
        self._file.now[offset : offset + data.nbytes] = data.cast("B")

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
    """Write what a crash left into a real folder, for another process to look at. A root that was
    never made is not made here either."""
    try:
        image.list_folder("")
    except NotFound:
        return
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
