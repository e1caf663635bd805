"""Two jobs in one folder: the second is refused and told who holds it; nothing is ever mixed.

While the first lives the second gets ``Busy`` with the owner's host and process; when the first is
done it gets ``ForeignRun``, because it neither made nor restored what lies there. Readers are free.
"""

from __future__ import annotations

import os
import socket
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from children import run_well, start_script

import midstride as ms
from midstride.errors import Busy, ForeignRun

_JOB = """
    import sys
    import numpy as np
    import midstride as ms
    from midstride.errors import Busy, ForeignRun

    path, weight = sys.argv[1], float(sys.argv[2])
    sys.stdin.readline()
    saved = 0
    try:
        with ms.Checkpointer(path, keep=3) as ckpt:
            for step in range(1, 21):
                state = {"model": {"w": np.full(5000, weight)}, "optimizer": {"m": np.full(5000, weight)}, "step": step}
                ckpt.save(step, state)
                saved += 1
                if step == 1:
                    ckpt.wait()
                    print("holding", flush=True)
                    if "pause" in sys.argv:
                        sys.stdin.readline()
        print("done", saved)
    except (Busy, ForeignRun) as error:
        print(type(error).__name__, saved, error)
"""


def _whole(state: Any) -> float:
    values = np.unique(np.concatenate([state["model"]["w"], state["optimizer"]["m"]]))
    assert values.size == 1, "a checkpoint with parts of two jobs"
    return float(values[0])


def _check(run: Path, weight: float) -> None:
    reader = ms.open(run)
    infos = reader.checkpoints()
    assert [info.step for info in infos] == [18, 19, 20]
    assert len({info.run for info in infos}) == 1
    assert all(problems == [] for problems in reader.verify().values())
    for info in infos:
        state = reader.load(info.step)
        assert _whole(state) == weight and state["step"] == info.step


def test_second_writer_is_refused(tmp_path: Path) -> None:
    run = tmp_path / "run"
    first = start_script(_JOB, run, 1.0, "pause")
    assert first.stdin is not None and first.stdout is not None
    with first:
        first.stdin.write("go\n")
        first.stdin.flush()
        assert first.stdout.readline() == "holding\n"
        # Another process, and a second object in this one.
        told = run_well(_JOB, run, 2.0, input="go\n").split(maxsplit=2)
        assert told[:2] == ["Busy", "0"]
        assert str(first.pid) in told[2] and socket.gethostname() in told[2]
        with pytest.raises(Busy, match=str(first.pid)):
            ms.Checkpointer(run, existing="continue").save(99, {"w": np.zeros(1)})
        assert [info.step for info in ms.open(run).checkpoints()] == [1], "readers are free"
        first.stdin.write("go\n")
        first.stdin.flush()
        assert first.stdout.readline() == "done 20\n"
    assert first.returncode == 0
    _check(run, 1.0)
    # The first is gone, and so is its lock; what it saved is still not the second's.
    with pytest.raises(ForeignRun, match="3 checkpoints"):
        ms.Checkpointer(run).save(1, {"w": np.zeros(1)})
    _check(run, 1.0)


def test_two_at_once(tmp_path: Path) -> None:
    run = tmp_path / "run"
    jobs = [start_script(_JOB, run, weight) for weight in (1.0, 2.0)]
    for job in jobs:
        assert job.stdin is not None
        job.stdin.write("go\n")
        job.stdin.flush()
    told = [job.communicate(timeout=60)[0].splitlines()[-1].split() for job in jobs]
    assert [job.returncode for job in jobs] == [0, 0]
    winners = [weight for weight, words in zip((1.0, 2.0), told, strict=True) if words[:2] == ["done", "20"]]
    losers = [words for words in told if words[0] in ("Busy", "ForeignRun") and words[1] == "0"]
    assert len(winners) == 1 and len(losers) == 1, told
    _check(run, winners[0])


def test_lock_ends_with_its_holder(tmp_path: Path) -> None:
    """Killed, not closed: the next run need not clear anything away."""
    run = tmp_path / "run"
    first = start_script(_JOB, run, 1.0, "pause")
    assert first.stdin is not None and first.stdout is not None
    with first:
        first.stdin.write("go\n")
        first.stdin.flush()
        assert first.stdout.readline() == "holding\n"
        os.kill(first.pid, 9)
    with ms.Checkpointer(run) as ckpt:
        restored = ckpt.restore()
        assert restored is not None and restored.step == 1
        ckpt.save(2, restored.state)
    assert [info.step for info in ms.open(run).checkpoints()] == [1, 2]
