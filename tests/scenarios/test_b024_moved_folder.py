"""A run's folder can be moved, copied and reached by another path: nothing in it says where it was made.

It restores and is written on in its new place. The lock says which host holds it, for people; without
that file everything is read as well.
"""

from __future__ import annotations

import shutil
import socket
from pathlib import Path

import numpy as np
import pytest
from helpers import values_in

import midstride as ms


def _go_on(path: Path, restored_step: int, new_step: int) -> None:
    with ms.Checkpointer(path) as ckpt:
        restored = ckpt.restore()
        assert restored is not None and restored.step == restored_step
        assert values_in(restored.state) == {restored_step}
        ckpt.save(new_step, {"model": {"w": np.full(100, new_step)}})
    assert not any(ms.open(path).verify().values())


def test_moved_linked_and_copied(tmp_path: Path) -> None:
    first = tmp_path / "first-place" / "run"
    with ms.Checkpointer(first) as ckpt:
        ckpt.save(1, {"model": {"w": np.full(100, 1)}})
    run = ckpt.checkpoints()[0].run

    second = tmp_path / "second-place" / "run2"
    second.parent.mkdir()
    shutil.move(first, second)
    first.parent.rmdir()
    _go_on(second, 1, 2)

    (tmp_path / "link").symlink_to(second.parent, target_is_directory=True)
    _go_on(tmp_path / "link" / "run2", 2, 3)

    copy = tmp_path / "copy"
    shutil.copytree(second, copy)
    shutil.rmtree(second)
    _go_on(copy, 3, 4)
    assert [(info.step, info.run) for info in ms.open(copy).checkpoints()] == [(s, run) for s in (1, 2, 3, 4)]

    for file in copy.rglob("*"):
        if file.is_file():
            raw = file.read_bytes()
            assert str(tmp_path).encode() not in raw, f"{file.name} says where it was made"
            for place in (b"first-place", b"second-place"):
                assert place not in raw
            if file.name != ".lock":
                assert socket.gethostname().encode() not in raw, f"{file.name} says which host made it"
    (copy / ".lock").unlink()
    assert values_in(ms.open(copy).load()) == {4}


def test_working_folder_changes_during_a_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path)
    with ms.Checkpointer("run") as ckpt:
        ckpt.save(1, {"w": np.ones(3)}).result()
        monkeypatch.chdir(tmp_path / "elsewhere")
        ckpt.save(2, {"w": np.ones(3)}).result()
    assert [info.step for info in ms.open(tmp_path / "run").checkpoints()] == [1, 2]
    assert list((tmp_path / "elsewhere").iterdir()) == []
