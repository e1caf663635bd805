"""Modification times mean nothing: not for the latest, and not for what retention deletes."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

import midstride as ms
from midstride.format import layout


def _touch(run: Path, when: Callable[[int], float]) -> None:
    for path in sorted(run.rglob("*"), reverse=True):
        folder = layout.parse_step_folder(path.relative_to(run).parts[0])
        seconds = when(folder.step if folder is not None else 0)
        os.utime(path, (seconds, seconds), follow_symlinks=False)


@pytest.mark.parametrize("times", ["equal", "reversed", "epoch", "future", "copied"])
def test_times_mean_nothing(tmp_path: Path, times: str) -> None:
    run = tmp_path / "run"
    with ms.Checkpointer(run, keep=3) as ckpt:
        for step in range(800, 1000, 100):
            ckpt.save(step, {"w": np.full(10, step)}).result()
            ckpt.wait()
    if times == "copied":
        # Without -p, newest first: the oldest checkpoint gets the newest times.
        source, run = run, tmp_path / "copy"
        run.mkdir()
        for path in sorted(source.iterdir(), reverse=True):
            if path.is_dir():
                shutil.copytree(path, run / path.name, copy_function=shutil.copyfile)
            else:
                shutil.copyfile(path, run / path.name)
    when: dict[str, Callable[[int], float]] = {
        "equal": lambda step: 1.7e9,
        "reversed": lambda step: 1.7e9 - step,
        "epoch": lambda step: 0.0,
        "future": lambda step: 4e9 - step,
    }
    with ms.Checkpointer(run, keep=3) as ckpt:
        if times in when:
            _touch(run, when[times])
        restored = ckpt.restore()
        assert restored is not None and restored.step == 900
        for step in (1000, 1100, 1200):
            ckpt.save(step, {"w": np.full(10, step)}).result()
            ckpt.wait()
            if times in when:
                _touch(run, when[times])
            assert [info.step for info in ckpt.checkpoints()] == [step - 200, step - 100, step]
            latest = ckpt.latest()
            assert latest is not None and latest.step == step
    assert all(problems == [] for problems in ms.open(run).verify().values())
