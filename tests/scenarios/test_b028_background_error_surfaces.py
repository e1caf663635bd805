"""A save that fails in the background is told to the trainer at its next call, with the cause attached.

One failed save neither stops later ones nor counts for retention.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hooked import HookedStorage, data_of

import midstride as ms
from midstride.errors import NoSpace, WriteError
from midstride.storage import open_storage


def _state(step: int) -> dict[str, Any]:
    return {name: {"w": np.full(1000, step, np.float32)} for name in ("model", "optimizer", "ema")}


def _fail_third_file(operation: str, doomed: int) -> Any:
    seen: set[str] = set()

    def hook(now: str, name: str) -> None:
        if now == operation and name.startswith(data_of(doomed)) and name.endswith(".safetensors"):
            seen.add(name)
            if len(seen) == 3:
                raise NoSpace(f"injected: {operation} of {name}")

    return hook


@pytest.mark.parametrize("operation", ["create_file", "write", "sync"])
def test_error_reaches_next_save(tmp_path: Path, operation: str) -> None:
    storage = HookedStorage(open_storage(tmp_path / "run"), _fail_third_file(operation, doomed=1))
    with ms.Checkpointer(storage) as ckpt:
        failed = ckpt.save(1, _state(1))
        with pytest.raises(WriteError, match="step 1 ") as caught:
            ckpt.save(2, _state(2))
        cause = caught.value.__cause__
        assert isinstance(cause, NoSpace) and "injected" in str(cause)
        frames = []
        traceback = cause.__traceback__
        while traceback is not None:
            frames.append(traceback.tb_frame.f_code.co_name)
            traceback = traceback.tb_next
        assert "hook" in frames, "the original traceback is attached"
        assert failed.done() and failed.progress().phase == "failed"
        # The save that told of the failure was begun, and succeeds; the failure is told once.
        ckpt.wait()
        info = ckpt.latest()
        assert info is not None and info.step == 2
        assert [i.step for i in ckpt.checkpoints()] == [2]
        assert ckpt.statistics().saves_failed == 1
    assert ms.open(tmp_path / "run").verify() == {info.name: []}


def test_error_reaches_wait_and_close(tmp_path: Path) -> None:
    storage = HookedStorage(open_storage(tmp_path / "run"), _fail_third_file("write", doomed=1))
    ckpt = ms.Checkpointer(storage)
    ckpt.save(1, _state(1))
    with pytest.raises(WriteError, match="step 1 "):
        ckpt.wait()
    ckpt.close()  # told already


def test_error_reaches_step_after_its_own_save_has_begun(tmp_path: Path) -> None:
    storage = HookedStorage(open_storage(tmp_path / "run"), _fail_third_file("write", doomed=1))
    with ms.Checkpointer(storage, every=1, busy="wait") as ckpt:
        ckpt.step(1, _state(1))
        with pytest.raises(WriteError, match="step 1 "):
            ckpt.step(2, _state(2))
        ckpt.wait()
        assert [i.step for i in ckpt.checkpoints()] == [2]


def test_retention_ignores_the_failed_save(tmp_path: Path) -> None:
    storage = HookedStorage(open_storage(tmp_path / "run"), _fail_third_file("write", doomed=1))
    with ms.Checkpointer(storage, keep=2) as ckpt:
        ckpt.save(0, _state(0)).result()
        with pytest.raises(WriteError):
            ckpt.save(1, _state(1)).result()
        ckpt.save(2, _state(2)).result()
        assert [i.step for i in ckpt.checkpoints()] == [0, 2]
    folders = sorted(p.name for p in (tmp_path / "run").glob("step-*"))
    assert len(folders) == 2, "nothing of the failed step is left"
