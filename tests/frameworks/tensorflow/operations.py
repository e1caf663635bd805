"""Numbers the file operations that a process makes in one folder, and lets a test act at the n-th.

Counted is what goes through Python: the functions of ``os``, those of TensorFlow's file library, and the run of the
private session that writes data and index, before it and after it. Reading and looking are not counted. What happens
inside that run is TensorFlow's own; test_hook_kill.py reaches it from outside.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable
from typing import Any

import pytest
from tensorflow.python.lib.io import _pywrap_file_io

from midstride.tensorflow import snapshot

_OF_PATHS = ("rename", "replace", "link", "unlink", "remove", "mkdir", "rmdir", "open")
_OF_DESCRIPTORS = ("fsync", "fdatasync", "write", "pwrite", "ftruncate")
_OF_TENSORFLOW = ("RenameFile", "DeleteFile", "DeleteRecursively", "CreateDir", "RecursivelyCreateDir", "CopyFile")
_OF_WRITABLE_FILES = ("append", "flush", "close")
_link, _unlink = os.link, os.unlink
"""Unwatched."""


class Operations:
    """``act`` is called with each operation's name and path, before it; what it raises takes its place.

    ``seen`` are the operations so far, as "name path relative to the folder".
    """

    def __init__(self, folder: str, act: Callable[[str, str], None] = lambda name, path: None) -> None:
        self._folder = os.path.abspath(folder)
        self._act = act
        self._lock = threading.RLock()
        self._descriptors: dict[int, str] = {}
        self._quiet = threading.local()
        self.seen: list[str] = []

    def watch(self, monkeypatch: pytest.MonkeyPatch) -> None:
        for name in _OF_PATHS:
            monkeypatch.setattr(os, name, self._of_path(name, getattr(os, name)))
        monkeypatch.setattr(os, "close", self._close(os.close))
        for name in _OF_DESCRIPTORS:
            monkeypatch.setattr(os, name, self._of_descriptor(name, getattr(os, name)))
        for name in _OF_TENSORFLOW:
            monkeypatch.setattr(_pywrap_file_io, name, self._of_path(name, getattr(_pywrap_file_io, name)))
        monkeypatch.setattr(_pywrap_file_io, "WritableFile", self._writable_file(_pywrap_file_io.WritableFile))
        monkeypatch.setattr(snapshot._Writer, "run", self._save_op(snapshot._Writer.run))

    def _note(self, name: str, path: Any) -> None:
        full = os.path.abspath(os.fsdecode(path))
        inside = full == self._folder or full.startswith(self._folder + os.sep)
        if not inside or getattr(self._quiet, "yes", False):
            return
        with self._lock:
            self.seen.append(f"{name} {os.path.relpath(full, self._folder)}")
            self._quiet.yes = True  # what ``act`` does is not ours
            try:
                self._act(name, full)
            finally:
                self._quiet.yes = False

    def _of_path(self, name: str, real: Any) -> Any:
        def operation(path: Any, *arguments: Any, **options: Any) -> Any:
            if isinstance(path, int):
                return real(path, *arguments, **options)
            self._note(name, path)
            result = real(path, *arguments, **options)
            if name == "open":
                self._descriptors[result] = os.fsdecode(path)
            return result

        return operation

    def _close(self, real: Any) -> Any:
        def close(descriptor: int) -> None:
            self._descriptors.pop(descriptor, None)
            real(descriptor)

        return close

    def _of_descriptor(self, name: str, real: Any) -> Any:
        def operation(descriptor: Any, *arguments: Any, **options: Any) -> Any:
            if descriptor in self._descriptors:
                self._note(name, self._descriptors[descriptor])
            return real(descriptor, *arguments, **options)

        return operation

    def _writable_file(self, real: Any) -> Any:
        note = self._note

        class File:
            def __init__(self, path: Any, mode: Any) -> None:
                note("WritableFile", path)
                self._path, self._file = path, real(path, mode)

            def __getattr__(self, name: str) -> Any:
                if name in _OF_WRITABLE_FILES:
                    note(name, self._path)
                return getattr(self._file, name)

        return File

    def _save_op(self, real: Any) -> Any:
        def run(writer: Any, filename: str, *arguments: Any) -> Any:
            self._note("save op of", filename)
            result = real(writer, filename, *arguments)
            self._note("after save op of", filename)
            return result

        return run


class Disk:
    """Knows what is on stable storage, and what a power loss would leave.

    A file's bytes are, once it is synced and not written to after that; it is known by its inode. The folder's names are
    those of its last sync, kept as hard links in ``shadow``.
    """

    def __init__(self, folder: str, shadow: str) -> None:
        self._folder, self._shadow = folder, shadow
        self._synced: dict[int, int] = {}
        os.makedirs(shadow, exist_ok=True)

    def watch(self, monkeypatch: pytest.MonkeyPatch) -> None:
        for name in ("fsync", "fdatasync"):
            monkeypatch.setattr(os, name, self._noting(getattr(os, name)))

    def _noting(self, real: Any) -> Any:
        def sync(descriptor: Any) -> None:
            real(descriptor)
            found = os.fstat(descriptor)
            self._synced[found.st_ino] = found.st_mtime_ns
            if found.st_ino == os.stat(self._folder).st_ino:
                self._take_names()

        return sync

    def _take_names(self) -> None:
        for entry in list(os.scandir(self._shadow)):
            _unlink(entry.path)
        for entry in os.scandir(self._folder):
            with contextlib.suppress(FileNotFoundError):  # a draft that another thread has just renamed
                if entry.is_file():
                    _link(entry.path, os.path.join(self._shadow, entry.name))

    def unsynced(self) -> list[int]:
        """The inodes whose bytes a power loss would take."""
        found = [entry.stat() for folder in (self._folder, self._shadow) for entry in os.scandir(folder)]
        return sorted({status.st_ino for status in found if self._synced.get(status.st_ino) != status.st_mtime_ns})


def after_power_loss(names: str, unsynced: list[int], target: str) -> None:
    """Copy a folder as it would be found: of each unsynced file only the first half of its bytes is there."""
    os.makedirs(target)
    for entry in os.scandir(names):
        if not entry.is_file():
            continue
        with open(entry.path, "rb") as file:
            content = file.read()
        if entry.inode() in unsynced:
            content = content[: len(content) // 2]
        with open(os.path.join(target, entry.name), "wb") as file:
            file.write(content)
