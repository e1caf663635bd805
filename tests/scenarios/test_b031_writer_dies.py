"""The writer's death in mid-save is an error in good time; the next save gets a new writer.

``SystemExit`` ends the writer's thread; ``MemoryError`` is an error like any other. Neither leaves
threads behind, nor the lock.
"""

from __future__ import annotations

import threading
from pathlib import Path

import numpy as np
import pytest
from hooked import HookedStorage, data_of

import midstride as ms
from midstride.errors import SaveError, WriterDied
from midstride.storage import open_storage

_STATE = {"model": {"w": np.arange(100_000)}}


class _Writers:
    """The writers' threads that began since this object was made."""

    def __init__(self) -> None:
        self._before = set(threading.enumerate())

    def names(self) -> list[str]:
        now = (thread.name for thread in threading.enumerate() if thread not in self._before)
        return sorted(name for name in now if name in ("midstride-writer", "midstride-disk"))


@pytest.mark.parametrize("operation", ["make_folder", "create_file", "write", "sync", "sync_folder", "rename"])
@pytest.mark.parametrize("death", [SystemExit, MemoryError, KeyboardInterrupt])
def test_death_is_told_and_mended(tmp_path: Path, operation: str, death: type[BaseException]) -> None:
    deaths = iter([death("injected")])

    def hook(now: str, name: str) -> None:
        if now == operation and name.startswith(data_of(1)):
            for error in deaths:
                raise error

    writers = _Writers()
    ckpt = ms.Checkpointer(HookedStorage(open_storage(tmp_path / "run"), hook))
    ckpt.save(0, _STATE).result()
    with pytest.raises(SaveError, match="injected") as caught:
        ckpt.save(1, _STATE)  # a writer that dies at once is told of here
        ckpt.wait(timeout=10)
    assert isinstance(caught.value, WriterDied) == (death is not MemoryError)
    assert isinstance(caught.value.__cause__, death)
    ckpt.save(2, _STATE).result(timeout=10)
    assert [i.step for i in ckpt.checkpoints()][-1] == 2
    assert writers.names() == ["midstride-disk", "midstride-writer"], "one writer, and none of the dead"
    ckpt.close()
    assert writers.names() == []
    latest = ms.open(tmp_path / "run").latest()
    assert latest is not None and ms.open(tmp_path / "run").verify(latest.step) == {latest.name: []}


def test_death_in_a_retirement_is_told_though_the_save_is_durable(tmp_path: Path) -> None:
    deaths = iter([SystemExit("injected")])

    def hook(now: str, name: str) -> None:
        if now == "remove_file" and name.startswith(data_of(0)):
            for error in deaths:
                raise error

    ckpt = ms.Checkpointer(HookedStorage(open_storage(tmp_path / "run"), hook), keep=1)
    ckpt.save(0, _STATE).result()
    assert ckpt.save(1, _STATE).result().step == 1
    with pytest.raises(WriterDied, match=r"retired.*injected.* The checkpoint of step 1 is durable"):
        ckpt.wait(timeout=10)
    last = ckpt.save(2, _STATE).result(timeout=10)
    ckpt.close()
    assert [p.name for p in (tmp_path / "run").iterdir() if p.is_dir()] == [last.name]


def test_every_save_may_kill_its_writer(tmp_path: Path) -> None:
    """The next save comes while the dead writer's thread is still on its way out: it never counts on it."""
    doomed = True

    def hook(now: str, name: str) -> None:
        if doomed and now == "write":
            raise SystemExit("injected")

    writers = _Writers()
    ckpt = ms.Checkpointer(HookedStorage(open_storage(tmp_path / "run"), hook))
    for step in range(50):
        with pytest.raises(WriterDied):
            ckpt.save(step, _STATE).result(timeout=10)
    doomed = False
    ckpt.save(50, _STATE).result(timeout=10)
    ckpt.close()
    assert writers.names() == []


def test_death_while_staging_waits_for_room(tmp_path: Path) -> None:
    def hook(now: str, name: str) -> None:
        if now == "write" and name.startswith(data_of(1)):
            raise SystemExit("injected")

    state = {"model": {"w": np.arange(1_000_000)}}  # 8 MB through 256 KiB
    with ms.Checkpointer(HookedStorage(open_storage(tmp_path / "run"), hook), staging_bytes=256 * 1024) as ckpt:
        with pytest.raises(WriterDied):
            ckpt.save(1, state).result(timeout=10)
        ckpt.wait()  # told once
        ckpt.save(2, state).result(timeout=10)
