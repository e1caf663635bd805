"""``BestN | LatestN`` keeps the union: the newest is always there, whatever its metric, and so is the best.

Of equal values the newer checkpoint is the better one. A checkpoint without the metric is never best.
"""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import numpy as np
import pytest

import midstride as ms

_MIN: list[tuple[float | None, set[int], int]] = [
    # metric of step 0, 1, ...; steps kept after it; the best step
    (5, {0}, 0),
    (1, {0, 1}, 1),
    (2, {1, 2}, 1),
    (3, {1, 2, 3}, 1),
    (None, {1, 2, 3, 4}, 1),
    (4, {1, 2, 4, 5}, 1),
    (6, {1, 2, 5, 6}, 1),
    (1, {1, 6, 7}, 7),
    (1, {7, 8}, 8),
    (9, {7, 8, 9}, 8),
    (8, {7, 8, 9, 10}, 8),
]


def _run(ckpt: ms.Checkpointer, mode: Literal["min", "max"]) -> None:
    sign = 1 if mode == "min" else -1
    for step, (loss, kept, best) in enumerate(_MIN):
        metrics = {} if loss is None else {"loss": sign * loss, "other": step}
        ckpt.save(step, {"w": np.full(10, step)}, metrics=metrics).result()
        ckpt.wait()
        assert {info.step for info in ckpt.checkpoints()} == kept
        latest, found = ckpt.latest(), ckpt.best("loss", mode)
        assert latest is not None and latest.step == step, "the newest is always there"
        assert found is not None and found.step == best
    assert ckpt.best("no such metric", mode) is None


@pytest.mark.parametrize("mode", ["min", "max"])
def test_union(tmp_path: Path, mode: Literal["min", "max"]) -> None:
    with ms.Checkpointer(tmp_path / "run", keep=ms.BestN(2, "loss", mode) | ms.LatestN(2)) as ckpt:
        _run(ckpt, mode)
        restored = ckpt.restore()
        assert restored is not None and restored.step == len(_MIN) - 1
        best = ms.open(tmp_path / "run").best("loss", mode)
        assert best is not None and (ms.open(tmp_path / "run").load(best.step)["w"] == 8).all()


def test_best_alone_never_evicts_the_newest(tmp_path: Path) -> None:
    with ms.Checkpointer(tmp_path / "run", keep=ms.BestN(1, "loss", "min")) as ckpt:
        for step in range(5):  # worse and worse
            ckpt.save(step, {"w": np.zeros(10)}, metrics={"loss": float(step)}).result()
            ckpt.wait()
            assert [info.step for info in ckpt.checkpoints()] == ([0, step] if step else [0])


def test_a_metric_that_is_never_there(tmp_path: Path) -> None:
    with ms.Checkpointer(tmp_path / "run", keep=ms.BestN(3, "loss", "min")) as ckpt:
        for step in range(3):
            ckpt.save(step, {"w": np.zeros(10)}, metrics={"acc": 1.0}).result()
            ckpt.wait()
            assert [info.step for info in ckpt.checkpoints()] == [step]


def test_mode_is_said_and_checked() -> None:
    for wrong in ("lowest", None, "MIN"):
        with pytest.raises(ValueError, match="'min' or 'max'"):
            ms.BestN(1, "loss", wrong)  # type: ignore[arg-type]
