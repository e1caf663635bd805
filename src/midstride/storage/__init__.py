"""Names and bytes: where a run's folder lies, and when what is written there is durable."""

from __future__ import annotations

import os

from midstride.storage.base import Entry, Lock, ReadableFile, Storage, WritableFile
from midstride.storage.local import LocalStorage
from midstride.storage.memory import MemoryStorage

__all__ = ["Entry", "LocalStorage", "Lock", "MemoryStorage", "ReadableFile", "Storage", "WritableFile", "open_storage"]


def open_storage(path: str | os.PathLike[str] | Storage) -> Storage:
    """The storage for a path; a Storage is taken as it is. Nothing is made or looked at."""
    if isinstance(path, str | os.PathLike):
        text = os.fspath(path)
        if isinstance(text, str) and "://" in text:
            raise ValueError(f"{text!r}: object stores are not supported yet; give a folder, or a Storage of your own")
        return LocalStorage(path)
    if isinstance(path, Storage):
        return path
    raise TypeError(f"the run's folder must be a str, a Path or a Storage, not {type(path).__name__}")
