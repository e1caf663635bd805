"""The best value and the patience of early stopping outlive the process: they lie with the checkpoints."""

from __future__ import annotations

import signal
from pathlib import Path

from children import run_script, run_well

import midstride as ms

_RUN = """
    import os, signal, sys
    import numpy as np
    import midstride as ms

    class EarlyStopping:
        # A callback of the user's, whose memory is part of the state.
        def __init__(self):
            self.best, self.waited = float("inf"), 0
        def see(self, loss):
            self.waited = 0 if loss < self.best else self.waited + 1
            self.best = min(self.best, loss)
        def state_dict(self):
            return vars(self).copy()
        def load_state_dict(self, state):
            vars(self).update(state)

    losses = [float(text) for text in sys.argv[2].split(",")]
    stopping = EarlyStopping()
    state = {"model": {"w": np.zeros(10)}, "stopping": stopping}
    ckpt = ms.Checkpointer(sys.argv[1], keep=ms.BestN(1, "loss", "min") | ms.LatestN(1))
    restored = ckpt.restore(state)
    step = restored.step if restored else 0
    for loss in losses:
        step += 1
        stopping.see(loss)
        state["model"]["w"] = np.full(10, loss)
        ckpt.save(step, state, metrics={"loss": loss}).result()
        best = ckpt.best("loss", "min")
        print(step, best.step, best.metrics["loss"], stopping.best, stopping.waited, flush=True)
    ckpt.wait()  # until what is no longer kept is gone, which result() does not wait for
    os.kill(os.getpid(), signal.SIGKILL)
"""


def test_best_and_patience(tmp_path: Path) -> None:
    run = tmp_path / "run"
    first = run_script(_RUN, run, "0.9,0.3,0.5")
    assert first.returncode == -signal.SIGKILL, first.stderr
    assert first.stdout.splitlines() == ["1 1 0.9 0.9 0", "2 2 0.3 0.3 0", "3 2 0.3 0.3 1"]
    second = run_script(_RUN, run, "0.6,0.4")
    assert second.returncode == -signal.SIGKILL, second.stderr
    assert second.stdout.splitlines() == ["4 2 0.3 0.3 2", "5 2 0.3 0.3 3"]
    reader = ms.open(run)
    assert [info.step for info in reader.checkpoints()] == [2, 5], "the best of the first process is kept by the second"
    assert (reader.load(2)["model"]["w"] == 0.3).all()
    third = run_script(_RUN, run, "0.2")
    assert third.stdout.splitlines() == ["6 6 0.2 0.2 0"]
    assert [info.step for info in reader.checkpoints()] == [6]


_TWICE = """
    import sys
    import midstride as ms
    reader = ms.open(sys.argv[1])
    print(reader.best("loss", "min").step)
"""


def test_best_in_a_process_that_only_reads(tmp_path: Path) -> None:
    run_script(_RUN, tmp_path / "run", "0.9,0.3,0.5")
    assert run_well(_TWICE, tmp_path / "run") == "2\n"
