"""A loader's position is that of the last batch the trainer has had when ``save()`` was called, however
far its workers have read ahead by then or until the checkpoint is written: the next batch after a restore
is the one after it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hooked import Gate, HookedStorage

import midstride as ms
from midstride.storage import open_storage

_BATCHES = 14
_BATCH = 3


class _Numbers(torch.utils.data.Dataset[torch.Tensor]):
    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.tensor(index)

    def __len__(self) -> int:
        return _BATCHES * _BATCH


class _Sampler(torch.utils.data.Sampler[int]):
    """Its own count runs ahead with the workers."""

    def __init__(self) -> None:
        self.first = 0
        self.drawn = 0
        self.order = torch.randperm(_BATCHES * _BATCH, generator=torch.Generator().manual_seed(5)).tolist()

    def __iter__(self) -> Iterator[int]:
        for index in self.order[self.first :]:
            self.drawn += 1
            yield index


class _StatefulLoader:
    """Counts the batches it has handed out, and not those that its workers have fetched."""

    def __init__(self, workers: int) -> None:
        self.sampler = _Sampler()
        self._loader = torch.utils.data.DataLoader(
            _Numbers(), _BATCH, sampler=self.sampler, num_workers=workers, prefetch_factor=2 if workers else None
        )
        self._given = 0

    def __iter__(self) -> Iterator[list[int]]:
        self.sampler.first = self._given * _BATCH
        for batch in self._loader:
            self._given += 1
            yield batch.tolist()

    def state_dict(self) -> dict[str, Any]:
        return {"given": self._given, "order": self.sampler.order}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._given, self.sampler.order = state["given"], state["order"]


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_the_next_batch_is_the_one_after(tmp_path: Path) -> None:
    wanted = list(_StatefulLoader(0))
    loader = _StatefulLoader(2)
    ahead = 0
    with ms.Checkpointer(tmp_path) as ckpt:
        ckpt.save(0, {"loader": loader})
        for number, batch in enumerate(loader, 1):
            assert batch == wanted[number - 1]
            if number <= 10:
                ckpt.save(number, {"loader": loader})
                ahead = max(ahead, loader.sampler.drawn - number * _BATCH)
    assert ahead >= 2 * _BATCH, "the workers never read ahead"
    for number in range(11):
        live = _StatefulLoader(2 if number % 5 == 0 else 0)
        with ms.Checkpointer(tmp_path) as ckpt:
            ckpt.restore({"loader": live}, step=number)
        batches = iter(live)
        assert next(batches) == wanted[number]
        if number % 5:
            assert list(batches) == wanted[number + 1 :]


def test_the_position_is_taken_in_save_and_not_when_it_is_written(tmp_path: Path) -> None:
    gate = Gate("create_file")
    loader = _StatefulLoader(0)
    batches = iter(loader)
    with ms.Checkpointer(HookedStorage(open_storage(tmp_path), gate)) as ckpt:
        next(batches)
        pending = ckpt.save(1, {"loader": loader})
        assert gate.reached.wait(60)
        for _ in range(5):
            next(batches)
        loader.sampler.order.reverse()
        gate.open()
        pending.result()
    live = _StatefulLoader(0)
    wanted = list(live)[1:]
    with ms.Checkpointer(tmp_path) as ckpt:
        ckpt.restore({"loader": live})
    assert list(live) == wanted
