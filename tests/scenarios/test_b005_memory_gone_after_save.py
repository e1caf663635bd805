"""When ``save()`` has returned, the caller's arrays may be donated, deleted or their memory given to others.

This release copies NumPy and PyTorch arrays. JAX arrays are given to it as NumPy views; as they are,
they are refused by name before anything is written, never saved half.
"""

from __future__ import annotations

import mmap
import weakref
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers import WatchedWrites, folders, values_in

import midstride as ms
from midstride.storage import open_storage


def _on_loan(value: int) -> tuple[mmap.mmap, np.ndarray]:
    """An array over memory that is not its own, as a framework hands out."""
    memory = mmap.mmap(-1, 65536)
    array = np.frombuffer(memory, np.int32)
    array[:] = value
    return memory, array


def test_memory_is_taken_back_right_after_save(tmp_path: Path) -> None:
    storage = WatchedWrites(open_storage(tmp_path), lambda operation, name: None)
    with ms.Checkpointer(storage) as ckpt:
        for step in range(1, 21):
            memory, array = _on_loan(step)
            gone = weakref.ref(array)
            ckpt.save(step, {"params": {"w": array}})
            array[:] = -1
            del array
            assert gone() is None, "nothing holds the caller's array when save() has returned"
            memory.close()  # raises if a view of it is alive
    for step in range(1, 21):
        assert values_in(ms.open(tmp_path).load(step)) == {step}


class _ForeignArray:
    """Stands for an array of a library that this release does not know."""

    shape, dtype = (3,), np.dtype("float32")

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        return np.ones(3, np.float32)


def test_arrays_of_an_unknown_library_are_refused_by_name(tmp_path: Path) -> None:
    with ms.Checkpointer(tmp_path) as ckpt:
        with pytest.raises(ms.UnsupportedState, match=r"/params/w: .*Nothing was written"):
            ckpt.save(1, {"params": {"a": np.ones(3), "w": _ForeignArray()}})
        assert folders(tmp_path) == []
        assert ckpt.save(1, {"params": {"w": np.asarray(_ForeignArray())}}).result().step == 1


def test_donated_jax_arrays(tmp_path: Path) -> None:
    jax = pytest.importorskip("jax", reason="JAX is not installed")
    step = jax.jit(lambda state: {"w": state["w"] + 1}, donate_argnums=0)
    state = {"w": jax.numpy.zeros(65536)}
    storage = WatchedWrites(open_storage(tmp_path), lambda operation, name: None)
    with ms.Checkpointer(storage) as ckpt:
        for number in range(20):
            ckpt.save(number, {"params": jax.tree.map(np.asarray, state)})
            state = step(state)
    for number in range(20):
        assert values_in(ms.open(tmp_path).load(number)) == {number}
