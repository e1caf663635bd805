"""Every storage against the one contract."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

import midstride as ms
from midstride.testing import FaultyStorage, VolatileStorage
from midstride.testing.contract import StorageContract


class TestLocal(StorageContract):
    @pytest.fixture
    def storage(self, tmp_path: Path) -> ms.Storage:
        return ms.LocalStorage(tmp_path / "some" / "run")


@pytest.mark.skipif(not Path("/dev/shm").is_dir(), reason="no /dev/shm: no file system in memory to try")
class TestLocalInMemory(StorageContract):
    """A file system of another kind: tmpfs."""

    @pytest.fixture
    def storage(self) -> Iterator[ms.Storage]:
        with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
            yield ms.LocalStorage(Path(folder) / "run")


class TestLocalWithoutDirectWrites(StorageContract):
    @pytest.fixture
    def storage(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ms.Storage:
        monkeypatch.setattr("midstride.storage.local._DIRECT", 0)
        return ms.LocalStorage(tmp_path / "run")


class TestMemory(StorageContract):
    @pytest.fixture
    def storage(self) -> ms.Storage:
        return ms.MemoryStorage()


class TestFaulty(StorageContract):
    @pytest.fixture
    def storage(self) -> ms.Storage:
        return FaultyStorage(ms.MemoryStorage())


class TestVolatile(StorageContract):
    @pytest.fixture
    def storage(self) -> ms.Storage:
        return VolatileStorage()
