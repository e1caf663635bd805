"""A storage in memory: for tests, ours and yours."""

from __future__ import annotations

import threading

from midstride.errors import Busy, NoSpace, NotFound, StorageError
from midstride.limits import PAGE_BYTES
from midstride.storage.base import Entry, Lock, ReadableFile, WritableFile
from midstride.storage.names import check_name


class MemoryStorage:
    """``storage.base.Storage`` in a dictionary. Thread-safe. ``capacity_bytes`` makes it fill up."""

    block_bytes = PAGE_BYTES

    def __init__(self, description: str = "memory", capacity_bytes: int | None = None) -> None:
        self.description = description
        self._capacity = capacity_bytes
        self._guard = threading.RLock()
        self._files: dict[str, bytearray] = {}
        self._folders: set[str] = set()
        self._locked: dict[str, str] = {}

    def make_root(self) -> None:
        with self._guard:
            self._folders.add("")

    def list_folder(self, folder: str) -> list[Entry]:
        with self._guard:
            self._known_folder(folder)
            found = [Entry(_last(name), "file") for name in self._files if _parent(name) == folder]
            return found + [Entry(_last(name), "folder") for name in self._folders if name and _parent(name) == folder]

    def make_folder(self, folder: str) -> None:
        with self._guard:
            self._claim(folder)
            self._folders.add(folder)

    def create_file(self, name: str, size: int) -> WritableFile:
        with self._guard:
            self._claim(name)
            used = sum(map(len, self._files.values()))
            if self._capacity is not None and used + size > self._capacity:
                raise NoSpace(
                    f"{self.description}/{name}: {size} bytes are needed and {self._capacity - used} are free"
                )
            self._files[name] = bytearray(size)
            return _MemoryFile(f"{self.description}/{name}", self._files[name])

    def open_file(self, name: str) -> ReadableFile:
        with self._guard:
            return _MemoryFile(f"{self.description}/{name}", self._files[self._known(name)])

    def rename(self, old: str, new: str) -> None:
        with self._guard:
            self._known(old)
            check_name(new, self.description)
            self._known_folder(_parent(new))
            if new in self._folders:
                raise StorageError(f"{self.description}/{new} is a folder, and was not replaced")
            self._files[new] = self._files.pop(old)

    def sync_folder(self, folder: str) -> None:
        self.list_folder(folder)

    def remove_file(self, name: str) -> None:
        with self._guard:
            del self._files[self._known(name)]

    def remove_folder(self, folder: str) -> None:
        with self._guard:
            if self.list_folder(folder):
                raise StorageError(f"{self.description}/{folder} is not empty")
            self._folders.discard(folder)

    def lock(self, name: str, owner: str) -> Lock:
        with self._guard:
            check_name(name, self.description)
            self._known_folder(_parent(name))
            if name in self._locked:
                raise Busy(f"{self.description} is held by {self._locked[name]}. Nothing was written")
            self._locked[name] = owner
            self._files[name] = bytearray(owner.encode())
            return _MemoryLock(self, name)

    def _claim(self, name: str) -> None:
        check_name(name, self.description)
        self._known_folder(_parent(name))
        if name in self._files or name in self._folders:
            raise StorageError(f"{self.description}/{name} exists already")

    def _known_folder(self, folder: str) -> None:
        check_name(folder, self.description)
        if folder not in self._folders:
            raise NotFound(f"{self.description}/{folder}: there is no such folder")

    def _known(self, name: str) -> str:
        check_name(name, self.description)
        if name in self._folders:
            raise StorageError(f"{self.description}/{name} is not a regular file")
        if name not in self._files:
            raise NotFound(f"{self.description}/{name}: there is no such file")
        return name


class _MemoryFile:
    def __init__(self, where: str, content: bytearray) -> None:
        self._where = where
        self._content = content
        self.size = len(content)

    def write(self, offset: int, data: memoryview) -> None:
        if offset + data.nbytes > self.size:
            raise StorageError(f"{self._where}: a write ends at {offset + data.nbytes}, the file at {self.size}")
        self._content[offset : offset + data.nbytes] = data.cast("B")

    def read_into(self, offset: int, buffer: memoryview) -> int:
        piece = self._content[offset : offset + len(buffer)]
        buffer[: len(piece)] = piece
        return len(piece)

    def sync(self) -> None:
        pass

    def close(self) -> None:
        pass


class _MemoryLock:
    def __init__(self, storage: MemoryStorage, name: str) -> None:
        self._storage, self._name = storage, name
        self._held = True

    def check(self) -> None:
        if not self._held:
            raise Busy(f"{self._storage.description} is not held any more")

    def release(self) -> None:
        if self._held:
            self._held = False
            self._storage._locked.pop(self._name, None)


def _parent(name: str) -> str:
    return name.rpartition("/")[0]


def _last(name: str) -> str:
    return name.rpartition("/")[2]
