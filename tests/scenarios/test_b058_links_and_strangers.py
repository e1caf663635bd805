"""What the user put into a run's folder stays: links, their targets, and everything with a name of its own.

A step folder that became a link is read like any other and not deleted: a warning says so. Rotation goes on.
"""

from __future__ import annotations

import logging
import os
from pathlib import Path

import numpy as np
import pytest

import midstride as ms


def _save(ckpt: ms.Checkpointer, step: int) -> ms.CheckpointInfo:
    info = ckpt.save(step, {"model": {"w": np.full(1000, step)}}).result()
    ckpt.wait()
    return info


def _files(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


def test_a_step_that_was_moved_away(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    run, big = tmp_path / "run", tmp_path / "big disk"
    big.mkdir()
    with ms.Checkpointer(run, keep=1) as ckpt:
        moved = run / _save(ckpt, 500).name
        os.rename(moved, big / "kept")
        moved.symlink_to(big / "kept")
        before = _files(big)
        latest = ckpt.latest()
        assert latest is not None and latest.step == 500
        restored = ckpt.restore()
        assert restored is not None and (restored.state["model"]["w"] == 500).all()
        with caplog.at_level(logging.WARNING, "midstride"):
            _save(ckpt, 501)
        assert any(moved.name in r.getMessage() and "link" in r.getMessage() for r in caplog.records)
        for step in (502, 503):
            _save(ckpt, step)
        assert [info.step for info in ckpt.checkpoints()] == [500, 503], "rotation goes on"
    assert moved.is_symlink() and _files(big) == before
    # A new run, too, whose first act is to sweep.
    with ms.Checkpointer(run, keep=1) as ckpt:
        assert ckpt.restore() is not None
        _save(ckpt, 504)
        assert [info.step for info in ckpt.checkpoints()] == [500, 504]
    assert moved.is_symlink() and _files(big) == before


@pytest.mark.parametrize("target", ["empty folder", "folder", "file", "nothing", "itself"])
def test_links_with_a_step_folders_name(tmp_path: Path, target: str) -> None:
    """Not ours, whatever they point to: neither swept as debris nor followed."""
    run, other = tmp_path / "run", tmp_path / "other"
    run.mkdir()
    link = run / "step-000000000007-0123abcd"
    if target == "file":
        other.write_text("mine")
    elif target in ("folder", "empty folder"):
        other.mkdir()
        if target == "folder":
            (other / "model.safetensors").write_text("mine")
    link.symlink_to(link.name if target == "itself" else other)
    before = _files(tmp_path)
    with ms.Checkpointer(run, keep=1, existing="continue") as ckpt:
        for step in (1, 2, 3):
            _save(ckpt, step)
        assert [info.step for info in ckpt.checkpoints()] == [3]
    assert link.is_symlink()
    assert before.items() <= _files(tmp_path).items() and (target == "nothing" or os.path.lexists(link))
    assert other.exists() == (target not in ("nothing", "itself"))


def test_strangers_are_left_alone(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    run = tmp_path / "run"
    caplog.set_level(logging.INFO, "midstride")
    with ms.Checkpointer(run, keep=1) as ckpt:
        first = _save(ckpt, 300)
        (run / "best").symlink_to(first.name)
        (run / "notes.txt").write_text("mine")
        for name in ("step_000100_copy", "1000.bak", "step-000000000300", "step-000000000300-XYZ", f"{first.name}.bak"):
            (run / name).mkdir()
            (run / name / "manifest.json").write_text("mine")
        (run / "step-000000000009-0123abcd").write_text("a file with a step folder's name")
        strangers = {name for name in os.listdir(run)} - {first.name}
        before = _files(run)
        for step in (301, 302, 303):
            _save(ckpt, step)
        assert [info.step for info in ckpt.checkpoints()] == [303]
    assert strangers <= set(os.listdir(run)) and os.path.islink(run / "best")
    kept = {name: raw for name, raw in before.items() if not name.startswith((f"{first.name}/", "best/", ".lock"))}
    assert kept.items() <= _files(run).items()
    # The link's target was a checkpoint that the rule let go: said in the log, not done in silence.
    assert any(r.getMessage() == f"retired step 300 ({first.name})" for r in caplog.records)


def test_a_users_file_inside_a_step_folder(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    run = tmp_path / "run"
    with ms.Checkpointer(run, keep=1) as ckpt:
        first = run / _save(ckpt, 1).name
        (first / "plot.png").write_bytes(b"mine")
        (first / "link.safetensors").symlink_to(tmp_path)
        _save(ckpt, 2)
        _save(ckpt, 3)
        assert [info.step for info in ckpt.checkpoints()] == [3]
    assert (first / "plot.png").read_bytes() == b"mine" and (first / "link.safetensors").is_symlink()
    assert not (first / "manifest.json").exists() and not (first / "model.safetensors").exists()
    assert any("did not make" in r.getMessage() for r in caplog.records)
