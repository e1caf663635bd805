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


BROKEN: dict[str, Callable[[Storage], Any]] = {
    "no folder sync": NoFolderSync,
    "no file sync": NoFileSync,
    "rename before sync": RenameBeforeSync,
    "manifest first": ManifestFirst,
}
