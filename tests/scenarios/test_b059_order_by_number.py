"""Order is by number, never by text: for the latest, listing, iteration and retention.

Checkpoints are ordered by ``seq``, the place in the order of commits, which rises with the steps of a run.
How wide a name is padded never matters. A run that goes back and saves a lower step has that as its latest.
"""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np

import midstride as ms
from midstride.format import layout

_STEPS = [0, 5, 9, 10, 200, 500, 1000, 2500, 99_999, 100_000, 900_000, 10**12 - 1, 10**12, 2**40, 2**63 - 1]


def _save(ckpt: ms.Checkpointer, step: int) -> ms.CheckpointInfo:
    info = ckpt.save(step, {"w": np.full(10, step % 1000)}).result()
    ckpt.wait()
    return info


def _repad(run: Path, width: int, *, only: int | None = None) -> None:
    """Give the step folders the padding of another version."""
    for name in os.listdir(run):
        folder = layout.parse_step_folder(name)
        if folder is not None and only in (None, folder.step):
            (run / name).rename(run / f"step-{folder.step:0{width}d}-{folder.attempt}")


def test_latest_and_listing(tmp_path: Path) -> None:
    run = tmp_path / "run"
    assert sorted(_STEPS) == _STEPS and sorted(_STEPS, key=str) != _STEPS
    with ms.Checkpointer(run) as ckpt:
        for count, step in enumerate(_STEPS, 1):
            _save(ckpt, step)
            latest = ckpt.latest()
            assert latest is not None and latest.step == step
            assert [info.step for info in ckpt.checkpoints()] == _STEPS[:count]
    for stranger in ("step-last-0123abcd", "step_9999999", "final", "step-99999999999999999999-0123abcd"):
        (run / stranger).mkdir()
    for width in (1, 7, 12, 19):
        _repad(run, width)
        _repad(run, 7, only=900_000)
        assert (run / "step-0900000-").parent.exists() and any(
            p.name.startswith("step-0900000-") for p in run.iterdir()
        )
        reader = ms.open(run)
        assert [info.step for info in reader.checkpoints()] == _STEPS
        latest = reader.latest()
        assert latest is not None and latest.step == 2**63 - 1
        assert (reader.load()["w"] == (2**63 - 1) % 1000).all() and (reader.load(900_000)["w"] == 0).all()
        assert [int(name.split("-")[1]) for name in reader.verify()] == _STEPS, "iteration too"


def test_retention(tmp_path: Path) -> None:
    run = tmp_path / "run"
    with ms.Checkpointer(run) as ckpt:
        for step in _STEPS[:6]:
            _save(ckpt, step)
    _repad(run, 1)
    _repad(run, 19, only=5)
    with ms.Checkpointer(run, keep=3) as ckpt:
        restored = ckpt.restore()
        assert restored is not None and restored.step == 500
        for step in _STEPS[6:]:
            _save(ckpt, step)
            expected = _STEPS[_STEPS.index(step) - 2 : _STEPS.index(step) + 1]
            assert [info.step for info in ckpt.checkpoints()] == expected
    assert len(list(run.glob("step-*"))) == 3


def test_going_back_to_a_lower_step(tmp_path: Path) -> None:
    with ms.Checkpointer(tmp_path / "run", keep=2) as ckpt:
        for step in (100, 2000, 30_000):
            _save(ckpt, step)
        restored = ckpt.restore(step=2000)
        assert restored is not None
        _save(ckpt, 2500)
        latest = ckpt.latest()
        assert latest is not None and latest.step == 2500
        assert [info.step for info in ckpt.checkpoints()] == [30_000, 2500]
