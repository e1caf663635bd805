"""A fresh run in a folder with another run's checkpoints is refused, with nothing written or deleted.

With ``existing="continue"`` said, what it saves is the newest by order of commits, however low its steps:
its checkpoints are never taken for the oldest.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

import midstride as ms
from midstride.errors import ForeignRun


def _files(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


@pytest.fixture
def old(tmp_path: Path) -> Path:
    run = tmp_path / "run"
    with ms.Checkpointer(run) as ckpt:
        for step in (500, 600, 700):
            ckpt.save(step, {"w": np.full(10, step)})
    return run


def _state(step: int) -> dict[str, np.ndarray]:
    return {"w": np.full(10, -step)}


def test_refused(old: Path) -> None:
    before = _files(old)
    ckpt = ms.Checkpointer(old, keep=3, every=100)
    calls: list[Callable[[], object]] = [
        lambda: ckpt.save(100, _state(100)),
        lambda: ckpt.step(100, _state(100)),
    ]
    for call in calls:
        with pytest.raises(ForeignRun, match=r"restore.. first.*existing='continue'.*another folder"):
            call()
    ckpt.close()
    before.pop(".lock"), (after := _files(old)).pop(".lock")
    assert after == before


def test_refused_even_where_all_are_damaged_or_gone(old: Path) -> None:
    for manifest in old.glob("step-*/manifest.json"):
        manifest.unlink()
    before = _files(old)
    with ms.Checkpointer(old) as ckpt, pytest.raises(ForeignRun, match="traces of a run"):
        ckpt.save(100, _state(100))
    before.pop(".lock"), (after := _files(old)).pop(".lock")
    assert after == before


def test_beside_when_asked(old: Path) -> None:
    with ms.Checkpointer(old, existing="continue") as ckpt:
        for step in (100, 200):
            ckpt.save(step, _state(step)).result()
        assert [info.step for info in ckpt.checkpoints()] == [500, 600, 700, 100, 200]
        restored = ckpt.restore()
        assert restored is not None and restored.step == 200 and (restored.state["w"] == -200).all()


def test_beside_and_rotating_when_asked(old: Path) -> None:
    """Who says both ``continue`` and ``keep=3`` asks for the oldest commits to go: those of the old run."""
    with ms.Checkpointer(old, existing="continue", keep=3) as ckpt:
        expected = [[600, 700, 100], [700, 100, 200], [100, 200, 300]]
        for step, kept in zip((100, 200, 300), expected, strict=True):
            ckpt.save(step, _state(step)).result()
            ckpt.wait()
            assert [info.step for info in ckpt.checkpoints()] == kept


def test_going_on_from_the_old_run(old: Path) -> None:
    """Restoring makes them one's own; going on from 500 puts what came after aside, and keeps it."""
    with ms.Checkpointer(old, keep=4) as ckpt:
        restored = ckpt.restore(step=500)
        assert restored is not None
        info = ckpt.save(550, _state(550)).result()
        assert info.parent == restored.info.seq and info.run == restored.info.run
        assert [i.step for i in ckpt.checkpoints()] == [500, 600, 700, 550]
