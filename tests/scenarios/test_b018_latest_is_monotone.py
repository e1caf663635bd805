"""The latest checkpoint of a run never goes back: saves are committed in the order of their calls.

One save is in flight at a time, so a later save cannot overtake a slow earlier one, whichever thread
calls it next; and order is a number in the manifest, not the time when a write happened to end.
"""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import numpy as np
from hooked import Gate, HookedStorage, data_of

import midstride as ms
from midstride.storage import open_storage


def test_slow_first_save_is_not_overtaken(tmp_path: Path) -> None:
    gate = Gate()
    seen: list[int] = []
    written: list[str] = []

    def hook(operation: str, name: str) -> None:
        if operation == "write" and name.endswith(".safetensors"):
            written.append(name.split("-")[1])
        if name.startswith(data_of(1)):
            gate(operation, name)
        latest = ms.open(tmp_path).latest()
        seen.append(latest.step if latest is not None else 0)

    with ms.Checkpointer(HookedStorage(open_storage(tmp_path), hook), keep=1) as ckpt:
        first = ckpt.save(1, {"w": np.ones(5000)})
        assert gate.reached.wait(60)
        second: list[Any] = []
        manual = threading.Thread(target=lambda: second.append(ckpt.save(2, {"w": np.full(5000, 2)})))
        manual.start()
        manual.join(0.05)
        assert not second and not first.done(), "the second waits for the first"
        gate.open()
        manual.join(60)
        infos = first.result(), second[0].result()
    assert [info.seq for info in infos] == [1, 2]
    assert infos[1].parent == infos[0].seq
    assert seen == sorted(seen) and set(seen) == {0, 1, 2}
    assert written == sorted(written), "no byte of the second was written before the first had ended"
    # Retention held the first for the older one.
    assert [info.step for info in ms.open(tmp_path).checkpoints()] == [2]


def test_order_is_that_of_the_calls_not_of_steps(tmp_path: Path) -> None:
    with ms.Checkpointer(tmp_path, keep=2) as ckpt:
        for step in (500, 20, 300):
            ckpt.save(step, {"w": np.full(10, step)}).result()
            latest = ckpt.latest()
            assert latest is not None and latest.step == step
    assert [info.step for info in ms.open(tmp_path).checkpoints()] == [20, 300]
