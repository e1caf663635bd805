"""A restore while a save is in flight sees the checkpoint before it or, in the same process, waits for it.

Another process sees the previous checkpoint, and is told that the one asked for is not committed yet.
"""

from __future__ import annotations

import threading
from pathlib import Path

import numpy as np
import pytest
from children import run_well
from helpers import values_in
from hooked import Gate, HookedStorage, data_of

import midstride as ms
from midstride.storage import open_storage

OTHER = """
import sys
import midstride as ms

ckpt = ms.Checkpointer(sys.argv[1])
restored = ckpt.restore()
print(restored.step, restored.state["w"][0])
for look in (lambda: ckpt.restore(step=7), lambda: ms.open(sys.argv[1]).load(7)):
    try:
        look()
    except ms.NotCommitted as error:
        print(error)
"""


@pytest.mark.parametrize("step", [None, 7])
def test_same_process_waits_another_sees_the_previous(tmp_path: Path, step: int | None) -> None:
    gate = Gate()

    def hook(operation: str, name: str) -> None:
        if name.startswith(data_of(7)):
            gate(operation, name)

    with ms.Checkpointer(HookedStorage(open_storage(tmp_path), hook)) as ckpt:
        ckpt.save(6, {"w": np.full(5000, 6)}).result()
        pending = ckpt.save(7, {"w": np.full(5000, 7)})
        assert gate.reached.wait(60)
        first, *refused = run_well(OTHER, tmp_path).splitlines()
        assert first == "6 6"
        assert len(refused) == 2
        for line in refused:
            assert "no committed checkpoint of step 7" in line and "has begun and is not committed" in line
        assert not pending.done()

        opener = threading.Timer(0.05, gate.open)
        opener.start()
        restored = ckpt.restore(step=step)
        opener.join()
        assert restored is not None and restored.step == 7
        assert pending.done() and restored.info == pending.result()
        assert values_in(restored.state) == {7}


def test_very_first_save_in_flight(tmp_path: Path) -> None:
    gate = Gate()
    with ms.Checkpointer(HookedStorage(open_storage(tmp_path), gate)) as ckpt:
        ckpt.save(1, {"w": np.ones(5000)})
        assert gate.reached.wait(60)
        assert ms.Checkpointer(tmp_path).restore() is None, "nothing was ever saved here, so far"
        gate.open()
    assert ms.Checkpointer(tmp_path).restore() is not None
