"""What every storage must do, as a suite: derive from it and say how to make one.

    class TestMine(StorageContract):
        @pytest.fixture
        def storage(self, tmp_path):
            return MyStorage(tmp_path / "run")

Needs pytest. The storage that the fixture gives is empty; its root is not made.
"""

from __future__ import annotations

import mmap
import threading

import pytest

from midstride.errors import Busy, NotFound, StorageError
from midstride.storage.base import Entry, Storage


def write_file(storage: Storage, name: str, data: bytes, *, pieces: int = 1 << 30) -> None:
    """A file with this content, written in pieces of so many bytes, synced."""
    file = storage.create_file(name, len(data))
    for offset in range(0, len(data), pieces):
        file.write(offset, memoryview(data)[offset : offset + pieces])
    file.sync()
    file.close()


def read_file(storage: Storage, name: str) -> bytes:
    """A file's content."""
    file = storage.open_file(name)
    buffer = bytearray(file.size)
    assert file.read_into(0, memoryview(buffer)) == file.size
    file.close()
    return bytes(buffer)


class StorageContract:
    """One suite for every storage."""

    @pytest.fixture
    def storage(self) -> Storage:
        raise NotImplementedError("derive from StorageContract and give a storage")

    @pytest.fixture(autouse=True)
    def _root(self, storage: Storage) -> None:
        storage.make_root()

    def test_is_a_storage(self, storage: Storage) -> None:
        assert isinstance(storage, Storage)
        assert storage.block_bytes % 512 == 0
        assert storage.description

    def test_make_root_may_be_repeated(self, storage: Storage) -> None:
        storage.make_root()
        assert storage.list_folder("") == []

    def test_listing(self, storage: Storage) -> None:
        storage.make_folder("step")
        write_file(storage, "step/a", b"1")
        write_file(storage, "b", b"")
        assert sorted(storage.list_folder(""), key=lambda e: e.name) == [Entry("b", "file"), Entry("step", "folder")]
        assert storage.list_folder("step") == [Entry("a", "file")]
        with pytest.raises(NotFound):
            storage.list_folder("nowhere")

    @pytest.mark.parametrize("size", [0, 1, 511, 4095, 4096, 4097, 12288, 70001])
    def test_content_and_size_are_exact(self, storage: Storage, size: int) -> None:
        data = bytes(range(256)) * (size // 256 + 1)
        write_file(storage, "file", data[:size])
        assert read_file(storage, "file") == data[:size]
        assert storage.open_file("file").size == size

    @pytest.mark.parametrize("piece", [1000, 4096, 8192, 10007])
    def test_writing_in_pieces_from_any_memory(self, storage: Storage, piece: int) -> None:
        data = bytes(range(251)) * 160
        with mmap.mmap(-1, 65536) as region:  # page-aligned, as staging memory is
            region[: len(data)] = data
            file = storage.create_file("file", len(data))
            view = memoryview(region)
            for offset in reversed(range(0, len(data), piece)):
                with view[offset : min(offset + piece, len(data))] as part:
                    file.write(offset, part)
            view.release()
            file.sync()
            file.close()
            file.close()
        assert read_file(storage, "file") == data

    def test_writing_from_many_threads(self, storage: Storage) -> None:
        piece, count = 5003, 24  # not aligned: neighbours share blocks
        data = bytes(range(251)) * (piece * count // 251 + 1)
        data = data[: piece * count]
        file = storage.create_file("file", len(data))
        start = threading.Barrier(4)

        def write(first: int) -> None:
            start.wait()
            for number in range(first, count, 4):
                file.write(number * piece, memoryview(data)[number * piece : (number + 1) * piece])

        threads = [threading.Thread(target=write, args=(first,)) for first in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        file.sync()
        file.close()
        assert read_file(storage, "file") == data

    def test_reading_parts_and_past_the_end(self, storage: Storage) -> None:
        write_file(storage, "file", b"0123456789")
        file = storage.open_file("file")
        buffer = bytearray(4)
        assert file.read_into(3, memoryview(buffer)) == 4
        assert buffer == b"3456"
        assert file.read_into(8, memoryview(buffer)) == 2
        assert buffer[:2] == b"89"
        assert file.read_into(10, memoryview(buffer)) == 0

    def test_names_that_are_taken_or_missing(self, storage: Storage) -> None:
        write_file(storage, "file", b"old")
        storage.make_folder("folder")
        for make in (lambda: storage.create_file("file", 3), lambda: storage.make_folder("folder")):
            with pytest.raises(StorageError):
                make()
        assert read_file(storage, "file") == b"old"
        for ask in (
            lambda: storage.open_file("none"),
            lambda: storage.remove_file("none"),
            lambda: storage.create_file("nowhere/file", 1),
            lambda: storage.rename("none", "other"),
        ):
            with pytest.raises(NotFound):
                ask()

    @pytest.mark.parametrize("name", ["../x", "a/../../x", "/x", "a//b", "./a", "a/", "a\0b", "a\\b", ".."])
    def test_names_that_leave_the_root_are_refused(self, storage: Storage, name: str) -> None:
        storage.make_folder("a")
        write_file(storage, "file", b"x")
        for use in (
            lambda: storage.create_file(name, 1),
            lambda: storage.make_folder(name),
            lambda: storage.open_file(name),
            lambda: storage.list_folder(name),
            lambda: storage.rename("file", name),
            lambda: storage.rename(name, "file"),
            lambda: storage.remove_file(name),
            lambda: storage.remove_folder(name),
            lambda: storage.lock(name, "{}"),
        ):
            with pytest.raises(StorageError) as caught:
                use()
            assert not isinstance(caught.value, NotFound)  # refused, not looked for
        assert {entry.name for entry in storage.list_folder("")} == {"a", "file"}
        assert storage.list_folder("a") == []

    @pytest.mark.parametrize("name", ["größe", "日本", "a b", "it's", "%41", "-rf", "~", "*"])
    def test_names_that_are_odd_and_right(self, storage: Storage, name: str) -> None:
        storage.make_folder(name)
        write_file(storage, f"{name}/{name}", b"x")
        storage.sync_folder(name)
        assert storage.list_folder("") == [Entry(name, "folder")]
        assert storage.list_folder(name) == [Entry(name, "file")]
        assert read_file(storage, f"{name}/{name}") == b"x"

    def test_a_folder_is_no_file(self, storage: Storage) -> None:
        storage.make_folder("folder")
        write_file(storage, "file", b"x")
        for use in (
            lambda: storage.open_file("folder"),
            lambda: storage.remove_file("folder"),
            lambda: storage.rename("file", "folder"),
        ):
            with pytest.raises(StorageError) as caught:
                use()
            # What is there must not be told as missing: callers take NotFound for "never saved".
            assert not isinstance(caught.value, NotFound)
        assert {entry.name for entry in storage.list_folder("")} == {"folder", "file"}

    def test_a_file_that_is_open_outlives_its_name(self, storage: Storage) -> None:
        write_file(storage, "file", b"old")
        file = storage.open_file("file")
        storage.remove_file("file")
        write_file(storage, "file", b"NEW")
        buffer = bytearray(3)
        file.read_into(0, memoryview(buffer))
        file.close()
        assert buffer == b"old"

    def test_rename_replaces(self, storage: Storage) -> None:
        write_file(storage, "draft", b"new")
        write_file(storage, "name", b"old")
        storage.rename("draft", "name")
        storage.sync_folder("")
        assert storage.list_folder("") == [Entry("name", "file")]
        assert read_file(storage, "name") == b"new"

    def test_removing(self, storage: Storage) -> None:
        storage.make_folder("step")
        write_file(storage, "step/a", b"1")
        with pytest.raises(StorageError):
            storage.remove_folder("step")
        storage.remove_file("step/a")
        storage.sync_folder("step")
        storage.remove_folder("step")
        assert storage.list_folder("") == []

    def test_one_lock(self, storage: Storage) -> None:
        lock = storage.lock(".lock", '{"pid": 1}')
        lock.check()
        with pytest.raises(Busy):
            storage.lock(".lock", '{"pid": 2}')
        lock.release()
        lock.release()
        with pytest.raises(Busy):
            lock.check()
        second = storage.lock(".lock", '{"pid": 2}')
        second.check()
        second.release()
