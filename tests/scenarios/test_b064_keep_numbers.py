"""``keep``: a number of newest checkpoints from 1 up, or None for all; anything else is refused when it is said.

At every moment, a failing save and the deletions included, at least the smaller of ``keep`` and the number
committed can be restored: the old goes only after the new is there.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hooked import HookedStorage, data_of

import midstride as ms
from midstride.errors import Unavailable
from midstride.storage import open_storage


@pytest.mark.parametrize("keep", [0, -1, -5])
def test_numbers_without_a_meaning(tmp_path: Path, keep: int) -> None:
    with pytest.raises(ValueError, match=r"keep=None keeps all"):
        ms.Checkpointer(tmp_path / "run", keep=keep)
    with pytest.raises(ValueError, match="at least 1"):
        ms.LatestN(keep)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("keep", [True, 1.0, "1", [1]])
def test_what_is_no_number(tmp_path: Path, keep: Any) -> None:
    with pytest.raises(TypeError, match="keep"):
        ms.Checkpointer(tmp_path / "run", keep=keep)


@pytest.mark.parametrize("keep", [None, 1, 2, 3])
@pytest.mark.parametrize("doomed", [None, 0, 1, 2, 3])
def test_never_too_few(tmp_path: Path, keep: int | None, doomed: int | None) -> None:
    run = tmp_path / "run"
    committed: list[int] = []
    looks = 0

    def hook(operation: str, name: str) -> None:
        nonlocal looks
        if doomed is not None and operation == "sync" and name.startswith(data_of(doomed)):
            raise Unavailable("injected")
        if operation in ("read", "open_file", "list_folder"):
            return
        looks += 1
        if committed:
            good = [problems == [] for problems in ms.open(run).verify().values()]
            assert all(good) and len(good) >= min(keep or 100, len(committed)), f"before {operation} {name}"

    with ms.Checkpointer(HookedStorage(open_storage(run), hook), keep=keep) as ckpt:
        for step in range(4):
            try:
                ckpt.save(step, {"model": {"w": np.full(100, step)}, "n": step}).result()
                ckpt.wait()
                committed.append(step)
                assert step != doomed
            except ms.SaveError as error:
                assert step == doomed, error
            expected = committed if keep is None else committed[-keep:]
            assert [info.step for info in ckpt.checkpoints()] == expected
            assert len(list(run.glob("step-*"))) == len(expected)
        assert looks > 20


def test_keep_one_with_best(tmp_path: Path) -> None:
    """The best equal to the last, and different from it."""
    with ms.Checkpointer(tmp_path / "run", keep=ms.LatestN(1) | ms.BestN(1, "loss", "min")) as ckpt:
        for step, (loss, expected) in enumerate([(3, [0]), (2, [1]), (5, [1, 2]), (4, [1, 3]), (1, [4])]):
            ckpt.save(step, {"w": np.zeros(10)}, metrics={"loss": loss}).result()
            ckpt.wait()
            assert [info.step for info in ckpt.checkpoints()] == expected


def test_an_earlier_runs_checkpoints_count(tmp_path: Path) -> None:
    with ms.Checkpointer(tmp_path / "run", keep=None) as ckpt:
        for step in range(5):
            ckpt.save(step, {"w": np.full(10, step)})
    with ms.Checkpointer(tmp_path / "run", keep=2) as ckpt:
        assert ckpt.restore() is not None
        assert len(ckpt.checkpoints()) == 5, "nothing is deleted before something new is committed"
        ckpt.save(5, {"w": np.full(10, 5)}).result()
        ckpt.wait()
        assert [info.step for info in ckpt.checkpoints()] == [4, 5]
