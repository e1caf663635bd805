"""A reader beside a trainer that rotates gets whole checkpoints, or ``Gone``, which it may try again.

Never parts of two steps, never a crash of the reader. First with every interleaving of one whole save
and retirement into one load; then with two processes that run freely.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from children import start_script
from hooked import HookedStorage

import midstride as ms
from midstride.errors import Gone, NotCommitted, NotFound
from midstride.storage import open_storage


def _state(step: int) -> dict[str, Any]:
    return {"model": {"w": np.full(3000, step)}, "optimizer": {"m": np.full(3000, step)}, "step": step}


def _step_of(state: Any) -> int:
    values = np.unique(np.concatenate([state["model"]["w"], state["optimizer"]["m"], [state["step"]]]))
    assert values.size == 1, "a mix of two steps"
    return int(values[0])


@pytest.mark.parametrize("way", ["load", "verify", "latest"])
def test_rotation_at_every_operation_of_a_read(tmp_path: Path, way: str) -> None:
    with ms.Checkpointer(tmp_path / "run", keep=1) as ckpt:
        ckpt.save(0, _state(0)).result()
        latest, turn, gone = 0, 0, 0
        done = False
        while not done:
            count, done = 0, True

            def hook(operation: str, name: str, turn: int = turn) -> None:
                nonlocal count, latest, done
                count += 1
                if count == turn + 1:
                    done = False
                    latest += 1
                    ckpt.save(latest, _state(latest)).result()

            before = latest
            reader = ms.open(HookedStorage(open_storage(tmp_path / "run"), hook))
            try:
                if way == "load":
                    assert before <= _step_of(reader.load()) <= latest
                elif way == "verify":
                    assert all(problems == [] for problems in reader.verify().values())
                else:
                    info = reader.latest()
                    assert info is not None and before <= info.step <= latest
            except Gone:
                gone += 1
                assert _step_of(reader.load()) == latest, "trying again is enough"
            turn += 1
        assert turn > 5 and gone == 0, f"one rotation in {turn} places: the reader's own second try is enough"


def test_a_rotation_at_every_operation(tmp_path: Path) -> None:
    """So many that a reader can hardly win: it says Gone, and nothing worse."""
    with ms.Checkpointer(tmp_path / "run", keep=1) as ckpt:
        ckpt.save(0, _state(0)).result()
        latest = 0

        def hook(operation: str, name: str) -> None:
            nonlocal latest
            if operation in ("open_file", "read") and name.endswith((".json", ".safetensors")):
                latest += 1
                ckpt.save(latest, _state(latest)).result()

        reader = ms.open(HookedStorage(open_storage(tmp_path / "run"), hook))
        for _ in range(3):
            with pytest.raises(Gone):
                reader.load()


_TRAINER = """
    import sys, threading
    import numpy as np
    import midstride as ms

    stopped = threading.Event()
    threading.Thread(target=lambda: (sys.stdin.read(), stopped.set()), daemon=True).start()
    step = 0
    with ms.Checkpointer(sys.argv[1], keep=1) as ckpt:
        while not stopped.is_set():
            step += 1
            state = {"model": {"w": np.full(3000, step)}, "optimizer": {"m": np.full(3000, step)}, "step": step}
            ckpt.save(step, state).result()
    print(step)
"""


def test_evaluator_beside_a_trainer(tmp_path: Path) -> None:
    run = tmp_path / "run"
    trainer = start_script(_TRAINER, run)
    with trainer:
        assert trainer.stdin is not None and trainer.stdout is not None
        seen: list[int] = []
        looks = 0
        while len(seen) < 200:
            looks += 1
            assert trainer.poll() is None and looks < 100_000
            try:
                seen.append(_step_of(ms.open(run).load()))
            except (Gone, NotFound, NotCommitted):
                continue  # not begun yet, or faster than this reader
        trainer.stdin.close()
        last = int(trainer.stdout.read())
    assert seen == sorted(seen), "never back to an older one"
    assert len(set(seen)) > 10, "the trainer did rotate beside"
    assert [info.step for info in ms.open(run).checkpoints()] == [last]
