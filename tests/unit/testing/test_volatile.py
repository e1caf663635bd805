"""The storage that loses what was not synced: it notices each sync that is missing, and loses nothing that was made."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from midstride.errors import MidstrideError, StorageError
from midstride.storage.memory import MemoryStorage
from midstride.testing import VolatileStorage, materialise
from midstride.testing.contract import read_file, write_file

DATA = bytes(range(1, 251)) * 20


def publish(storage: VolatileStorage, *, without: str = "") -> None:
    """Put a file under its name, durably; ``without`` leaves one step out."""
    storage.make_folder("step")
    if without != "sync of the root":
        storage.sync_folder("")
    file = storage.create_file("step/draft", len(DATA))
    file.write(0, memoryview(DATA))
    if without != "sync of the file":
        file.sync()
    storage.rename("step/draft", "step/name")
    if without != "sync of the folder":
        storage.sync_folder("step")


def whole(image: MemoryStorage) -> bool:
    try:
        return read_file(image, "step/name") == DATA
    except MidstrideError:
        return False


def made() -> VolatileStorage:
    storage = VolatileStorage()
    storage.make_root()
    return storage


def test_all_that_was_synced_is_there_after_every_crash() -> None:
    storage = made()
    publish(storage)
    images = list(storage.crashes(20))
    assert len(images) == 29
    assert all(map(whole, images))


@pytest.mark.parametrize("step", ["sync of the root", "sync of the file", "sync of the folder"])
def test_a_missing_sync_is_noticed(step: str) -> None:
    storage = made()
    publish(storage, without=step)
    assert whole(next(image for image in storage.crashes() if whole(image)))  # a crash may be kind
    assert not all(map(whole, storage.crashes(0)))  # the extremes alone notice it


def test_a_rename_before_the_sync_of_what_is_renamed_is_noticed() -> None:
    """The draft replaces a good file, and is synced only then: a crash between the two leaves neither."""
    storage = made()
    write_file(storage, "name", b"good")
    storage.sync_folder("")
    file = storage.create_file("draft", 4)
    file.write(0, memoryview(b"newer"[:4]))
    storage.rename("draft", "name")
    seen = {read_file(image, "name") for image in storage.crashes(0)}
    assert seen == {b"good", b"newe", b"", bytes(4)}
    file.sync()
    assert {read_file(image, "name") for image in storage.crashes(20)} == {b"good", b"newe"}


def test_a_rename_shows_the_old_or_the_new_name_never_neither() -> None:
    storage = made()
    write_file(storage, "old", DATA)
    storage.sync_folder("")
    storage.rename("old", "new")
    seen = {tuple(entry.name for entry in image.list_folder("")) for image in storage.crashes(20)}
    assert seen == {("old",), ("new",)}


def test_names_of_one_folder_become_durable_in_any_order() -> None:
    storage = made()
    for name in ("a", "b", "c"):
        write_file(storage, name, b"x")
    seen = {"".join(sorted(entry.name for entry in image.list_folder(""))) for image in storage.crashes(60)}
    assert seen == {"", "a", "b", "c", "ab", "ac", "bc", "abc"}


def test_names_of_two_folders_do_not() -> None:
    storage = made()
    for folder in ("x", "y"):
        storage.make_folder(folder)
    storage.sync_folder("")
    write_file(storage, "x/first", b"1")
    write_file(storage, "y/second", b"2")
    seen = {(len(image.list_folder("x")), len(image.list_folder("y"))) for image in storage.crashes(60)}
    assert seen == {(0, 0), (0, 1), (1, 0), (1, 1)}


def test_what_was_removed_may_come_back_until_the_folder_is_synced() -> None:
    storage = made()
    write_file(storage, "name", DATA)
    storage.sync_folder("")
    storage.remove_file("name")
    assert {len(image.list_folder("")) for image in storage.crashes(0)} == {0, 1}
    storage.sync_folder("")
    assert {len(image.list_folder("")) for image in storage.crashes(20)} == {0}


def test_bytes_may_be_torn_and_those_that_were_synced_are_not() -> None:
    storage = made()
    file = storage.create_file("name", 4096)
    storage.sync_folder("")
    file.write(0, memoryview(b"a" * 4096))
    file.sync()
    file.write(1024, memoryview(b"b" * 2048))
    seen = {read_file(image, "name") for image in storage.crashes(80)}
    assert all(content[:1024] == b"a" * 1024 and content[3072:] == b"a" * 1024 for content in seen)
    assert any(0 < content.count(b"b") < 2048 for content in seen)
    file.sync()
    assert len({read_file(image, "name") for image in storage.crashes(20)}) == 1


def test_the_same_seeds_give_the_same_crashes() -> None:
    storage = made()
    publish(storage, without="sync of the file")
    looks: list[Callable[[], list[bool]]] = [lambda: list(map(whole, storage.crashes(30)))] * 2
    first, second = (look() for look in looks)
    assert first == second


def test_an_image_in_a_real_folder(tmp_path: Path) -> None:
    storage = made()
    publish(storage)
    *_, image = storage.crashes(0)
    materialise(image, tmp_path / "run")
    assert (tmp_path / "run" / "step" / "name").read_bytes() == DATA
    materialise(next(VolatileStorage().crashes(0)), tmp_path / "never made")
    assert not (tmp_path / "never made").exists()


def test_a_write_past_the_end_is_a_mistake_that_is_told() -> None:
    for storage in (made(), MemoryStorage()):
        storage.make_root()
        with pytest.raises(StorageError, match="a write ends at 5, the file at 4"):
            storage.create_file("name", 4).write(2, memoryview(b"123"))
