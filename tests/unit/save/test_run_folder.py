"""What the writer counts as good, and what it takes for gone."""

from __future__ import annotations

from pathlib import Path

import numpy as np

import midstride as ms
from midstride.format import layout
from midstride.save.commit import sweep, withdraw
from midstride.testing import VolatileStorage


def state(value: int) -> dict[str, object]:
    return {"w": np.full(3000, value)}


def test_a_damaged_checkpoint_does_not_stand_for_a_good_one(tmp_path: Path) -> None:
    """Nobody restored it, so only the writer's own look tells that a file is missing."""
    with ms.Checkpointer(tmp_path) as ckpt:
        infos = [ckpt.save(step, state(step)).result() for step in (1, 2)]
    next((tmp_path / infos[1].name).glob("*.safetensors")).unlink()
    with ms.Checkpointer(tmp_path, keep=2, existing="continue") as ckpt:
        for step, kept in ((3, [1, 3]), (4, [3, 4])):
            ckpt.save(step, state(step)).result()
            ckpt.wait()
            assert [info.step for info in ms.open(tmp_path).checkpoints()] == kept
    assert (tmp_path / infos[1].name / layout.MANIFEST).exists(), "it is not the retention's to delete"


def test_what_is_withdrawn_does_not_come_back() -> None:
    storage = VolatileStorage()
    with ms.Checkpointer(storage) as ckpt:
        ckpt.save(1, state(1)).result()
        newest = ckpt.save(2, state(2)).result()
    withdraw(storage, newest.name)
    assert sweep(storage, [newest.name]) == []
    for image in storage.crashes():
        assert [info.step for info in ms.open(image).checkpoints()] == [1]
    withdraw(storage, newest.name)  # again, after an earlier try that failed half-way
    withdraw(storage, "step-000000000009-00000000")  # or where somebody removed the folder
