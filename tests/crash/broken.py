"""Deliberately broken variants of the library. Each sweep is run against some of them too, and must notice each.

A variant is a storage that is put around the run's own, or another function in the place of one of the library's.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any
from unittest import mock

import midstride as ms
from midstride.format import layout
from midstride.save import commit
from midstride.save.run_folder import RunFolder
from midstride.save.writer import Writer
from midstride.storage.base import Storage, WritableFile


@dataclass(frozen=True)
class Override:
    """``function`` is called in the place of ``owner.name``, which it is given first."""

    owner: Any
    name: str
    function: Callable[..., Any]


Variant = Callable[[Storage], Any] | Override


@contextlib.contextmanager
def in_force(variant: Variant) -> Iterator[Callable[[Storage], Any]]:
    """What to put around a run's storage while the variant holds."""
    if not isinstance(variant, Override):
        yield variant
        return
    original, function = getattr(variant.owner, variant.name), variant.function
    with mock.patch.object(variant.owner, variant.name, lambda *args, **named: function(original, *args, **named)):
        yield lambda storage: storage


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


POWER_LOSS: dict[str, Callable[[Storage], Any]] = {
    "no folder sync": NoFolderSync,
    "no file sync": NoFileSync,
    "rename before sync": RenameBeforeSync,
    "manifest first": ManifestFirst,
    "names of the data not synced": NoFolderSyncBeforeManifest,
    "name of the step folder not synced": NoRootSyncBeforeManifest,
    "name of the manifest not synced": NoFolderSyncAfterRename,
    "retirement not synced": NoFolderSyncWhenRetiring,
}


# Noticed by the sweep of kills: the page cache survives, so these are faults of order and not of syncs.


class ManifestInPlace(_Wrapper):
    """The manifest is written under its own name, without a draft."""

    def create_file(self, name: str, size: int) -> WritableFile:
        return self._inner.create_file(_without_draft(name), size)

    def rename(self, old: str, new: str) -> None:
        if _without_draft(old) == old:
            self._inner.rename(old, new)


def _without_draft(name: str) -> str:
    folder, _, last = name.rpartition("/")
    return f"{folder}/{layout.MANIFEST}" if last == layout.MANIFEST_DRAFT else name


class ManifestBeforeData(_Wrapper):
    """The data is written only after the manifest was published."""

    def __init__(self, inner: Storage) -> None:
        super().__init__(inner)
        self._put_off: list[Callable[[], None]] = []

    def create_file(self, name: str, size: int) -> WritableFile:
        file = self._inner.create_file(name, size)
        return _WrittenLater(file, self._put_off) if name.endswith(".safetensors") else file

    def rename(self, old: str, new: str) -> None:
        self._inner.rename(old, new)
        while self._put_off:
            self._put_off.pop(0)()


class _WrittenLater:
    def __init__(self, file: WritableFile, put_off: list[Callable[[], None]]) -> None:
        self._file, self._put_off = file, put_off

    def write(self, offset: int, data: memoryview) -> None:
        copy = memoryview(bytes(data))
        self._put_off.append(lambda: self._file.write(offset, copy))

    def sync(self) -> None:
        self._put_off.append(self._file.sync)

    def close(self) -> None:
        self._put_off.append(self._file.close)


class SaidBeforePublished(_Wrapper):
    """The manifest gets its name only with the next save, or when the storage is looked at again."""

    def __init__(self, inner: Storage) -> None:
        super().__init__(inner)
        self._put_off: list[tuple[str, str]] = []

    def rename(self, old: str, new: str) -> None:
        if new.endswith(f"/{layout.MANIFEST}"):
            self._put_off.append((old, new))
        else:
            self._inner.rename(old, new)

    def list_folder(self, folder: str) -> Any:
        while self._put_off:
            self._inner.rename(*self._put_off.pop())
        return self._inner.list_folder(folder)


class DataDeletedBeforeManifest(_Wrapper):
    """A retirement deletes the data first."""

    def remove_file(self, name: str) -> None:
        folder, _, last = name.rpartition("/")
        if last == layout.MANIFEST:
            for entry in self._inner.list_folder(folder):
                if layout.is_data_file(entry.name):
                    self._inner.remove_file(f"{folder}/{entry.name}")
        self._inner.remove_file(name)


def _retire_then_publish(publish: Callable[..., Any], writer: Writer, run: RunFolder, attempt: Any) -> Any:
    run.retire(None, attempt.job.replaces)
    return publish(writer, run, attempt)


KILLS: dict[str, tuple[str, Variant]] = {
    "manifest in place": ("two_saves", ManifestInPlace),
    "manifest before the data": ("two_saves", ManifestBeforeData),
    "said before it is published": ("two_saves", SaidBeforePublished),
    "replaced one retired first": ("overwrite", Override(Writer, "_publish", _retire_then_publish)),
    "data deleted before the manifest": ("retirement", DataDeletedBeforeManifest),
    "debris never swept": ("overwrite", Override(commit, "sweep", lambda sweep, storage, folders, *alive: [])),
}
"""Each with the run in which it must show."""


# Noticed by the sweep of errors.


class _Careless:
    """A file that swallows the errors of some operations."""

    def __init__(self, file: WritableFile, swallowed: str) -> None:
        self._file, self._swallowed = file, swallowed

    def _try(self, name: str, *args: Any) -> None:
        with contextlib.suppress(ms.StorageError) if name == self._swallowed else contextlib.nullcontext():
            getattr(self._file, name)(*args)

    def write(self, offset: int, data: memoryview) -> None:
        self._try("write", offset, data)

    def sync(self) -> None:
        self._try("sync")

    def close(self) -> None:
        self._file.close()


class WriteErrorsSwallowed(_Wrapper):
    """A write that failed is taken for one that went well."""

    def create_file(self, name: str, size: int) -> WritableFile:
        return _Careless(self._inner.create_file(name, size), "write")


class SyncErrorsSwallowed(_Wrapper):
    """A sync that failed is taken for one that went well."""

    def create_file(self, name: str, size: int) -> WritableFile:
        return _Careless(self._inner.create_file(name, size), "sync")


class FolderSyncErrorsSwallowed(_Wrapper):
    """A folder whose names could not be synced is taken for durable."""

    def sync_folder(self, folder: str) -> None:
        with contextlib.suppress(ms.StorageError):
            self._inner.sync_folder(folder)


class SyncedAgain(_Wrapper):
    """A sync that failed is tried again on the same file, whose bytes the kernel may have dropped."""

    def create_file(self, name: str, size: int) -> WritableFile:
        return _Persistent(self._inner.create_file(name, size))


class _Persistent(_Later):
    def __init__(self, file: WritableFile) -> None:
        super().__init__(file, self._twice)

    def _twice(self, sync: Callable[[], None]) -> None:
        try:
            sync()
        except ms.Unavailable:
            sync()


def _publish_then_retire(publish: Callable[..., Any], writer: Writer, run: RunFolder, attempt: Any) -> Any:
    try:
        return publish(writer, run, attempt)
    finally:
        run.retire(attempt.job.retention, attempt.job.replaces)


ERRORS: dict[str, tuple[str, Variant]] = {
    "write errors swallowed": ("two_saves", WriteErrorsSwallowed),
    "sync errors swallowed": ("two_saves", SyncErrorsSwallowed),
    "folder sync errors swallowed": ("two_saves", FolderSyncErrorsSwallowed),
    "a failed sync tried again": ("two_saves", SyncedAgain),
    "a failed attempt stays": ("two_saves", Override(RunFolder, "discard", lambda discard, run, folder: None)),
    "retired although the commit failed": ("overwrite", Override(Writer, "_publish", _publish_then_retire)),
}
"""Each with the run in which it must show."""
