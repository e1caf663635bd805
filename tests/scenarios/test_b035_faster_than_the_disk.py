"""Saving faster than the disk costs waiting or skipping, as documented, and never memory.

``save()`` waits for the save before it; ``step()`` puts a due save off and counts that
(``busy="wait"``: it waits too). One staged copy exists, handles hold nothing of the state, and saves
are committed in the order of their calls.
"""

from __future__ import annotations

import gc
import weakref
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers import values_in
from hooked import Gate, HookedStorage

import midstride as ms
from midstride.errors import Unavailable
from midstride.storage import open_storage

STATE_BYTES = 2**20


def _state(value: int) -> dict[str, Any]:
    return {"model": {"w": np.full(STATE_BYTES // 8, value, np.int64)}}


def _staging_bytes() -> int:
    """What is resident of all staging memory of this process."""
    resident, inside = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if line[:1] in "0123456789abcdef":
            inside = "midstride-arena" in line
        elif inside and line.startswith("Rss:"):
            resident += int(line.split()[1]) * 1024
    return resident


@pytest.mark.skipif(not Path("/proc/self/smaps").exists(), reason="this system has no /proc/self/smaps")
def test_a_hundred_saves_hold_one_copy(tmp_path: Path) -> None:
    gc.collect()
    before = _staging_bytes()
    handles, sources = [], []
    most_held, most_resident = 0, 0
    with ms.Checkpointer(tmp_path, keep=2) as ckpt:
        for step in range(100):
            state = _state(step)
            sources.append(weakref.ref(state["model"]["w"]))
            handles.append(ckpt.save(step, state))
            del state
            most_held = max(most_held, ckpt.statistics().staging_bytes)
            most_resident = max(most_resident, _staging_bytes() - before)
            assert sum(not handle.done() for handle in handles) <= 1, "one save in flight"
        gc.collect()
        assert all(source() is None for source in sources), "no handle and no writer holds a state"
        staged = weakref.ref(ckpt._saver._arena)
        statistics = ckpt.statistics()
    assert STATE_BYTES <= most_held <= STATE_BYTES + 64 * 1024
    assert most_resident <= most_held
    assert staged() is None and _staging_bytes() == before and ckpt.statistics().staging_bytes == 0
    assert statistics.saves_begun == 100 and ckpt.statistics().saves_committed == 100
    infos = [handle.result() for handle in handles]
    assert [info.step for info in infos] == list(range(100))
    assert [info.seq for info in infos] == list(range(1, 101))
    assert values_in(ms.open(tmp_path).load()) == {99}


def test_step_puts_off_and_counts(tmp_path: Path) -> None:
    gate = Gate()
    with ms.Checkpointer(HookedStorage(open_storage(tmp_path), gate), every=1) as ckpt:
        first = ckpt.step(1, _state(1))
        assert first is not None and gate.reached.wait(60)
        for step in range(2, 12):
            assert ckpt.step(step, _state(step)) is None
        assert ckpt.statistics().saves_skipped == 10
        assert ckpt.statistics().saves_begun == 1
        gate.open()
        first.result()
        due = ckpt.step(12, _state(12))
        assert due is not None
    assert [info.step for info in ms.open(tmp_path).checkpoints()] == [1, 12]


def test_step_waits_where_that_is_asked_for(tmp_path: Path) -> None:
    with ms.Checkpointer(tmp_path, every=1, busy="wait") as ckpt:
        for step in range(1, 11):
            assert ckpt.step(step, _state(step)) is not None
        assert ckpt.statistics().saves_skipped == 0
    assert [info.step for info in ms.open(tmp_path).checkpoints()] == list(range(1, 11))


@pytest.mark.skipif(not Path("/proc/self/smaps").exists(), reason="this system has no /proc/self/smaps")
def test_handles_of_failed_saves_hold_nothing_either(tmp_path: Path) -> None:
    def hook(operation: str, name: str) -> None:
        if operation == "write":
            raise Unavailable("injected")

    gc.collect()
    before = _staging_bytes()
    ckpt = ms.Checkpointer(HookedStorage(open_storage(tmp_path), hook), max_failures=100)
    handles, sources = [], []
    for step in range(20):
        state = _state(step)
        sources.append(weakref.ref(state["model"]["w"]))
        handles.append(ckpt.save(step, state))
        del state
    with pytest.raises(ms.WriteError):
        ckpt.wait()
    gc.collect()
    assert all(source() is None for source in sources)
    assert all(handle.done() for handle in handles)
    assert ckpt.statistics().staging_bytes <= STATE_BYTES + 64 * 1024
    ckpt.close()
    assert ckpt.statistics().staging_bytes == 0
    gc.collect()
    assert _staging_bytes() == before, "an error that is kept keeps no staging memory"
