"""The writer process is killed in mid-save: no error, no lost checkpoint, a fresh one, and no zombie."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import numpy as np
import pytest

import midstride as ms
from midstride.save.process_engine import ProcessEngine

pytestmark = pytest.mark.writer_process

_STATE = {"model": {"w": np.arange(4_000_000)}}


def _zombies() -> list[str]:
    children = Path(f"/proc/{os.getpid()}/task/{os.getpid()}/children").read_text().split()
    states = {pid: Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] for pid in children}
    return [pid for pid, state in states.items() if state == "Z"]


@pytest.mark.parametrize("signum", [signal.SIGKILL, signal.SIGABRT, signal.SIGSEGV])
def test_killed_in_mid_save(signum: int, tmp_path: Path) -> None:
    with ms.Checkpointer(tmp_path) as ckpt:
        ckpt.save(0, _STATE).result()
        engine = ckpt._saver._engine
        assert isinstance(engine, ProcessEngine)
        dead = set()
        for step in range(1, 6):
            pending = ckpt.save(step, _STATE | {"step": step})
            assert engine.pid is not None
            dead.add(engine.pid)
            os.kill(engine.pid, signum)
            ckpt.wait(timeout=30)
            assert pending.result().step == step
        ckpt.save(6, _STATE).result()
        assert len(dead) == 5
        assert ckpt.statistics().writer_restarts == 5
        assert ckpt.statistics().saves_failed == 0
        assert _zombies() == []
    assert [info.step for info in ms.open(tmp_path).checkpoints()] == list(range(7))
    assert _zombies() == []
