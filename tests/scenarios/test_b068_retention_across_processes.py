"""Retention knows the checkpoints of the processes before: with ``keep=2`` there are two after every save, for ever."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from children import run_well

import midstride as ms

_RUN = """
    import os, sys
    import numpy as np
    import midstride as ms
    run = sys.argv[1]
    with ms.Checkpointer(run, keep=2) as ckpt:
        restored = ckpt.restore()
        step = restored.step if restored else 0
        for _ in range(3):
            step += 1
            ckpt.save(step, {"w": np.full(10, step)}).result()
            ckpt.wait()
            on_disk = [name for name in os.listdir(run) if name.startswith("step-")]
            print(*[info.step for info in ckpt.checkpoints()], len(on_disk))
"""


def test_three_processes(tmp_path: Path) -> None:
    run = tmp_path / "run"
    lines = [line for _ in range(3) for line in run_well(_RUN, run).splitlines()]
    assert lines == ["1 1", *[f"{step - 1} {step} 2" for step in range(2, 10)]]
    infos = ms.open(run).checkpoints()
    assert len({info.run for info in infos}) == 1, "one run, whatever the number of processes"
    assert [info.seq for info in infos] == [8, 9]
    assert (ms.open(run).load()["w"] == np.full(10, 9)).all()
