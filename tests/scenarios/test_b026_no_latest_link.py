"""There is no link or file called "latest" that could point to itself, to the best one or to nothing.

``latest()`` and ``best()`` always name a checkpoint that is there. What others put into the folder
under such names, links included, is neither read as a checkpoint nor changed.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from helpers import folder_of, folders, values_in

import midstride as ms


def _save(ckpt: ms.Checkpointer, step: int, loss: float) -> ms.CheckpointInfo:
    info = ckpt.save(step, {"w": np.full(10, step)}, metrics={"loss": loss}).result()
    ckpt.wait()
    return info


def test_latest_and_best_are_always_there(tmp_path: Path) -> None:
    with ms.Checkpointer(tmp_path, keep=ms.LatestN(1) | ms.BestN(1, "loss", "min")) as ckpt:
        for step, loss, best in ((1, 0.5, 1), (2, 0.9, 1), (3, 0.1, 3), (4, 0.1, 4), (5, float("nan"), 4)):
            saved = _save(ckpt, step, loss)
            latest = ckpt.latest()
            assert latest is not None and latest.seq == saved.seq, "the last one, whatever the best one is"
            found = ckpt.best("loss", "min")
            assert found is not None and found.step == best
            assert {info.step for info in ckpt.checkpoints()} == {step, best}
            for info in (saved, found):
                assert values_in(ms.open(tmp_path).load(info.step)) == {info.step}
    links = [path for path in tmp_path.rglob("*") if path.is_symlink()]
    assert links == []
    assert {path.name for path in tmp_path.iterdir()} - set(folders(tmp_path)) == {"midstride.json", ".lock"}


def test_rule_that_would_drop_the_newest(tmp_path: Path) -> None:
    with ms.Checkpointer(tmp_path, keep=ms.BestN(1, "loss", "min")) as ckpt:
        _save(ckpt, 1, 0.1)
        worse = _save(ckpt, 2, 0.9)
        assert ckpt.latest() == worse


@pytest.mark.parametrize("name", ["latest", "last", "best"])
@pytest.mark.parametrize("kind", ["file", "folder", "self", "dangling", "old"])
def test_names_of_others_are_left_alone(tmp_path: Path, name: str, kind: str) -> None:
    foreign = tmp_path / name
    with ms.Checkpointer(tmp_path, keep=1) as ckpt:
        _save(ckpt, 1, 0.5)
        if kind == "file":
            foreign.write_text("mine")
        elif kind == "folder":
            foreign.mkdir()
            (foreign / "manifest.json").write_text("mine")
        else:
            target = {"self": name, "dangling": "step-000000000077-00000000", "old": folders(tmp_path)[0]}[kind]
            foreign.symlink_to(target)
        for step in (2, 3):
            _save(ckpt, step, 0.5)
    with ms.Checkpointer(tmp_path, keep=1) as ckpt:
        restored = ckpt.restore()
        assert restored is not None and restored.step == 3 and restored.warnings == ()
        _save(ckpt, 4, 0.5)
    latest = ms.open(tmp_path).latest()
    assert latest is not None and latest.step == 4
    if kind == "file":
        assert foreign.read_text() == "mine"
    elif kind == "folder":
        assert (foreign / "manifest.json").read_text() == "mine"
    else:
        assert foreign.is_symlink()


@pytest.mark.parametrize("target", ["self", "dangling"])
def test_links_with_a_checkpoints_name(tmp_path: Path, target: str) -> None:
    link = tmp_path / "step-000000000099-0123abcd"
    with ms.Checkpointer(tmp_path, keep=1) as ckpt:
        _save(ckpt, 1, 0.5)
    link.symlink_to(link.name if target == "self" else "nowhere")
    with ms.Checkpointer(tmp_path, keep=1) as ckpt:
        if target == "dangling":
            # It may be a step on a disk that is not mounted: not passed over in silence.
            with pytest.raises(ms.Unavailable, match="not mounted"):
                ckpt.restore()
        restored = ckpt.restore(step=1)
        assert restored is not None and restored.step == 1
        _save(ckpt, 2, 0.5)
    assert link.is_symlink(), "not ours to remove"
    if target == "dangling":
        link.unlink()
    latest = ms.open(tmp_path).latest()
    assert latest is not None and latest.step == 2
    assert folder_of(tmp_path, 2).is_dir()
