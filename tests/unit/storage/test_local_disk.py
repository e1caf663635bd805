"""What ``LocalStorage`` does beyond the contract: direct writes, reserved space, links, modes, syncs."""

from __future__ import annotations

import errno
import itertools
import mmap
import os
import stat
import tempfile
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from random import Random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import midstride as ms
from midstride import limits
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
    try:  # asked of the file system itself: a library that gave direct writes up must not pass
        os.close(os.open(Path(storage.description) / "file", os.O_WRONLY | os.O_DIRECT))
    except OSError:
        pytest.skip("this file system has no direct writes")
    calls = Calls(monkeypatch, "pwrite")
    data = aligned(PAGE_BYTES * 4)[:size]
    file.write(0, data)
    file.sync()
    assert {descriptor for _, descriptor in calls.log} == {file._direct}  # type: ignore[attr-defined]
    file.close()
    assert os.stat(Path(storage.description) / "file").st_size == size
    assert read_file(storage, "file") == bytes(data)


@pytest.mark.parametrize("size", [PAGE_BYTES + 10, PAGE_BYTES * 3 + 17])
@pytest.mark.parametrize("refused", ["every write", "the last block", "all but 100 bytes of the last block"])
def test_direct_writes_that_fail_late_are_done_plainly(
    storage: LocalStorage, size: int, refused: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The file was opened for direct writes, and then the file system takes none, or no padded block, or a part."""
    data = aligned(PAGE_BYTES * 4)[:size]
    file = storage.create_file("file", size)
    real = os.pwrite

    def pwrite(descriptor: int, piece: memoryview, offset: int) -> int:
        if descriptor == file._direct and (refused == "every write" or len(piece) + offset > size):  # type: ignore[attr-defined]
            if refused.startswith("all but"):
                return real(file._descriptor, memoryview(piece)[:5], offset)  # type: ignore[attr-defined]
            raise OSError(errno.EINVAL, "no direct writes")
        return real(descriptor, piece, offset)

    monkeypatch.setattr(os, "pwrite", pwrite)
    half = PAGE_BYTES if size > PAGE_BYTES * 2 else 0
    file.write(half, data[half:])
    file.write(0, data[:half])
    file.sync()
    file.close()
    assert os.stat(Path(storage.description) / "file").st_size == size
    assert read_file(storage, "file") == bytes(data)


def test_a_file_system_that_takes_nothing_is_an_error_not_a_loop(
    storage: LocalStorage, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = storage.create_file("file", PAGE_BYTES)
    monkeypatch.setattr(os, "pwrite", lambda *_: 0)
    with pytest.raises(ms.Unavailable, match="took no bytes"):
        file.write(0, aligned(PAGE_BYTES))


@settings(max_examples=60)
@given(
    size=st.integers(1, PAGE_BYTES * 5),
    cuts=st.lists(st.integers(0, PAGE_BYTES * 5), max_size=6),
    shift=st.sampled_from([0, 0, 1, 512]),
    order=st.randoms(use_true_random=False),
)
@pytest.mark.parametrize("place", ["disk", "/dev/shm"])
def test_any_pieces_in_any_order(place: str, size: int, cuts: list[int], shift: int, order: Random) -> None:
    if place != "disk" and not os.path.isdir(place):
        pytest.skip("no /dev/shm: no file system in memory to try")
    memory = aligned(PAGE_BYTES * 6)[shift : shift + size]
    edges = sorted({0, size, *(cut for cut in cuts if cut < size)})
    pieces = list(itertools.pairwise(edges))
    order.shuffle(pieces)
    with tempfile.TemporaryDirectory(dir=None if place == "disk" else place) as folder:
        file = LocalStorage(folder).create_file("file", size)
        for start, end in pieces:
            file.write(start, memory[start:end])
        file.sync()
        file.close()
        assert Path(folder, "file").read_bytes() == bytes(memory)


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


@pytest.mark.parametrize(("code", "kind"), [(errno.EDQUOT, ms.NoSpace), (errno.EIO, ms.Unavailable)])
def test_space_that_cannot_be_reserved_leaves_no_file(
    storage: LocalStorage, code: int, kind: type[Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(local, "_fallocate", lambda *_: code)
    with pytest.raises(kind, match="reserve 5000 bytes for .*file"):
        storage.create_file("file", 5000)
    assert storage.list_folder("") == []


def test_what_failed_first_is_told(storage: LocalStorage, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise OSError(errno.EIO, "I/O error")

    monkeypatch.setattr(local, "_fallocate", lambda *_: errno.ENOSPC)
    monkeypatch.setattr(os, "unlink", fail)
    monkeypatch.setattr(os, "statvfs", fail)
    with pytest.raises(ms.NoSpace, match="5000 bytes are needed and too few are free"):
        storage.create_file("file", 5000)


@pytest.mark.parametrize("code", [errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL])
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
    # The first: tmp_path itself may have been made a moment ago, by one who was killed before the sync.
    assert synced == [str(f) for f in (tmp_path.parent, tmp_path, tmp_path / "a", tmp_path / "a" / "b")]
    synced.clear()
    LocalStorage(tmp_path / "a" / "b" / "run").make_root()
    assert synced == [str(tmp_path / "a" / "b")]


@pytest.mark.parametrize(("code", "raised"), [(errno.EACCES, False), (errno.EIO, True)])
def test_a_parent_that_is_not_ours_to_sync(
    tmp_path: Path, code: int, raised: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "run").mkdir()

    def fail(path: str) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(local, "_sync_folder", fail)
    with pytest.raises(ms.Unavailable, match="sync the folder") if raised else nullcontext():
        LocalStorage(tmp_path / "run").make_root()


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
    assert [entry.name for entry in storage.list_folder("step")] == ["file"]
    storage.sync_folder("step")
    for use in (
        lambda: storage.create_file("step/new", 1),
        lambda: storage.make_folder("step/new"),
        lambda: storage.rename("step/file", "step/new"),
        lambda: storage.remove_file("step/file"),
    ):
        with pytest.raises(ms.StorageError, match="step is a link: nothing is written through one"):
            use()
    assert os.listdir(elsewhere) == ["file"]
    storage.remove_folder("step")
    assert (elsewhere / "file").read_bytes() == b"moved"


def test_a_link_below_a_step_is_not_read_through(storage: LocalStorage, tmp_path: Path) -> None:
    secrets = tmp_path / "secrets"
    secrets.mkdir()
    (secrets / "file").write_bytes(b"secret")
    storage.make_folder("step")
    (Path(storage.description) / "step" / "sub").symlink_to(secrets)
    for use in (lambda: storage.open_file("step/sub/file"), lambda: storage.list_folder("step/sub")):
        with pytest.raises(ms.StorageError, match="link"):
            use()


def test_the_root_may_be_a_link(tmp_path: Path) -> None:
    (tmp_path / "big disk").mkdir()
    (tmp_path / "run").symlink_to(tmp_path / "big disk")
    linked = LocalStorage(tmp_path / "run")
    linked.make_root()
    linked.make_folder("step")
    write_file(linked, "step/file", b"x")
    assert (tmp_path / "big disk" / "step" / "file").read_bytes() == b"x"


def test_a_path_that_is_no_text(tmp_path: Path) -> None:
    odd = LocalStorage(os.fsencode(tmp_path) + b"/r\xff\xfen")  # type: ignore[arg-type]
    odd.make_root()
    write_file(odd, "file", b"x")
    assert read_file(odd, "file") == b"x"
    with pytest.raises(ms.NotFound) as caught:
        odd.open_file("none")
    (odd.description + str(caught.value)).encode()  # can be printed anywhere


@pytest.mark.parametrize("code", [0, errno.ENOTSUP])
def test_where_fsync_is_not_enough_the_drive_is_told_too(
    storage: LocalStorage, code: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on macOS: the call of its own for files and folders, and plain fsync where a mount does not have that."""
    asked: list[int] = []

    def call(descriptor: int, what: int) -> int:
        asked.append(what)
        if code:
            raise OSError(code, os.strerror(code))
        return 0

    monkeypatch.setattr(local.fcntl, "F_FULLFSYNC", 51, raising=False)
    monkeypatch.setattr(local.fcntl, "fcntl", call)
    calls = Calls(monkeypatch, "fdatasync", "fsync")
    write_file(storage, "file", b"x")
    storage.sync_folder("")
    assert asked == [51, 51]
    assert [name for name, _ in calls.log] == (["fdatasync", "fsync"] if code else [])


def test_what_goes_through_the_page_cache_is_synced_in_lots(
    storage: LocalStorage, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "UNSYNCED_BYTES", 10_000)
    monkeypatch.setattr(local, "_DIRECT", 0)
    lots: list[int] = []
    real, written = os.fdatasync, 0

    def fdatasync(descriptor: int) -> None:
        nonlocal written
        lots.append(written)
        written = 0
        real(descriptor)

    monkeypatch.setattr(os, "fdatasync", fdatasync)
    file = storage.create_file("file", 45_000)
    for offset in range(0, 45_000, 3000):
        written += 3000
        file.write(offset, memoryview(bytes(3000)))
    file.sync()
    file.close()
    assert lots == [12_000, 12_000, 12_000, 9000]


def test_a_failed_sync_is_not_tried_again(storage: LocalStorage, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise OSError(errno.EIO, "I/O error")

    monkeypatch.setattr(local.fcntl, "F_FULLFSYNC", 51, raising=False)
    monkeypatch.setattr(local.fcntl, "fcntl", fail)
    calls = Calls(monkeypatch, "fdatasync", "fsync")
    file = storage.create_file("file", 1)
    with pytest.raises(ms.Unavailable, match="sync .*file"):
        file.sync()
    assert calls.log == []


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
