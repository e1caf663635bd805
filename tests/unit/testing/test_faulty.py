"""The storage that fails on demand: what it numbers, and what each fault does."""

from __future__ import annotations

import errno
import threading
from pathlib import Path

import pytest

import midstride as ms
from midstride.testing import Crash, FaultyStorage, Gate, Operation, fail_at, fail_from, stop_after, stop_before
from midstride.testing.contract import read_file
from midstride.testing.faulty import Fault


def sequence(storage: ms.Storage) -> None:
    storage.make_root()
    lock = storage.lock(".lock", "{}")
    storage.make_folder("step")
    file = storage.create_file("step/draft", 4)
    file.write(0, memoryview(b"data"))
    file.sync()
    file.close()
    lock.check()
    storage.rename("step/draft", "step/name")
    storage.sync_folder("step")
    storage.list_folder("step")
    read_file(storage, "step/name")
    storage.remove_file("step/name")
    storage.remove_folder("step")
    lock.release()


def faulty(fault: Fault | None = None) -> tuple[FaultyStorage, ms.MemoryStorage]:
    inner = ms.MemoryStorage()
    return FaultyStorage(inner, fault), inner


NAMES = [
    "make_root",
    "lock",
    "make_folder",
    "create_file",
    "write",
    "sync",
    "close",
    "check",
    "rename",
    "sync_folder",
    "list_folder",
    "open_file",
    "read",
    "remove_file",
    "remove_folder",
]


def test_every_operation_is_numbered_with_what_it_was_about() -> None:
    storage, _ = faulty()
    sequence(storage)
    assert [operation.name for operation in storage.operations] == NAMES
    assert [operation.number for operation in storage.operations] == list(range(1, len(NAMES) + 1))
    log = {operation.name: operation for operation in storage.operations}
    assert log["write"] == Operation(5, "write", "step/draft", (0, 4))
    assert log["rename"] == Operation(9, "rename", "step/name", ("step/draft",))
    assert log["create_file"].arguments == (4,)


@pytest.mark.parametrize("number", range(1, len(NAMES) + 1))
def test_a_stop_before_and_after_each(number: int) -> None:
    for late, stop in ((False, stop_before), (True, stop_after)):
        storage, inner = faulty(stop(number))
        with pytest.raises(Crash):
            sequence(storage)
        assert len(storage.operations) == number
        with pytest.raises(Crash):
            storage.list_folder("")  # nothing reaches the storage any more
        # What a prefix of the sequence leaves, and the operation itself only if it was let through.
        reference = FaultyStorage(ms.MemoryStorage(), stop_before(number + late))
        with pytest.raises(Crash):
            sequence(reference)
            reference.list_folder("")
        assert inner._files == reference._inner._files  # type: ignore[attr-defined]
        assert inner._folders == reference._inner._folders  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("code", "kind"), [(errno.ENOSPC, ms.NoSpace), (errno.EIO, ms.Unavailable), (errno.EACCES, ms.PermissionDenied)]
)
def test_one_failure_is_told_as_a_local_disk_would(code: int, kind: type[Exception]) -> None:
    storage, inner = faulty(fail_at(6, code))
    with pytest.raises(kind, match="sync .injected. step/draft") as caught:
        sequence(storage)
    assert isinstance(caught.value.__cause__, OSError)
    assert caught.value.__cause__.errno == code
    assert inner.list_folder("step")  # one alone: the storage goes on
    storage.remove_file("step/draft")


def test_a_disk_that_is_gone_stays_gone() -> None:
    storage, _ = faulty(fail_from(5, errno.EIO))
    for _ in range(3):
        with pytest.raises(ms.Unavailable):
            sequence(storage)


def test_a_failure_that_took_effect_all_the_same() -> None:
    storage, inner = faulty(fail_at(9, errno.EIO, late=True))
    with pytest.raises(ms.Unavailable, match="rename"):
        sequence(storage)
    assert read_file(inner, "step/name") == b"data"


def test_what_nobody_got_is_not_kept_open_or_locked(tmp_path: Path) -> None:
    inner = ms.LocalStorage(tmp_path)
    with pytest.raises(ms.Unavailable):
        FaultyStorage(inner, fail_at(1, errno.EIO, late=True)).lock(".lock", "{}")
    inner.lock(".lock", "{}").release()


def test_a_gate_holds_what_it_names_until_it_is_opened() -> None:
    gate = Gate(lambda operation: operation.name == "sync")
    storage, inner = faulty(gate)
    thread = threading.Thread(target=sequence, args=(storage,))
    thread.start()
    assert gate.reached.wait(60)
    assert [operation.name for operation in storage.operations][-1] == "sync"
    assert [entry.name for entry in inner.list_folder("step")] == ["draft"]
    gate.open()
    thread.join(60)
    assert len(storage.operations) == len(NAMES)


def test_a_fault_of_ones_own() -> None:
    class OnlyWrites(Fault):
        def before(self, operation: Operation) -> None:
            if operation.name == "write":
                raise ms.Unavailable("no writes today")

    storage, _ = faulty(OnlyWrites())
    with pytest.raises(ms.Unavailable, match="today"):
        sequence(storage)
    storage.fault = Fault()
    storage.remove_file("step/draft")
