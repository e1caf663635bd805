"""What the library asks of a storage: names and bytes, and when they are durable.

A storage is one folder (the *root*) that holds files and one level of folders or more. Names are
relative to the root, with ``/`` between the parts; ``""`` is the root itself. A storage knows no
tensor, no step and no manifest.

Durability is explicit. After a crash of the machine:

- the bytes of a file may be lost until ``WritableFile.sync()`` has returned;
- the *existence* of a file or folder under its name (made, renamed or removed) may be undone until
  ``sync_folder()`` of the folder that holds the name has returned.

Every method raises a ``StorageError`` (``errors.py``) that names the file, never a bare ``OSError``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, runtime_checkable


@dataclass(frozen=True, slots=True)
class Entry:
    """One name in a folder. ``kind`` is "file", "folder" or "other" (a link, a pipe, a device)."""

    name: str
    kind: str


class WritableFile(Protocol):
    """A file being written once, by its maker, before anybody reads it."""

    def write(self, offset: int, data: memoryview) -> None:
        """Write all of ``data`` at ``offset``. Thread-safe for ranges that do not overlap.

        Fast where ``offset`` is a multiple of the storage's ``block_bytes`` and ``data`` lies on a
        page boundary; right in any case.
        """
        ...

    def sync(self) -> None:
        """Return when every byte written is on stable storage. After a failure the bytes must be
        taken for lost: the caller gives the file up and never syncs it again."""
        ...

    def close(self) -> None:
        """Release the descriptor. Idempotent; says nothing about durability."""
        ...


class ReadableFile(Protocol):
    """A file being read. Thread-safe."""

    size: int
    """Bytes, at the time of opening."""

    def read_into(self, offset: int, buffer: memoryview) -> int:
        """Fill ``buffer`` from ``offset``; return the bytes read, fewer only at the end of the file."""
        ...

    def close(self) -> None: ...


class Lock(Protocol):
    """The right to write into the folder."""

    def check(self) -> None:
        """Raise ``Busy`` if the lock was lost (its file replaced or taken over)."""
        ...

    def release(self) -> None:
        """Give the lock back. Idempotent."""
        ...


class ReadableStorage(Protocol):
    """One run's folder, for those who may only look."""

    description: str
    """For messages: the path or address of the root."""

    def list_folder(self, folder: str) -> list[Entry]:
        """What the folder holds, in no order. ``NotFound`` if there is no such folder."""
        ...

    def open_file(self, name: str) -> ReadableFile:
        """Open a regular file. Never follows a link out of the folder, never blocks on a pipe.
        ``NotFound``, or ``StorageError`` for anything that is not a regular file."""
        ...


@runtime_checkable
class Storage(ReadableStorage, Protocol):
    """One run's folder."""

    block_bytes: int
    """Writes at multiples of this, from page-aligned memory, take the fast path."""

    def make_root(self) -> None:
        """Make the root and its missing ancestors where they are not there, and make their names durable."""
        ...

    def make_folder(self, folder: str) -> None:
        """Make a new folder; its parent exists. ``StorageError`` if the name is taken."""
        ...

    def create_file(self, name: str, size: int) -> WritableFile:
        """Make a new file of exactly ``size`` bytes, with its space reserved where the storage can:
        a full disk is found here (``NoSpace``). ``StorageError`` if the name is taken."""
        ...

    def rename(self, old: str, new: str) -> None:
        """Give a file another name in the same folder, atomically, replacing what has that name."""
        ...

    def sync_folder(self, folder: str) -> None:
        """Return when the names in the folder are on stable storage."""
        ...

    def remove_file(self, name: str) -> None:
        """Remove a file (or a link, never its target). ``NotFound`` if there is none."""
        ...

    def remove_folder(self, folder: str) -> None:
        """Remove an empty folder (or a link to one, never its target)."""
        ...

    def lock(self, name: str, owner: str) -> Lock:
        """Take the lock kept in the file ``name``, at once, or raise ``Busy`` that says who holds it.

        ``owner`` is a line of JSON that describes the taker, kept in the file for that message.
        """
        ...
