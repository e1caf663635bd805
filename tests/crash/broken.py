"""Deliberately broken commits. Each sweep is run against them too, and must notice."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from midstride.storage.base import Storage, WritableFile


class _Wrapper:
    """Passes everything on."""

    def __init__(self, inner: Storage) -> None:
        self._inner = inner
        self.description, self.block_bytes = inner.description, inner.block_bytes

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


class NoFolderSync(_Wrapper):
    """The names are never synced."""

    def sync_folder(self, folder: str) -> None:
        pass


class NoFileSync(_Wrapper):
    """The bytes are never synced."""

    def create_file(self, name: str, size: int) -> WritableFile:
        return _Later(self._inner.create_file(name, size), lambda sync: None)


class _Later:
    def __init__(self, file: WritableFile, put_off: Callable[[Callable[[], None]], None]) -> None:
        self._file, self._put_off = file, put_off

    def write(self, offset: int, data: memoryview) -> None:
        self._file.write(offset, data)

    def sync(self) -> None:
        self._put_off(self._file.sync)

    def close(self) -> None:
        self._file.close()


class RenameBeforeSync(_Wrapper):
    """The manifest gets its name first and is synced afterwards."""

    def __init__(self, inner: Storage) -> None:
        super().__init__(inner)
        self._put_off: list[Callable[[], None]] = []

    def create_file(self, name: str, size: int) -> WritableFile:
        file = self._inner.create_file(name, size)
        return _Later(file, self._put_off.append) if name.endswith(".tmp") else file

    def rename(self, old: str, new: str) -> None:
        self._inner.rename(old, new)
        while self._put_off:
            self._put_off.pop()()


class ManifestFirst(_Wrapper):
    """The data is synced only after the manifest was published."""

    def __init__(self, inner: Storage) -> None:
        super().__init__(inner)
        self._put_off: list[Callable[[], None]] = []

    def create_file(self, name: str, size: int) -> WritableFile:
        file = self._inner.create_file(name, size)
        return _Later(file, self._put_off.append) if name.endswith(".safetensors") else file

    def rename(self, old: str, new: str) -> None:
        self._inner.rename(old, new)
        self._inner.sync_folder(new.rpartition("/")[0])
        while self._put_off:
            self._put_off.pop()()


class NoFolderSyncBeforeManifest(_Wrapper):
    """The names of the data files are not synced before the manifest is published."""

    def sync_folder(self, folder: str) -> None:
        names = {entry.name for entry in self._inner.list_folder(folder)}
        if not folder or "manifest.json" in names or "manifest.json.tmp" in names:
            self._inner.sync_folder(folder)


class NoRootSyncBeforeManifest(_Wrapper):
    """The name of the step folder is not synced."""

    def sync_folder(self, folder: str) -> None:
        if folder:
            self._inner.sync_folder(folder)


class NoFolderSyncAfterRename(_Wrapper):
    """The manifest's new name is not synced before "saved" is said."""

    def sync_folder(self, folder: str) -> None:
        if not folder or "manifest.json" not in {entry.name for entry in self._inner.list_folder(folder)}:
            self._inner.sync_folder(folder)


class NoFolderSyncWhenRetiring(_Wrapper):
    """The data is deleted before it is certain that the manifest is gone."""

    def __init__(self, inner: Storage) -> None:
        super().__init__(inner)
        self._retired: set[str] = set()

    def remove_file(self, name: str) -> None:
        self._inner.remove_file(name)
        if name.endswith("/manifest.json"):
            self._retired.add(name.rpartition("/")[0])

    def sync_folder(self, folder: str) -> None:
        if folder not in self._retired:
            self._inner.sync_folder(folder)


BROKEN: dict[str, Callable[[Storage], Any]] = {
    "no folder sync": NoFolderSync,
    "no file sync": NoFileSync,
    "rename before sync": RenameBeforeSync,
    "manifest first": ManifestFirst,
    "names of the data not synced": NoFolderSyncBeforeManifest,
    "name of the step folder not synced": NoRootSyncBeforeManifest,
    "name of the manifest not synced": NoFolderSyncAfterRename,
    "retirement not synced": NoFolderSyncWhenRetiring,
}
