"""The latest checkpoint changes when the new one is durable, and the old one is deleted only after that.

Keeping one checkpoint, a run is killed before every single operation on its storage, and once while
the writer stands still in the middle. What is left is always the old or the new checkpoint, whole.
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
from children import run_well, start_script
from helpers import values_in

import midstride as ms

SWEEP = """
import sys
from pathlib import Path
import numpy as np
import midstride as ms
from helpers import kill_at_each_operation, values_in

def state(step):
    return {name: {"w": np.full(5000, step, np.float32)} for name in ("model", "optimizer")}

run = Path(sys.argv[1]) / "run"
with ms.Checkpointer(run, keep=1) as ckpt:
    ckpt.save(1, state(1))
seen = []

def work(storage):
    with ms.Checkpointer(storage, keep=1, existing="continue") as ckpt:
        ckpt.save(2, state(2))

def check(folder, number):
    reader = ms.open(folder)
    latest = reader.latest().step
    assert latest in (1, 2)
    assert values_in(reader.load()) == {latest}
    assert all(not problems for problems in reader.verify().values())
    print(latest, flush=True)
    with ms.Checkpointer(folder, keep=1) as ckpt:
        assert ckpt.restore().step == latest
        ckpt.save(3, state(3))
    assert [info.step for info in reader.checkpoints()] == [3]
    assert len(list(folder.glob("step-*"))) == 1, "nothing of the dead run is left"

print(kill_at_each_operation(run, work, check), "operations", flush=True)
"""


def test_killed_before_every_operation(tmp_path: Path) -> None:
    *steps, last = run_well(SWEEP, tmp_path).splitlines()
    assert int(last.split()[0]) >= 20
    assert steps == sorted(steps), "once the new one is there, the old one never comes back"
    assert set(steps) == {"1", "2"}


HELD = """
import sys
import numpy as np
import midstride as ms
from hooked import Gate, HookedStorage, data_of

gate = Gate()

def hook(operation, name):
    if name.startswith(data_of(2)):
        gate(operation, name)

ckpt = ms.Checkpointer(HookedStorage(ms.LocalStorage(sys.argv[1]), hook), keep=1)
ckpt.save(1, {"w": np.full(5000, 1.0)}).result()
ckpt.save(2, {"w": np.full(5000, 2.0)})
assert gate.reached.wait(60)
print(ckpt.latest().step, flush=True)
sys.stdin.read()
"""


def test_killed_while_the_writer_is_held_up(tmp_path: Path) -> None:
    with start_script(HELD, tmp_path) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == "1\n", "not the latest before it is durable"
        child.kill()
    reader = ms.open(tmp_path)
    assert values_in(reader.load()) == {1}
    latest = reader.latest()
    assert latest is not None and latest.step == 1
    marker = json.loads((tmp_path / "midstride.json").read_text())
    assert "step" not in marker and "latest" not in marker, "no pointer that could be ahead of the truth"
    with ms.Checkpointer(tmp_path, keep=1) as ckpt:
        assert ckpt.restore() is not None
        ckpt.save(2, {"w": np.full(5000, 2.0)})
    assert [info.step for info in reader.checkpoints()] == [2]
