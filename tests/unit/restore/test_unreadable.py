"""What could not be looked at is neither good nor damaged: it is told, and never passed over for an older one."""

from __future__ import annotations

import errno
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import midstride as ms
from midstride.testing import FaultyStorage, Operation, fail_at
from midstride.testing.faulty import Fault


class Unreadable(Fault):
    """Reads of one step's files fail, but for the first ``spared`` of each file."""

    def __init__(self, step: int, suffix: str, spared: int = 0) -> None:
        self.step, self.suffix, self.spared = step, suffix, spared
        self.reads: dict[str, int] = {}

    def before(self, operation: Operation) -> None:
        target = operation.target
        if operation.name == "read" and f"{self.step:012}-" in target and target.endswith(self.suffix):
            self.reads[target] = self.reads.get(target, 0) + 1
            if self.reads[target] > self.spared:
                fail_at(operation.number, errno.EIO).before(operation)


def linear() -> torch.nn.Linear:
    return torch.nn.Linear(4, 3)


@pytest.fixture
def storage(tmp_path: Path) -> FaultyStorage:
    with ms.Checkpointer(tmp_path / "run") as ckpt:
        for step in (1, 2, 3):
            ckpt.save(step, {"m": linear(), "n": step}, metrics={"loss": step}).result()
    return FaultyStorage(ms.LocalStorage(tmp_path / "run"))


def folder_of(tmp_path: Path, step: int) -> Path:
    (folder,) = (tmp_path / "run").glob(f"step-{step:012}-*")
    return folder


@pytest.mark.parametrize("step", [1, 3])
def test_a_manifest_that_cannot_be_read_may_be_the_newest(tmp_path: Path, storage: FaultyStorage, step: int) -> None:
    storage.fault = Unreadable(step, "manifest.json")
    ckpt, readable = ms.Checkpointer(storage), 3 if step == 1 else 2
    folder = folder_of(tmp_path, step)
    for look in (ckpt.restore, ckpt.latest, ms.open(storage).latest, ms.open(storage).load, ms.open(storage).describe):
        with pytest.raises(ms.Unavailable, match=f"{folder.name} could not .*step={readable} .*move that folder"):
            look()
    # The ways to go on that the message names.
    restored = ckpt.restore(step=readable)
    assert restored is not None
    assert restored.step == readable
    with pytest.raises(ms.Unavailable, match="move that folder") as caught:
        ckpt.restore(step=step)
    assert "name the step" not in str(caught.value)
    folder.rename(tmp_path / "aside")
    restored = ms.Checkpointer(storage).restore()
    assert restored is not None
    assert restored.step == readable


def test_a_file_of_an_older_one_that_cannot_be_read_is_not_asked_for(storage: FaultyStorage) -> None:
    class NoSize(Fault):
        def before(self, operation: Operation) -> None:
            if operation.name == "open_file" and "1-" in operation.target and operation.target.endswith(".safetensors"):
                fail_at(operation.number, errno.EIO).before(operation)

    storage.fault = NoSize()
    restored = ms.Checkpointer(storage).restore()
    assert restored is not None
    assert restored.step == 3


def test_a_storage_that_fails_in_the_middle_of_a_restore(storage: FaultyStorage) -> None:
    storage.fault = Unreadable(3, ".safetensors", spared=1)  # of the header
    ckpt = ms.Checkpointer(storage)
    with pytest.raises(ms.Unavailable, match="may be partly overwritten: build them anew"):
        ckpt.restore({"m": linear(), "n": 0})
    # Before the first byte is put anywhere, or where there is nothing to put it into, nothing is said of objects.
    storage.fault = Unreadable(3, ".safetensors")
    for template in ({"m": linear(), "n": 0}, None):
        with pytest.raises(ms.Unavailable) as caught:
            ckpt.restore(template)
        assert "overwritten" not in str(caught.value)


def test_a_storage_that_fails_after_a_damaged_checkpoint_was_put_into_objects(
    tmp_path: Path, storage: FaultyStorage
) -> None:
    path = folder_of(tmp_path, 3) / "m.safetensors"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    storage.fault = Unreadable(2, ".safetensors")
    with pytest.raises(ms.Unavailable, match="may be partly overwritten: build them anew"):
        ms.Checkpointer(storage).restore({"m": linear(), "n": 0})


def test_lists_say_what_they_could_not_look_at(
    tmp_path: Path, storage: FaultyStorage, caplog: pytest.LogCaptureFixture
) -> None:
    storage.fault = Unreadable(1, "manifest.json")
    looks: list[Any] = [ms.Checkpointer(storage), ms.open(storage)]
    for look in looks:
        for listed, wanted in ((look.checkpoints, [2, 3]), (lambda look=look: [look.best("loss", "min")], [2])):
            caplog.clear()
            assert [info.step for info in listed()] == wanted
            (record,) = caplog.records
            assert record.levelname == "WARNING"
            assert folder_of(tmp_path, 1).name in record.getMessage()
    storage.fault = Fault()
    caplog.clear()
    assert len(ms.open(storage).checkpoints()) == 3
    assert not caplog.records


def test_numpy_arrays_are_new_so_nothing_of_the_callers_is_overwritten(storage: FaultyStorage) -> None:
    storage.fault = Unreadable(3, ".safetensors", spared=1)
    with pytest.raises(ms.Unavailable) as caught:
        ms.Checkpointer(storage).restore({"m": {"weight": np.zeros((3, 4), np.float32)}}, strict=False)
    assert "overwritten" not in str(caught.value)
