"""Watches in which order a process syncs, publishes and deletes the files of TensorFlow checkpoints.

It takes the place of the functions of ``os``, and of those of TensorFlow's file library that Python calls. Renames
inside TensorFlow's save op are not seen, and need not be: files are known by inode, so one that was synced under
another name counts as synced. One that was written to after its sync does not.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

import pytest
from tensorflow.python.lib.io import _pywrap_file_io


class FileOrder:
    """``faults`` says what was out of order; ``published`` are the steps that the state file has named, in order."""

    def __init__(
        self, folder: Path, basename: str = "model.ckpt", kinds: tuple[str, ...] = ("data", "index", "meta")
    ) -> None:
        self._folder, self._basename, self._kinds = folder.resolve(), basename, set(kinds)
        self._synced: dict[int, int] = {}
        self._folder_is_synced = True
        self.faults: list[str] = []
        self.published: list[int] = []
        self.deleted: list[str] = []

    def watch(self, monkeypatch: pytest.MonkeyPatch) -> None:
        for name in ("fsync", "fdatasync"):
            self._before(monkeypatch, os, name, lambda descriptor, *_: self._note_sync(descriptor), after=True)
        for name in ("rename", "replace", "link"):
            self._before(monkeypatch, os, name, lambda source, target, *_: self._note_rename(source, target))
        for name in ("unlink", "remove"):
            self._before(monkeypatch, os, name, lambda path, *_: self._note_deletion(path))
        self._before(
            monkeypatch, _pywrap_file_io, "RenameFile", lambda source, target, *_: self._note_rename(source, target)
        )
        self._before(monkeypatch, _pywrap_file_io, "DeleteFile", lambda path, *_: self._note_deletion(path))

    def _before(self, monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, note: Any, after: bool = False) -> None:
        real = getattr(owner, name)

        def noting(*arguments: Any, **options: Any) -> Any:
            if not after:
                note(*arguments)
            result = real(*arguments, **options)
            if after:
                note(*arguments)
            return result

        monkeypatch.setattr(owner, name, noting)

    def _note_sync(self, descriptor: Any) -> None:
        found = os.fstat(descriptor if isinstance(descriptor, int) else descriptor.fileno())
        self._synced[found.st_ino] = found.st_mtime_ns
        if found.st_ino == os.stat(self._folder).st_ino:
            self._folder_is_synced = True

    def _note_rename(self, source: Any, target: Any) -> None:
        source, target = self._inside(source), self._inside(target)
        if target is None or target.name != "checkpoint":
            return
        text = source.read_text() if source is not None else ""
        named = re.search(r'^model_checkpoint_path: ".*-(\d+)"', text, re.MULTILINE)
        if named is None:
            self.faults.append("the state file names no step")
            return
        step = int(named[1])
        if not self._is_synced(source):
            self.faults.append(f"the state file that names step {step} was renamed before it was synced")
        files = self._files_of(step)
        kinds = {file.name.removeprefix(f"{self._basename}-{step}.").split("-")[0] for file in files}
        for missing in sorted(self._kinds - kinds):
            self.faults.append(f"the state file named step {step} before its {missing} file was there")
        for file in files:
            if not self._is_synced(file):
                self.faults.append(f"the state file named step {step} before {file.name} was synced")
        self.published.append(step)
        self._folder_is_synced = False

    def _note_deletion(self, path: Any) -> None:
        found = self._inside(path)
        if found is None or not re.fullmatch(re.escape(self._basename) + r"-\d+\.(data-.*|index|meta)", found.name):
            return
        self.deleted.append(found.name)
        if not self._folder_is_synced:
            self.faults.append(f"{found.name} was deleted before the folder with the new state file was synced")
        if self.published:
            for file in self._files_of(self.published[-1]):
                if not self._is_synced(file):
                    self.faults.append(f"{found.name} was deleted before {file.name} was synced")

    def _files_of(self, step: int) -> list[Path]:
        names = re.compile(re.escape(f"{self._basename}-{step}.") + r"(data-\d{5}-of-\d{5}|index|meta)")
        return sorted(file for file in self._folder.iterdir() if names.fullmatch(file.name))

    def _is_synced(self, file: Path) -> bool:
        found = file.stat()
        return self._synced.get(found.st_ino) == found.st_mtime_ns

    def _inside(self, path: Any) -> Path | None:
        full = Path(os.fsdecode(path)).absolute()
        return full if full.parent.resolve() == self._folder else None
