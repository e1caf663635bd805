"""A metric's name is data in the manifest and has no part in any path."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import midstride as ms
from midstride.errors import UnsupportedState

_METRICS = {
    "val/loss": 1.0,
    "../x": 2,
    "a=b,c": 3,
    "/etc/passwd": 4,
    "": 5,
    "a\0b": 6,
    "é\N{ROCKET}\n": 7,
    "x" * 5000: 8,
}


def test_names_are_data(tmp_path: Path) -> None:
    run = tmp_path / "runs" / "run"
    with ms.Checkpointer(run, keep=ms.BestN(1, "val/loss", "min") | ms.BestN(1, "../x", "max")) as ckpt:
        plain = ckpt.save(0, {"w": np.zeros(10)}, metrics={"loss": 9.0}).result()
        layout = sorted(p.name for p in (run / plain.name).iterdir())
        for step, sign in ((1, 1), (2, -1), (3, 0)):
            metrics = {name: sign * value for name, value in _METRICS.items()}
            info = ckpt.save(step, {"w": np.full(10, step)}, metrics=metrics).result()
            assert info.metrics == metrics
            assert sorted(p.name for p in (run / info.name).iterdir()) == layout
        assert [info.step for info in ckpt.checkpoints()] == [1, 2, 3], "cleaned up by names with slashes, too"
        lowest, highest = ckpt.best("val/loss", "min"), ckpt.best("../x", "max")
        assert lowest is not None and lowest.step == 2 and highest is not None and highest.step == 1
        restored = ckpt.restore(step=1)
        assert restored is not None and restored.metrics == _METRICS
    assert [p.name for p in tmp_path.iterdir()] == ["runs"] and [p.name for p in (tmp_path / "runs").iterdir()] == [
        "run"
    ]
    assert all(run in (p.parent, p.parent.parent) for p in run.rglob("*")), "no folders inside folders"


def test_a_name_that_is_no_text(tmp_path: Path) -> None:
    with ms.Checkpointer(tmp_path / "run") as ckpt, pytest.raises(UnsupportedState, match="not valid Unicode"):
        ckpt.save(0, {"w": np.zeros(10)}, metrics={"\ud800": 1.0})
