"""A checkpoint holds the state as it was when ``save()`` returned, also of arrays in the CPU's own memory.

Whatever the trainer writes into them afterwards, no file shows it: not a later value, and not layers
of different steps beside each other. So with staging memory for the whole state and for a part of it.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers import values_in
from hooked import Gate, HookedStorage

import midstride as ms
from midstride.storage import open_storage

Fill = Callable[[float], None]


def _tensors(kind: str) -> tuple[dict[str, Any], Fill]:
    names = [f"layer{n}.weight" for n in range(200)]
    if kind == "numpy":
        arrays = {name: np.zeros((20, 50), np.float32) for name in names}
        return arrays, lambda value: [array.fill(value) for array in arrays.values()] and None
    torch = pytest.importorskip("torch", reason="PyTorch is not installed")
    tensors = {name: torch.zeros(20, 50) for name in names}
    return tensors, lambda value: [tensor.fill_(value) for tensor in tensors.values()] and None


@pytest.fixture(params=["numpy", "torch"])
def tensors(request: pytest.FixtureRequest) -> tuple[dict[str, Any], Fill]:
    return _tensors(request.param)


def test_overwritten_while_the_writer_is_held_up(tmp_path: Path, tensors: tuple[dict[str, Any], Fill]) -> None:
    arrays, fill = tensors
    gate = Gate()
    state = {"model": arrays, "counters": {"seen": [1, 1]}}
    with ms.Checkpointer(HookedStorage(open_storage(tmp_path), gate)) as ckpt:
        fill(1)
        pending = ckpt.save(1, state, metrics={"loss": np.float64(1)})
        assert pending.staged()
        fill(2)
        state["counters"]["seen"][:] = [2, 2]
        assert gate.reached.wait(60)
        fill(3)
        gate.open()
        info = pending.result()
        assert values_in({name: array for name, array in arrays.items()}) == {3}
    loaded = ms.open(tmp_path).load()
    assert values_in(loaded["model"]) == {1}
    assert loaded["counters"]["seen"] == [1, 1]
    assert info.metrics == {"loss": 1}


@pytest.mark.parametrize("staging_bytes", [None, 256 * 1024])
def test_overwritten_all_the_time(
    tmp_path: Path, tensors: tuple[dict[str, Any], Fill], staging_bytes: int | None
) -> None:
    arrays, fill = tensors
    overwritten = 0
    with ms.Checkpointer(tmp_path, keep=1, staging_bytes=staging_bytes) as ckpt:
        for step in range(1, 31):
            fill(step)
            pending = ckpt.save(step, {"model": arrays})
            fill(-step)
            while not pending.done():
                overwritten += 1
                fill(1000 + overwritten)
            assert values_in(ms.open(tmp_path).load(step)) == {step}
    assert overwritten > 30, "the writer was never raced"
