"""A storage that throws the bytes away once their digest is computed: what is left is Midstride's own tax."""

from __future__ import annotations

from midstride import LocalStorage
from midstride.storage import WritableFile


class DiscardingStorage(LocalStorage):
    """A folder in which data files stay empty; manifests are written."""

    shared = True

    def create_file(self, name: str, size: int) -> WritableFile:
        return super().create_file(name, size) if ".json" in name else _Nowhere()


class _Nowhere:
    def write(self, offset: int, data: memoryview) -> None: ...

    def sync(self) -> None: ...

    def close(self) -> None: ...
