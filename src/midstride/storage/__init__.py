"""Names and bytes: where a run's folder lies, and when what is written there is durable."""

from __future__ import annotations

import os
import re

from midstride.storage.base import Entry, Lock, ReadableFile, Storage, WritableFile
from midstride.storage.local import LocalStorage
from midstride.storage.memory import MemoryStorage

__all__ = ["Entry", "LocalStorage", "Lock", "MemoryStorage", "ReadableFile", "Storage", "WritableFile", "open_storage"]

_ADDRESS = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://|(s3|s3a|gs|gcs|az|abfs|abfss|hdfs|https?):/")
"""Also with one slash: what pathlib makes of an address, and what would become a folder named ``s3:``."""


def open_storage(path: str | os.PathLike[str] | Storage) -> Storage:
    """The storage for a path; a Storage is taken as it is. Nothing is made or looked at."""
    if isinstance(path, str | os.PathLike):
        if _ADDRESS.match(os.fsdecode(path)):
            raise ValueError(
                f"{os.fsdecode(path)!r} is an address, and object stores come with a later release. "
                "Nothing was made. Give a folder, or a Storage of your own"
            )
        return LocalStorage(path)
    if isinstance(path, Storage):
        return path
    raise TypeError(f"the run's folder must be a str, a Path or a Storage, not {type(path).__name__}")
