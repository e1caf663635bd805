"""What a killed save left neither blocks its step nor gets into the checkpoint of the next attempt.

The run dies three times while it saves the same step, each time restored from the step before. The
fourth attempt, with other data files, is committed and holds its own files alone; the leftovers of
the dead ones never amount to more than one attempt.
"""

from __future__ import annotations

import json
import signal
from pathlib import Path

from children import run_script, run_well
from helpers import folder_of, folders, values_in

import midstride as ms

ATTEMPT = """
import os, signal, sys
import numpy as np
import midstride as ms
from hooked import HookedStorage, data_of

items, kill = int(sys.argv[2]), sys.argv[3] == "kill"
written = set()

def hook(operation, name):
    if operation == "write" and name.startswith(data_of(30)):
        written.add(name)
        if kill and len(written) == 4:
            os.kill(os.getpid(), signal.SIGKILL)

def state(step, items):
    return {f"{'part' if items == 5 else 'half'}{n}": {"w": np.full(20000, step, np.float32)} for n in range(items)}

with ms.Checkpointer(HookedStorage(ms.LocalStorage(sys.argv[1]), hook)) as ckpt:
    restored = ckpt.restore()
    if restored is None:
        for step in (10, 20):
            ckpt.save(step, state(step, 5))
    else:
        assert restored.step == 20, restored.step
    ckpt.save(30, state(30, items))
"""


def test_third_time_lucky(tmp_path: Path) -> None:
    attempts = set()
    for _ in range(3):
        assert run_script(ATTEMPT, tmp_path, 5, "kill").returncode == -signal.SIGKILL
        assert len(folders(tmp_path)) == 3, "two checkpoints, and the leftovers of one attempt"
        dead = folder_of(tmp_path, 30)
        attempts.add(dead.name)
        assert not (dead / "manifest.json").exists()
        assert [info.step for info in ms.open(tmp_path).checkpoints()] == [10, 20]
    assert len(attempts) == 3, "an attempt's name is not used again"

    run_well(ATTEMPT, tmp_path, 2, "live")
    assert len(folders(tmp_path)) == 3
    done = folder_of(tmp_path, 30)
    assert done.name not in attempts
    named = {file["name"] for file in json.loads((done / "manifest.json").read_text())["files"]}
    assert named == {"half0.safetensors", "half1.safetensors"}
    assert {entry.name for entry in done.iterdir()} == named | {"manifest.json"}
    reader = ms.open(tmp_path)
    assert set(reader.load(30)) == {"half0", "half1"}
    assert values_in(reader.load(30)) == {30}
    assert not any(reader.verify().values())
