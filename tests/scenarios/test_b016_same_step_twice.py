"""Saving a step again is harmless: with equal content the save that is there is the result, nothing is written.

So a periodic save and the last save of a run may meet at one step, in flight or committed. Other
content under a saved step is an error at once, which costs neither the checkpoint nor the run.
"""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers import folders, values_in
from hooked import Gate, HookedStorage

import midstride as ms
from midstride.storage import open_storage


def _state(value: float = 1.0) -> dict[str, Any]:
    return {"model": {"w": np.full(5000, value)}, "epoch": 3}


def test_last_save_while_the_periodic_one_is_in_flight(tmp_path: Path) -> None:
    gate = Gate()
    ckpt = ms.Checkpointer(HookedStorage(open_storage(tmp_path), gate), every=1000)
    periodic = ckpt.step(2000, _state(), metrics={"loss": 0.5})
    assert periodic is not None and gate.reached.wait(60) and not periodic.done()
    opener = threading.Timer(0.05, gate.open)
    opener.start()
    last = ckpt.save(2000, _state(), metrics={"loss": 0.4})
    ckpt.close()
    opener.join()
    assert last.result() == periodic.result()
    assert last.result().metrics == {"loss": 0.5}, "metrics do not count as content"
    assert len(folders(tmp_path)) == 1
    assert ckpt.statistics().saves_committed == 1 and ckpt.statistics().saves_unchanged == 1


def test_last_save_after_the_periodic_one_is_committed(tmp_path: Path) -> None:
    with ms.Checkpointer(tmp_path, every=1000) as ckpt:
        periodic = ckpt.step(2000, _state())
        assert periodic is not None
        there = periodic.result()
        before = sorted(path.stat().st_mtime_ns for path in tmp_path.rglob("step-*/*"))
        assert ckpt.save(2000, _state()).result() == there
        assert sorted(path.stat().st_mtime_ns for path in tmp_path.rglob("step-*/*")) == before
        assert ckpt.statistics().saves_committed == 1
    assert [info.seq for info in ms.open(tmp_path).checkpoints()] == [there.seq]


def test_other_content_is_an_error_that_costs_nothing(tmp_path: Path) -> None:
    with ms.Checkpointer(tmp_path) as ckpt:
        ckpt.save(2000, _state()).result()
        ckpt.save(2000, _state())
        for changed in (_state(2.0), {**_state(), "epoch": 4}, {"model": {"w": np.ones(4999)}, "epoch": 3}):
            with pytest.raises(ms.StepExists, match=r"step 2000 .*overwrite=True"):
                ckpt.save(2000, changed)
        assert values_in(ms.open(tmp_path).load(2000)["model"]) == {1}
        # The run goes on, and nothing is raised later for what was raised already.
        ckpt.save(2001, _state(2.0)).result()
        ckpt.save(2001, _state(3.0), overwrite=True).result()
    assert [info.step for info in ms.open(tmp_path).checkpoints()] == [2000, 2001]
    assert values_in(ms.open(tmp_path).load(2001)["model"]) == {3}
    assert len(folders(tmp_path)) == 2


def test_resumed_run_saves_the_step_it_was_restored_from(tmp_path: Path) -> None:
    with ms.Checkpointer(tmp_path) as ckpt:
        ckpt.save(2000, _state())
    with ms.Checkpointer(tmp_path) as ckpt:
        restored = ckpt.restore()
        assert restored is not None
        assert ckpt.save(2000, _state()).result() == restored.info
    assert len(folders(tmp_path)) == 1
