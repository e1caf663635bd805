"""What runs in the background lets the trainer's Python run: copying, digests, writes and syncs hold no lock.

Threads are made to hand the lock over only when they let go of it themselves. So another thread moves on
during a call if and only if that call runs without the lock; this is counted, not timed.
"""

from __future__ import annotations

import itertools
import os
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import xxhash

import midstride as ms
from midstride.numpy_arrays import NumpyAdapter
from midstride.save.digest import Digester
from midstride.storage import open_storage
from midstride.storage.base import WritableFile


class _Trainer:
    """A thread that counts its turns, and offers the interpreter lock after each."""

    def __init__(self) -> None:
        self.turns = 0
        self._stop = False
        self._thread = threading.Thread(target=self._run, daemon=True)

    def _run(self) -> None:
        while not self._stop:
            self.turns += 1
            os.stat("/")  # lets go of the lock for a moment

    def during(self, counts: list[int], call: Callable[..., Any]) -> Callable[..., Any]:
        """``call``, with the turns that were taken while it ran added to ``counts``."""

        def counted(*args: Any, **options: Any) -> Any:
            before = self.turns
            try:
                return call(*args, **options)
            finally:
                counts.append(self.turns - before)

        return counted

    def __enter__(self) -> _Trainer:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop = True
        self._thread.join(60)


@pytest.fixture
def handed_over_by_choice() -> Iterator[None]:
    before = sys.getswitchinterval()
    sys.setswitchinterval(60)
    try:
        yield
    finally:
        sys.setswitchinterval(before)


class _Counted:
    """A storage whose files' writes and syncs are counted."""

    def __init__(self, inner: ms.Storage, trainer: _Trainer) -> None:
        self._inner = inner
        self.trainer = trainer
        self.description, self.block_bytes = inner.description, inner.block_bytes
        self.writes: list[int] = []
        self.syncs: list[int] = []

    def create_file(self, name: str, size: int) -> WritableFile:
        file: Any = self._inner.create_file(name, size)
        file.write = self.trainer.during(self.writes, file.write)
        file.sync = self.trainer.during(self.syncs, file.sync)
        return file  # type: ignore[no-any-return]

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


@pytest.mark.usefixtures("handed_over_by_choice")
def test_long_calls_let_go_of_the_lock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    state = {"model": {"w": np.arange(12 * 2**20, dtype=np.int32)}}  # 48 MiB: three pieces of 16
    turns: dict[str, list[int]] = {"copying": [], "digests": [], "checks": []}
    with _Trainer() as trainer:
        monkeypatch.setattr(NumpyAdapter, "copy", trainer.during(turns["copying"], NumpyAdapter.copy))
        monkeypatch.setattr(Digester, "update", trainer.during(turns["digests"], Digester.update))
        storage = _Counted(open_storage(tmp_path), trainer)
        turns.update(writes=storage.writes, syncs=storage.syncs)
        with ms.Checkpointer(storage, keep=1) as ckpt:
            # Each call lasts some milliseconds, in which a busy machine may not let the trainer have a turn.
            for step in range(30):
                ckpt.save(step, state).result()
                with monkeypatch.context() as reading:
                    digest = trainer.during(turns["checks"], xxhash.xxh3_128_hexdigest)
                    reading.setattr(xxhash, "xxh3_128_hexdigest", digest)
                    ms.open(tmp_path).load()
                if all(map(sum, turns.values())):
                    break
    without = [what for what, counts in turns.items() if not sum(counts)]
    assert without == [], "the trainer did not get one turn during these"


def test_trainer_goes_on_while_twenty_thousand_arrays_are_saved(tmp_path: Path) -> None:
    state = {"model": {f"layer{n}.weight": np.full(4, n, np.float32) for n in range(20_000)}}
    steps = [0]
    looks: list[int] = []
    ended = threading.Event()

    def follow() -> None:
        while not ended.wait(0.01):
            looks.append(steps[0])

    with ms.Checkpointer(tmp_path) as ckpt:
        pending = ckpt.save(1, state)
        follower = threading.Thread(target=follow)
        follower.start()
        while not pending.done():
            steps[0] += 1  # a training loop of nothing but Python
        ended.set()
        follower.join(60)
    assert steps[0] > 1000
    moved = sum(now > before for before, now in itertools.pairwise(looks))
    assert moved >= (len(looks) - 1) / 2, "moved on all along, not only at the end"
    loaded = ms.open(tmp_path).load()["model"]
    assert len(loaded) == 20_000 and loaded["layer19999.weight"].tolist() == [19999.0] * 4
    assert len(list(tmp_path.glob("step-*/*.safetensors"))) == 1, "not a file for each array"
