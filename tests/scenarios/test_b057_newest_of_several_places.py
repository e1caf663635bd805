"""A run that saves to a fast place and to a safe one resumes from whichever has the newest whole checkpoint.

``newest()`` looks in all of them, never takes what is not committed, and says where it found it.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest
from hooked import HookedStorage

import midstride as ms
from midstride.errors import NothingRestorable, PermissionDenied
from midstride.reader import newest
from midstride.storage import open_storage


def _save(run: Path, *steps: int) -> None:
    with ms.Checkpointer(run, existing="continue") as ckpt:
        for step in steps:
            ckpt.save(step, {"w": np.full(1000, step)}).result()


def _spoil(run: Path) -> None:
    for manifest in run.glob("step-*/manifest.json"):
        manifest.write_bytes(manifest.read_bytes()[:-20])


def _found(*paths: Path) -> tuple[int, str]:
    reader = newest(*paths)
    assert reader is not None
    latest = reader.latest()
    assert latest is not None and (reader.load()["w"] == latest.step).all()
    return latest.step, reader.description


def test_newest_of_two(tmp_path: Path) -> None:
    fast, safe = tmp_path / "fast", tmp_path / "safe"
    assert newest(fast, safe) is None and newest() is None
    _save(safe, 10, 20)
    _save(fast, 30)
    assert _found(fast, safe) == _found(safe, fast) == (30, str(fast))
    shutil.rmtree(fast)
    assert _found(fast, safe) == (20, str(safe))
    # A first save on a fresh fast disk that never ended: step 40 has bytes and no manifest.
    (fast / "step-000000000040-0123abcd").mkdir(parents=True)
    (fast / "step-000000000040-0123abcd" / "state.safetensors").write_bytes(bytes(5000))
    assert _found(fast, safe) == (20, str(safe))
    # And after whole ones.
    _save(fast, 30)
    (fast / "step-000000000041-0123abcd").mkdir()
    assert _found(fast, safe) == (30, str(fast))


def test_damage_in_one_place(tmp_path: Path) -> None:
    fast, safe = tmp_path / "fast", tmp_path / "safe"
    _save(fast, 30)
    _spoil(fast)
    with pytest.raises(NothingRestorable, match="fast"):
        newest(fast, safe)
    _save(safe, 20)
    assert _found(fast, safe) == (20, str(safe))
    _spoil(safe)
    with pytest.raises(NothingRestorable):
        newest(fast, safe)


def test_first_named_of_equals(tmp_path: Path) -> None:
    one, two = tmp_path / "one", tmp_path / "two"
    _save(one, 5)
    _save(two, 5)
    assert _found(one, two) == (5, str(one)) and _found(two, one) == (5, str(two))


def test_a_place_that_cannot_be_looked_at(tmp_path: Path) -> None:
    """It may hold the newest: resuming from an older one elsewhere would not be noticed."""
    _save(tmp_path / "safe", 20)

    def hook(operation: str, name: str) -> None:
        raise PermissionDenied(f"injected: {operation}")

    locked = HookedStorage(open_storage(tmp_path / "safe"), hook)
    with pytest.raises(PermissionDenied):
        newest(locked, tmp_path / "safe")
