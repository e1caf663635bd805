"""A damaged newest checkpoint is an error that names the next one, or is passed over with a warning: as asked.

``fallback=True`` (the default) takes the newest good one and says so in ``.warnings``; ``fallback=False``
raises. Either way the damaged one stays on disk, and it never takes a place among those to keep.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from helpers import flip_bit, folder_of, folders, values_in

import midstride as ms


@pytest.fixture
def run(tmp_path: Path) -> Path:
    with ms.Checkpointer(tmp_path / "run") as ckpt:
        for step in (10, 20, 30):
            ckpt.save(step, {"model": {"w": np.full(5000, step, np.float32)}})
    flip_bit(folder_of(tmp_path / "run", 30) / "model.safetensors", -1)
    return tmp_path / "run"


def test_strict(run: Path) -> None:
    ckpt = ms.Checkpointer(run, fallback=False)
    with pytest.raises(ms.CorruptCheckpoint, match=r"step 30 .*/model/w.*next candidates are steps: 20, 10"):
        ckpt.restore()
    restored = ckpt.restore(step=20)
    assert restored is not None and values_in(restored.state) == {20}


def test_fallback_says_so(run: Path) -> None:
    before = {path: path.read_bytes() for path in run.rglob("step-*/*")}
    restored = ms.Checkpointer(run).restore()
    assert restored is not None and restored.step == 20
    assert values_in(restored.state) == {20}
    (warning,) = restored.warnings
    assert "step 30 was passed over" in warning and "model.safetensors" in warning
    assert restored.bad == (3,)
    assert {path: path.read_bytes() for path in run.rglob("step-*/*")} == before


@pytest.mark.parametrize("damage", ["bit", "size"])
def test_damaged_one_takes_no_place_in_retention(run: Path, damage: str) -> None:
    bad = folder_of(run, 30)
    if damage == "size":
        (bad / "model.safetensors").write_bytes(b"")
    with ms.Checkpointer(run, keep=2) as ckpt:
        restored = ckpt.restore()
        assert restored is not None and restored.step == 20
        ckpt.save(40, {"model": {"w": np.full(5000, 40, np.float32)}}).result()
        ckpt.wait()
        assert bad.is_dir(), "left for whoever wants to know what happened"
        steps = [int(name.split("-")[1]) for name in folders(run)]
        assert steps == [20, 30, 40], "of the good ones two are kept"
        assert values_in(ms.open(run).load()) == {40}
        # The step that was found bad is saved again without being asked.
        ckpt.save(30, {"model": {"w": np.full(5000, 31, np.float32)}}).result()
    assert values_in(ms.open(run).load(30)) == {31}
    assert bad.is_dir()


def test_strict_with_an_unreadable_newest(run: Path) -> None:
    (folder_of(run, 30) / "manifest.json").write_bytes(b"{}")
    with pytest.raises(ms.CorruptCheckpoint, match=r"step 30 .*next candidates are steps: 20, 10"):
        ms.Checkpointer(run, fallback=False).restore()
    restored = ms.Checkpointer(run).restore()
    assert restored is not None and restored.step == 20
    assert "step 30 was passed over" in restored.warnings[0]
