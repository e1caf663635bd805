"""What the latest checkpoint is, is found by looking at the checkpoints: there is no pointer that could be wrong.

``midstride.json`` says that something was saved once, and whose run it is. Without it, or with
anything else in it, every checkpoint is still found and the run goes on.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

import midstride as ms


@pytest.fixture
def run(tmp_path: Path) -> Path:
    with ms.Checkpointer(tmp_path / "run", keep=2) as ckpt:
        for step in (50, 100, 200):
            ckpt.save(step, {"w": np.full(10, step)})
    return tmp_path / "run"


def _delete(marker: Path) -> None:
    marker.unlink()


def _empty(marker: Path) -> None:
    marker.write_bytes(b"")


def _garble(marker: Path) -> None:
    marker.write_bytes(bytes(range(256)) * 40)


def _other_json(marker: Path) -> None:
    marker.write_text('["step-000000000050-00000000"]')


def _byte_order_mark_and_newline(marker: Path) -> None:
    marker.write_bytes(b"\xef\xbb\xbf" + marker.read_bytes() + b"\r\n")


@pytest.mark.parametrize("damage", [_delete, _empty, _garble, _other_json, _byte_order_mark_and_newline])
def test_marker_damaged(run: Path, damage: Callable[[Path], None]) -> None:
    id_before = ms.open(run).checkpoints()[0].run
    damage(run / "midstride.json")
    assert [info.step for info in ms.open(run).checkpoints()] == [100, 200]
    with ms.Checkpointer(run, keep=2) as ckpt:
        restored = ckpt.restore()
        assert restored is not None and restored.step == 200
        assert ckpt.save(300, {"w": np.full(10, 300)}).result().run == id_before
    latest = ms.open(run).latest()
    assert latest is not None and latest.step == 300
    assert (run / "midstride.json").exists()


@pytest.mark.parametrize("name", ["latest", "LATEST", "checkpoint", "latest_checkpointed_iteration.txt"])
@pytest.mark.parametrize("content", ["50", "step-000000000050-00000000\n", "\ufeff100\n", "", "999"])
def test_pointers_of_others_are_not_read(run: Path, name: str, content: str) -> None:
    (run / name).write_text(content)
    restored = ms.Checkpointer(run).restore()
    assert restored is not None and restored.step == 200
    assert (run / name).read_text() == content
