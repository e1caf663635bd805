"""The runs that are crashed: what they do, and what must be true whatever is left of them."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

import midstride as ms
from midstride.restore.catalog import scan
from midstride.restore.load import Options, restore, verify
from midstride.storage import Storage

Acknowledged = list[tuple[int, int]]
"""(step, value) of each save that was said to be saved, in order."""


def state_of(value: int) -> dict[str, object]:
    """A state of two files and some values, all of them telling ``value``."""
    return {
        "model": {"w": np.full(3000, value, np.float32), "b": np.full((), value, np.int64)},
        "optimizer": {"state": {0: np.full(700, value, np.float64)}, "lr": value / 8},
        "value": value,
    }


def two_saves(storage: Storage, said: Acknowledged) -> None:
    """The first save of a run, and one after it."""
    with ms.Checkpointer(storage) as ckpt:
        for step in (1, 2):
            ckpt.save(step, state_of(step)).result()
            said.append((step, step))


def overwrite(storage: Storage, said: Acknowledged) -> None:
    """A step is saved again with other content."""
    with ms.Checkpointer(storage) as ckpt:
        ckpt.save(5, state_of(5)).result()
        said.append((5, 5))
        ckpt.save(5, state_of(50), overwrite=True).result()
        said.append((5, 50))


def retirement(storage: Storage, said: Acknowledged) -> None:
    """Each save but the first retires the one before."""
    with ms.Checkpointer(storage, keep=1) as ckpt:
        for step in (1, 2, 3):
            ckpt.save(step, state_of(step)).result()
            said.append((step, step))


RUNS: dict[str, Callable[[Storage, Acknowledged], None]] = {
    "two_saves": two_saves,
    "overwrite": overwrite,
    "retirement": retirement,
}


def problems(storage: Storage, said: Acknowledged) -> list[str]:
    """What is wrong with what a crash left; empty if every promise was kept."""
    try:
        catalog = scan(storage)
    except ms.NotFound:
        return ["everything is gone"] if said else []
    found = [f"committed and unusable: {entry.folder}: {entry.problem}" for entry in catalog.unusable]
    for info in catalog.checkpoints:
        found += [f"committed and damaged: {problem}" for problem in verify(storage, info)]
    try:
        restored = restore(storage, None, None, Options(), fallback=True)
    except ms.MidstrideError as error:
        return [*found, f"the restore failed: {error!r}"]
    if restored is None:
        return [*found, "nothing is left of what was said to be saved"] if said else found
    value = restored.state["value"]
    if not _same(restored.state, state_of(value)):
        found.append("a checkpoint mixes two states")
    if said and (restored.step, value) not in _at_least(said):
        found.append(f"restored step {restored.step} with value {value}, but {said[-1]} was said to be saved")
    return found


def _at_least(said: Acknowledged) -> Acknowledged:
    """The last save that was acknowledged, and what a run does after it and may have committed."""
    step, value = said[-1]
    return [(step, value), (step + 1, value + 1), (5, 50)]


def _same(one: object, other: object) -> bool:
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(_same(one[key], other[key]) for key in one)
    if isinstance(one, np.ndarray) and isinstance(other, np.ndarray):
        return one.dtype == other.dtype and np.array_equal(one, other)
    return bool(one == other)


def leftovers(storage: Storage) -> list[str]:
    """What lies in the folder and belongs to no checkpoint."""
    catalog = scan(storage)
    known = {"midstride.json", ".lock", *(info.name for info in catalog.checkpoints)}
    return sorted(entry.name for entry in storage.list_folder("") if entry.name not in known)
