"""A storage that tells a hook of every operation before it is done: to count, to fail and to hold it up."""

from __future__ import annotations

import threading
from collections.abc import Callable

from midstride.storage import Storage
from midstride.storage.base import Entry, Lock, ReadableFile, WritableFile

Hook = Callable[[str, str], None]
"""Called with the operation ("write", "sync_folder", ...) and the name it concerns; may raise or wait."""

WAIT_SECONDS = 60.0
"""A watchdog for waits that a right build ends at once."""


class HookedStorage:
    """Any storage, with a hook before each of its operations."""

    def __init__(self, inner: Storage, hook: Hook) -> None:
        self.inner = inner
        self.hook = hook
        self.description = inner.description
        self.block_bytes = inner.block_bytes

    def make_root(self) -> None:
        self.hook("make_root", "")
        self.inner.make_root()

    def list_folder(self, folder: str) -> list[Entry]:
        self.hook("list_folder", folder)
        return self.inner.list_folder(folder)

    def make_folder(self, folder: str) -> None:
        self.hook("make_folder", folder)
        self.inner.make_folder(folder)

    def create_file(self, name: str, size: int) -> WritableFile:
        self.hook("create_file", name)
        return _HookedWritable(self.inner.create_file(name, size), name, self.hook)

    def open_file(self, name: str) -> ReadableFile:
        self.hook("open_file", name)
        return _HookedReadable(self.inner.open_file(name), name, self.hook)

    def rename(self, old: str, new: str) -> None:
        self.hook("rename", new)
        self.inner.rename(old, new)

    def sync_folder(self, folder: str) -> None:
        self.hook("sync_folder", folder)
        self.inner.sync_folder(folder)

    def remove_file(self, name: str) -> None:
        self.hook("remove_file", name)
        self.inner.remove_file(name)

    def remove_folder(self, folder: str) -> None:
        self.hook("remove_folder", folder)
        self.inner.remove_folder(folder)

    def lock(self, name: str, owner: str) -> Lock:
        self.hook("lock", name)
        return self.inner.lock(name, owner)


class _HookedWritable:
    def __init__(self, inner: WritableFile, name: str, hook: Hook) -> None:
        self._inner, self._name, self._hook = inner, name, hook

    def write(self, offset: int, data: memoryview) -> None:
        self._hook("write", self._name)
        self._inner.write(offset, data)

    def sync(self) -> None:
        self._hook("sync", self._name)
        self._inner.sync()

    def close(self) -> None:
        # The descriptor is released whatever the hook does.
        try:
            self._hook("close", self._name)
        finally:
            self._inner.close()


class _HookedReadable:
    def __init__(self, inner: ReadableFile, name: str, hook: Hook) -> None:
        self._inner, self._name, self._hook = inner, name, hook
        self.size = inner.size

    def read_into(self, offset: int, buffer: memoryview) -> int:
        self._hook("read", self._name)
        return self._inner.read_into(offset, buffer)

    def close(self) -> None:
        self._inner.close()


class Gate:
    """Holds up writes until it is opened."""

    def __init__(self, operation: str = "write") -> None:
        self._operation = operation
        self.reached = threading.Event()
        self._open = threading.Event()

    def __call__(self, operation: str, name: str) -> None:
        if operation == self._operation and not self._open.is_set():
            self.reached.set()
            assert self._open.wait(WAIT_SECONDS), "nobody opened the gate"

    def open(self) -> None:
        self._open.set()


def data_of(step: int) -> str:
    """The beginning of the names of all files of a step."""
    return f"step-{step:012d}-"
