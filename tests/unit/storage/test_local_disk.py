"""What ``LocalStorage`` does beyond the contract: direct writes, reserved space, links, modes, syncs."""

from __future__ import annotations

import errno
import mmap
import os
import stat
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

import midstride as ms
from midstride.limits import PAGE_BYTES
from midstride.storage import local
from midstride.storage.local import LocalStorage
from midstride.testing.contract import read_file, write_file


@pytest.fixture
def storage(tmp_path: Path) -> LocalStorage:
    made = LocalStorage(tmp_path / "run")
    made.make_root()
    return made


def aligned(nbytes: int) -> memoryview:
    data = np.frombuffer(mmap.mmap(-1, nbytes), np.uint8)
    data[:] = np.arange(nbytes, dtype=np.uint64).astype(np.uint8)
    return data.data


class Calls:
    """Counts calls of functions of ``os`` and passes them on."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *names: str) -> None:
        self.log: list[tuple[str, object]] = []
        for name in names:
            real = getattr(os, name)

            def counted(*arguments: object, _real: object = real, _name: str = name) -> object:
                self.log.append((_name, arguments[0]))
                return _real(*arguments)  # type: ignore[operator]

            monkeypatch.setattr(os, name, counted)


@pytest.mark.parametrize("size", [PAGE_BYTES * 3, PAGE_BYTES * 3 + 17])
def test_staged_memory_is_written_directly_to_its_last_byte(
    storage: LocalStorage, size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = storage.create_file("file", size)
    if file._direct < 0:  # type: ignore[attr-defined]
        pytest.skip("this file system has no direct writes")
    calls = Calls(monkeypatch, "pwrite")
    data = aligned(PAGE_BYTES * 4)[:size]
    file.write(0, data)
    file.sync()
    assert {descriptor for _, descriptor in calls.log} == {file._direct}  # type: ignore[attr-defined]
    file.close()
    assert os.stat(Path(storage.description) / "file").st_size == size
    assert read_file(storage, "file") == bytes(data)


def test_memory_that_is_not_aligned_is_written_all_the_same(storage: LocalStorage) -> None:
    data = aligned(PAGE_BYTES * 4)
    file = storage.create_file("file", PAGE_BYTES * 3)
    file.write(0, data[1 : 1 + PAGE_BYTES * 3])
    file.sync()
    file.close()
    assert read_file(storage, "file") == bytes(data[1 : 1 + PAGE_BYTES * 3])


def test_space_is_reserved_before_anything_is_written(storage: LocalStorage) -> None:
    storage.create_file("file", 8 * 2**20)
    status = os.stat(Path(storage.description) / "file")
    assert status.st_blocks * 512 >= status.st_size == 8 * 2**20


def test_a_full_disk_is_found_when_the_file_is_made(storage: LocalStorage, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local, "_fallocate", lambda *_: errno.ENOSPC)
    with pytest.raises(ms.NoSpace, match=r"5000 bytes are needed and \d+ are free"):
        storage.create_file("file", 5000)
    assert storage.list_folder("") == []


@pytest.mark.parametrize("code", [errno.EOPNOTSUPP, errno.ENOSYS])
def test_without_fallocate_files_are_right_too(
    storage: LocalStorage, code: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(local, "_fallocate", lambda *_: code)
    write_file(storage, "file", bytes(range(200)) * 50)
    assert read_file(storage, "file") == bytes(range(200)) * 50


def test_short_writes_and_reads_are_finished(storage: LocalStorage, monkeypatch: pytest.MonkeyPatch) -> None:
    write, read = os.pwrite, os.preadv
    monkeypatch.setattr(os, "pwrite", lambda fd, data, offset: write(fd, memoryview(data)[:1000], offset))
    monkeypatch.setattr(os, "preadv", lambda fd, buffers, offset: read(fd, [buffers[0][:777]], offset))
    data = bytes(range(251)) * 40
    write_file(storage, "file", data)
    assert read_file(storage, "file") == data


def test_new_folders_are_synced_into_their_parents(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: list[str] = []
    real = local._sync_folder
    monkeypatch.setattr(local, "_sync_folder", lambda path: (synced.append(path), real(path)))
    LocalStorage(tmp_path / "a" / "b" / "run").make_root()
    assert synced == [str(tmp_path), str(tmp_path / "a"), str(tmp_path / "a" / "b")]


@pytest.mark.parametrize("name", ["../x", "a/../../x", "/etc/passwd", "a//b", "./a", "a\0b", "C:\\x", "a/"])
def test_names_that_leave_the_folder_are_refused(storage: LocalStorage, name: str) -> None:
    for use in (storage.open_file, storage.remove_file, storage.list_folder, lambda n: storage.create_file(n, 1)):
        with pytest.raises(ms.StorageError, match="is not a name inside"):
            use(name)


def test_links_pipes_and_devices_are_not_opened(storage: LocalStorage, tmp_path: Path) -> None:
    root = Path(storage.description)
    (tmp_path / "secret").write_text("secret")
    (root / "link").symlink_to(tmp_path / "secret")
    os.mkfifo(root / "pipe")
    (root / "zero").symlink_to("/dev/zero")
    for name in ("link", "pipe", "zero"):
        with pytest.raises(ms.StorageError):
            storage.open_file(name)
    kinds = {entry.name: entry.kind for entry in storage.list_folder("")}
    assert kinds == {"link": "other", "pipe": "other", "zero": "other"}
    storage.remove_file("link")
    assert (tmp_path / "secret").read_text() == "secret"


def test_a_linked_folder_is_read_and_only_the_link_removed(storage: LocalStorage, tmp_path: Path) -> None:
    elsewhere = tmp_path / "big disk"
    elsewhere.mkdir()
    (elsewhere / "file").write_bytes(b"moved")
    (Path(storage.description) / "step").symlink_to(elsewhere)
    assert read_file(storage, "step/file") == b"moved"
    storage.remove_folder("step")
    assert (elsewhere / "file").read_bytes() == b"moved"


@pytest.fixture
def umask(request: pytest.FixtureRequest) -> Iterator[int]:
    before = os.umask(request.param)
    yield request.param
    os.umask(before)


@pytest.mark.parametrize("umask", [0o022, 0o002, 0o077], indirect=True)
def test_modes_follow_the_umask(storage: LocalStorage, umask: int) -> None:
    write_file(storage, "file", b"x" * 9000)
    storage.make_folder("folder")
    root = Path(storage.description)
    assert stat.S_IMODE((root / "file").stat().st_mode) == 0o666 & ~umask
    assert stat.S_IMODE((root / "folder").stat().st_mode) == 0o777 & ~umask


@pytest.mark.parametrize(
    ("code", "kind"),
    [
        (errno.ENOSPC, ms.NoSpace),
        (errno.EDQUOT, ms.NoSpace),
        (errno.EFBIG, ms.NoSpace),
        (errno.EACCES, ms.PermissionDenied),
        (errno.EROFS, ms.PermissionDenied),
        (errno.EIO, ms.Unavailable),
        (errno.ESTALE, ms.Unavailable),
    ],
)
def test_the_system_errors_are_told_in_ours(
    storage: LocalStorage, code: int, kind: type[Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> int:
        raise OSError(code, os.strerror(code))

    file = storage.create_file("file", 10)
    monkeypatch.setattr(os, "pwrite", fail)
    with pytest.raises(kind, match=r"write .*file") as caught:
        file.write(0, memoryview(b"0123456789"))
    assert isinstance(caught.value.__cause__, OSError)


def test_a_stale_handle_is_tried_once_more(storage: LocalStorage, monkeypatch: pytest.MonkeyPatch) -> None:
    write_file(storage, "file", b"0123456789")
    real, calls = os.preadv, []

    def stale_once(descriptor: int, buffers: list[memoryview], offset: int) -> int:
        calls.append(descriptor)
        if len(calls) == 1:
            raise OSError(errno.ESTALE, "stale")
        return real(descriptor, buffers, offset)

    monkeypatch.setattr(os, "preadv", stale_once)
    assert read_file(storage, "file") == b"0123456789"
    assert len(calls) == 2


def test_the_folder_stays_when_the_process_moves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    relative = LocalStorage("run")
    monkeypatch.chdir("/")
    relative.make_root()
    assert (tmp_path / "run").is_dir()


def test_descriptors_do_not_reach_started_programs(storage: LocalStorage) -> None:
    file = storage.create_file("file", PAGE_BYTES * 2)
    lock = storage.lock(".lock", "{}")
    reader = storage.open_file("file")
    held = [
        d for owner in (file, lock, reader) for d in vars(owner).values() if isinstance(d, int) and d > 2 and d < 1000
    ]
    assert held
    assert not any(os.get_inheritable(descriptor) for descriptor in held)
    lock.release()
