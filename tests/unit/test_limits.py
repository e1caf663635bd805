"""Every wait has a limit: what it waits for hangs, and the wait ends with an error that says so.

The lock's limit is tested in ``storage/test_lock.py``.
"""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import midstride as ms
from midstride import limits
from midstride.storage.bounded import BoundedReads
from midstride.storage.local import LocalStorage
from midstride.testing import FaultyStorage, Operation
from midstride.testing.faulty import Fault

STATE = {"model": {"w": np.arange(5000)}, "value": 3}


class Hang(Fault):
    """Operations of one kind hang until they are let go."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.let_go = threading.Event()
        self.hanging = 0

    def before(self, operation: Operation) -> None:
        if operation.name == self.name and not self.let_go.is_set():
            self.hanging += 1
            self.let_go.wait(60)


@pytest.fixture
def storage(tmp_path: Path) -> Iterator[FaultyStorage]:
    storage = FaultyStorage(ms.LocalStorage(tmp_path / "run"))
    yield storage
    if isinstance(storage.fault, Hang):
        storage.fault.let_go.set()


@pytest.fixture
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("WRITER_SECONDS", "STORAGE_SECONDS", "EXIT_SECONDS"):
        monkeypatch.setattr(limits, name, 0.3)


def hang(storage: FaultyStorage, name: str) -> Hang:
    storage.fault = fault = Hang(name)
    return fault


READING: dict[str, Callable[[FaultyStorage], Any]] = {
    "restore": lambda storage: ms.Checkpointer(storage).restore(),
    "restore_into": lambda storage: ms.Checkpointer(storage).restore({"model": {"w": np.zeros(5000, int)}, "value": 0}),
    "latest": lambda storage: ms.Checkpointer(storage).latest(),
    "checkpoints": lambda storage: ms.Checkpointer(storage).checkpoints(),
    "load": lambda storage: ms.open(storage).load(),
    "verify": lambda storage: ms.open(storage).verify(),
    "newest": ms.newest,
}


@pytest.mark.usefixtures("short")
@pytest.mark.parametrize("operation", ["list_folder", "open_file", "read"])
@pytest.mark.parametrize("look", READING.values(), ids=READING)
def test_reading_from_a_storage_that_hangs(look: Any, operation: str, storage: FaultyStorage) -> None:
    with ms.Checkpointer(storage) as ckpt:
        ckpt.save(1, STATE).result()
    fault = hang(storage, operation)
    with pytest.raises(ms.Unavailable, match="does not answer"):
        look(storage)
    assert fault.hanging <= limits.READ_THREADS, "one call that hangs is enough to know"
    fault.let_go.set()
    look(storage)


@pytest.mark.usefixtures("short")
def test_a_hanging_storage_is_not_asked_again_until_it_answers(storage: FaultyStorage) -> None:
    with ms.Checkpointer(storage) as ckpt:
        ckpt.save(1, STATE).result()
        fault = hang(storage, "list_folder")
        for _ in range(3):
            with pytest.raises(ms.Unavailable, match="does not answer"):
                ckpt.latest()
        assert fault.hanging == 1
        fault.let_go.set()
        deadline = time.monotonic() + 30
        while True:
            try:
                latest = ckpt.latest()
                break
            except ms.Unavailable:
                assert time.monotonic() < deadline
        assert latest is not None


@pytest.mark.usefixtures("short")
def test_a_file_that_opens_too_late_is_closed() -> None:
    class File:
        size = 0
        closed = threading.Event()

        def read_into(self, offset: int, buffer: memoryview) -> int:
            return 0

        def close(self) -> None:
            self.closed.set()

    class Slow(LocalStorage):
        let_go = threading.Event()

        def open_file(self, name: str) -> Any:
            self.let_go.wait(60)
            return File()

    with pytest.raises(ms.Unavailable):
        BoundedReads(Slow("nowhere")).open_file("x")
    assert not File.closed.is_set()
    Slow.let_go.set()
    assert File.closed.wait(30)


def test_a_read_that_goes_on_is_not_cut_off(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, storage: FaultyStorage
) -> None:
    """Each piece takes a third of the limit, all together several times as long."""
    monkeypatch.setattr(limits, "STORAGE_SECONDS", 0.6)
    monkeypatch.setattr(limits, "CHUNK_BYTES", 1000)
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "file").write_bytes(b"x" * 9000)

    class Slow(Fault):
        def before(self, operation: Operation) -> None:
            if operation.name == "read":
                threading.Event().wait(0.2)

    storage.fault = Slow()
    buffer = bytearray(10_000)
    assert BoundedReads(storage).open_file("file").read_into(0, memoryview(buffer)) == 9000
    assert bytes(buffer) == b"x" * 9000 + b"\0" * 1000


@pytest.mark.usefixtures("short")
@pytest.mark.parametrize("operation", ["make_root", "lock", "list_folder"])
def test_opening_a_storage_that_hangs(operation: str, storage: FaultyStorage) -> None:
    hang(storage, operation)
    ckpt = ms.Checkpointer(storage)
    with pytest.raises(ms.Deadline, match="waited for the writer to open"):
        ckpt.save(1, STATE)
    ckpt.close()


@pytest.mark.usefixtures("short")
@pytest.mark.parametrize("operation", ["make_folder", "create_file", "write", "sync", "sync_folder", "rename"])
def test_saving_to_a_storage_that_hangs(operation: str, storage: FaultyStorage, tmp_path: Path) -> None:
    ckpt = ms.Checkpointer(storage)
    ckpt.save(1, STATE).result()
    ckpt.wait()
    hang(storage, operation)
    pending = ckpt.save(2, STATE)
    for waiting in (pending.result, ckpt.wait, lambda: ckpt.save(3, STATE)):
        with pytest.raises(ms.Deadline, match=r"step 2 .* no progress for 0\.3 s"):
            waiting()
    latest = ms.open(tmp_path / "run").latest()
    assert latest is not None
    assert latest.step == 1
    with pytest.raises(ms.Deadline, match="step 2"):
        ckpt.close()


@pytest.mark.usefixtures("short")
def test_retiring_in_a_storage_that_hangs(storage: FaultyStorage) -> None:
    ckpt = ms.Checkpointer(storage, keep=1)
    ckpt.save(1, STATE).result()
    ckpt.wait()
    hang(storage, "remove_file")
    assert ckpt.save(2, STATE).result().step == 2, "what is durable is said to be, whatever becomes of older ones"
    with pytest.raises(ms.Deadline, match=r"retirement .* after step 2, .* The checkpoint of step 2 is durable"):
        ckpt.wait()
    with pytest.raises(ms.Deadline):
        ckpt.close()


@pytest.mark.usefixtures("short")
@pytest.mark.parametrize(
    ("operation", "words"),
    [("write", "step 2 to become durable, .* Earlier checkpoints"), ("remove_file", "retirement .* step 2 is durable")],
)
def test_training_hears_once_of_a_storage_that_hangs_while_its_saves_are_put_off(
    operation: str, words: str, storage: FaultyStorage, caplog: pytest.LogCaptureFixture
) -> None:
    ckpt = ms.Checkpointer(storage, every=1, keep=1, busy="skip")
    ckpt.step(1, STATE)
    ckpt.wait()
    fault = hang(storage, operation)
    ckpt.step(2, STATE)
    step, told = 3, []
    until = time.monotonic() + 1.5
    while time.monotonic() < until:
        try:
            assert ckpt.step(step, STATE) is None
        except ms.Deadline as error:
            told.append(str(error))
        step += 1
        time.sleep(0.01)
    assert len(told) == 1, told
    assert re.search(words, told[0])
    assert told[0] in caplog.text
    fault.let_go.set()
    ckpt.wait()
    pending = ckpt.step(step, STATE)
    assert pending is not None, "when it answers again, saving goes on"
    ckpt.close()


@pytest.mark.usefixtures("short")
def test_a_slow_save_that_moves_on_is_no_hang(storage: FaultyStorage) -> None:
    class Slow(Fault):
        def before(self, operation: Operation) -> None:
            if operation.name == "write":
                threading.Event().wait(0.1)

    with ms.Checkpointer(storage, every=1) as ckpt:
        storage.fault = Slow()
        ckpt.step(1, {f"item {number}": np.arange(500) for number in range(12)})
        skipped = 0
        while ckpt._saver.pending is not None:
            skipped += ckpt.step(2 + skipped, STATE) is None
            time.sleep(0.02)
        assert skipped


@pytest.mark.usefixtures("short")
def test_staging_through_a_budget_to_a_storage_that_hangs(storage: FaultyStorage) -> None:
    ckpt = ms.Checkpointer(storage, staging_bytes=256 * 1024)
    hang(storage, "write")
    with pytest.raises(ms.Deadline, match="staging memory"):
        ckpt.save(1, {"w": np.zeros(10**6)})
    with pytest.raises(ms.Deadline):
        ckpt.close()


@pytest.mark.usefixtures("short")
def test_a_writer_that_does_not_end(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    class StuckLock(LocalStorage):
        let_go = threading.Event()

        def lock(self, name: str, owner: str) -> Any:
            lock = super().lock(name, owner)
            release = lock.release
            lock.release = lambda: (self.let_go.wait(60), release())[1]  # type: ignore[method-assign]
            return lock

    ckpt = ms.Checkpointer(StuckLock(tmp_path / "run"))
    ckpt.save(1, STATE).result()
    ckpt.close()
    assert "hangs" in caplog.text
    StuckLock.let_go.set()


class HangsInLargeReads(LocalStorage):
    """Reads of a megabyte and more hang until they are let go, and then read."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.let_go = threading.Event()
        self.hanging = 0

    def open_file(self, name: str) -> Any:
        file = super().open_file(name)
        read_into = file.read_into

        def read(offset: int, buffer: memoryview) -> int:
            if len(buffer) >= 2**20 and not self.let_go.is_set():
                self.hanging += 1
                self.let_go.wait(60)
            return read_into(offset, buffer)

        file.read_into = read  # type: ignore[method-assign]
        return file


def model_of(value: float) -> torch.nn.Linear:
    model = torch.nn.Linear(1024, 512, bias=False)
    torch.nn.init.constant_(model.weight, value)
    return model


@pytest.mark.usefixtures("short")
def test_a_read_that_hung_never_writes_among_what_was_restored_since(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("midstride.restore.reader._LAST_BLOCK_SECONDS", 0.1)
    for name, value in (("hangs", 1.0), ("good", 2.0)):
        with ms.Checkpointer(tmp_path / name) as ckpt:
            ckpt.save(1, {"model": model_of(value)}).result()
    live, storage = model_of(0.0), HangsInLargeReads(tmp_path / "hangs")
    reader = ms.Checkpointer(storage)
    for _ in range(3):
        with pytest.raises(ms.Unavailable, match="does not answer"):
            reader.restore({"model": live})
    assert storage.hanging == 1, "no more threads at each try"
    with pytest.raises(ms.Unavailable, match="Build them anew"):
        ms.Checkpointer(tmp_path / "good").restore({"model": live})
    anew = model_of(0.0)
    assert ms.Checkpointer(tmp_path / "good").restore({"model": anew}) is not None
    storage.let_go.set()
    deadline = time.monotonic() + 30
    while True:
        try:
            assert ms.Checkpointer(tmp_path / "good").restore({"model": live}) is not None
            break
        except ms.Unavailable:
            assert time.monotonic() < deadline
    assert (live.weight == 2).all()
    assert (anew.weight == 2).all()
