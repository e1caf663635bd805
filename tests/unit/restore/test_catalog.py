"""Looking through a folder while a trainer rotates in it: a newer checkpoint must not look like a loss."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

import midstride as ms
from midstride.restore.catalog import scan
from midstride.storage.base import Entry, ReadableFile


class Rotating:
    """A folder in which, at a look at the older checkpoint, the newer one has just come and the older one gone."""

    def __init__(self, folder: Path, on_older: Callable[[], None]) -> None:
        self._inner = ms.LocalStorage(folder)
        self._on_older = on_older
        self.description = self._inner.description

    def list_folder(self, folder: str) -> list[Entry]:
        return sorted(self._inner.list_folder(folder), key=lambda entry: entry.name, reverse=True)

    def open_file(self, name: str) -> ReadableFile:
        if name.startswith("step-000000000001-") and name.endswith("manifest.json"):
            self._on_older()
        return self._inner.open_file(name)


@pytest.fixture
def run(tmp_path: Path) -> Path:
    with ms.Checkpointer(tmp_path / "run") as ckpt:
        for step in (1, 2):
            ckpt.save(step, {"w": np.full(3, step)}).result()
    return tmp_path / "run"


def test_the_newest_comes_while_the_one_before_goes(run: Path) -> None:
    older, newer = sorted(run.glob("step-*/manifest.json"))
    draft = newer.rename(newer.with_suffix(".hidden"))  # as if it were being written

    def rotate() -> None:
        if draft.exists():
            draft.rename(newer)
            older.unlink()  # its folder is there a moment longer

    latest = scan(Rotating(run, rotate)).latest
    assert latest is not None
    assert latest.step == 2


def test_a_real_loss_is_seen_as_one(run: Path) -> None:
    for manifest in run.glob("step-*/manifest.json"):
        manifest.unlink()
    catalog = scan(Rotating(run, lambda: None))
    assert catalog.ever_committed
    assert catalog.checkpoints == []
