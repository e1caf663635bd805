"""A folder with a checkpoint's name is a checkpoint only if everything that its manifest names is there.

A cut, empty or missing data file, a cut manifest, a manifest alone: none of these is listed, the latest
is the older good one, and asking for such a step by number tells the file and what is wrong with it.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from helpers import folder_of, values_in

import midstride as ms


def _cut(file: Path, size: int) -> None:
    with file.open("r+b") as opened:
        opened.truncate(size)


def _cut_last_byte(folder: Path) -> str:
    file = sorted(folder.glob("*.safetensors"))[-1]
    _cut(file, file.stat().st_size - 1)
    return rf"{file.name} has \d+ bytes, it was saved with \d+"


def _empty(folder: Path) -> str:
    _cut(folder / "model.safetensors", 0)
    return r"model\.safetensors has 0 bytes"


def _missing(folder: Path) -> str:
    (folder / "model.safetensors").unlink()
    return r"model\.safetensors is missing"


def _half_manifest(folder: Path) -> str:
    _cut(folder / "manifest.json", (folder / "manifest.json").stat().st_size // 2)
    return r"manifest\.json: "


def _manifest_alone(folder: Path) -> str:
    for file in folder.glob("*.safetensors"):
        file.unlink()
    return r"\.safetensors is missing"


DEFECTS: list[Callable[[Path], str]] = [_cut_last_byte, _empty, _missing, _half_manifest, _manifest_alone]


@pytest.fixture
def run(tmp_path: Path) -> Path:
    with ms.Checkpointer(tmp_path / "run") as ckpt:
        for step in range(len(DEFECTS) + 1):
            ckpt.save(step, {name: {"w": np.full(5000, step, np.int32)} for name in ("model", "optimizer")})
    return tmp_path / "run"


def test_each_defect_is_named_and_nothing_broken_is_listed(run: Path) -> None:
    told = {step: defect(folder_of(run, step)) for step, defect in enumerate(DEFECTS, start=1)}
    reader = ms.open(run)
    assert [info.step for info in reader.checkpoints()] == [0]
    ckpt = ms.Checkpointer(run)
    latest = ckpt.latest()
    assert latest is not None and latest.step == 0
    for step, problem in told.items():
        for restore in (ckpt.restore, reader.load):
            with pytest.raises(ms.CorruptCheckpoint, match=problem):
                restore(step=step)
    restored = ckpt.restore()
    assert restored is not None and restored.step == 0
    assert values_in(restored.state) == {0}
    assert len(restored.warnings) == len(DEFECTS)
    assert all(folder_of(run, step).is_dir() for step in told), "nothing is deleted because it could not be read"


def test_nothing_good_is_left(run: Path) -> None:
    for step in range(len(DEFECTS) + 1):
        DEFECTS[step % len(DEFECTS)](folder_of(run, step))
    ckpt = ms.Checkpointer(run)
    for look in (ckpt.latest, ckpt.restore, ms.open(run).latest, ms.open(run).load):
        with pytest.raises(ms.NothingRestorable):
            look()


def test_copies_under_other_names_are_no_checkpoints(run: Path) -> None:
    good = folder_of(run, 5)
    shutil.copytree(good, run / "900")
    shutil.copytree(good, run / "step-900")
    shutil.copytree(good, run / "step-000000000900-0a0b0c0d")
    (run / "901").mkdir()
    reader = ms.open(run)
    latest = reader.latest()
    assert latest is not None and latest.step == 5
    with pytest.raises(ms.CorruptCheckpoint, match="the manifest of another checkpoint"):
        reader.load(900)
    with pytest.raises(ms.NotCommitted):
        reader.load(901)
