"""Workers are forked while the writer process has a save in flight: no hang, and the save commits."""

from __future__ import annotations

import multiprocessing
import os
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

import midstride as ms

pytestmark = pytest.mark.writer_process


class _Looks(TensorDataset):
    """A data set whose workers look at the run."""

    def __init__(self, ckpt: ms.Checkpointer) -> None:
        super().__init__(torch.arange(64.0))
        self._ckpt = ckpt

    def __getitem__(self, index: int) -> Any:
        assert self._ckpt.latest() is not None
        with pytest.raises(ms.SaveError, match="forked child"):
            self._ckpt.save(99, {"w": np.ones(3)})
        return super().__getitem__(index)


@pytest.mark.parametrize("end", ["normal", "os._exit"])
def test_a_data_loader_iterates_while_a_save_is_in_flight(end: str, tmp_path: Path) -> None:
    with ms.Checkpointer(tmp_path) as ckpt:
        ckpt.save(0, {"w": np.ones(3)}).result()
        ckpt.wait()
        pid = ckpt._saver._engine.pid  # type: ignore[attr-defined]
        os.kill(pid, signal.SIGSTOP)
        pending = ckpt.save(1, {"w": np.arange(1_000_000)})
        if end == "normal":
            loader = DataLoader(_Looks(ckpt), batch_size=8, num_workers=4, multiprocessing_context="fork")
            assert sum(len(batch[0]) for batch in loader) == 64
        else:
            child = os.fork()
            if child == 0:
                os._exit(0)
            assert os.waitpid(child, 0)[1] == 0
        assert not pending.done()
        os.kill(pid, signal.SIGCONT)
        assert pending.result(timeout=60).step == 1
    assert [info.step for info in ms.open(tmp_path).checkpoints()] == [0, 1]


@pytest.mark.parametrize("method", ["spawn", "forkserver"])
def test_processes_that_are_started_in_other_ways(method: str, tmp_path: Path) -> None:
    with ms.Checkpointer(tmp_path) as ckpt:
        pending = ckpt.save(1, {"w": np.arange(1_000_000)})
        with multiprocessing.get_context(method).Pool(2) as pool:
            assert pool.map(abs, range(-3, 0)) == [3, 2, 1]
        assert pending.result(timeout=60).step == 1
