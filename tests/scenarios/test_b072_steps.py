"""Step 0 is a step like any other; exact integers of every library are steps; all else is refused in the caller."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import midstride as ms


class _Exact:
    """An integer of a library that we do not know."""

    def __init__(self, value: int) -> None:
        self.value = value

    def __index__(self) -> int:
        return self.value


def test_step_zero_resumes(tmp_path: Path) -> None:
    with ms.Checkpointer(tmp_path / "run", every=1) as ckpt:
        assert ckpt.latest() is None and ckpt.restore() is None
        ckpt.save(0, {"w": np.full(10, 7)}).result()
        latest = ckpt.latest()
        assert latest is not None and latest.step == 0
    with ms.Checkpointer(tmp_path / "run") as ckpt:
        restored = ckpt.restore()
        assert restored is not None and restored.step == 0 and (restored.state["w"] == 7).all()
        again = ckpt.restore(step=0)
        assert again is not None and again.step == 0
        with pytest.raises(ms.StepExists):
            ckpt.save(0, {"w": np.full(10, 8)})
        ckpt.save(1, {"w": np.full(10, 8)}).result()
        zero = ckpt.restore(step=0)
        assert zero is not None and zero.step == 0 and (zero.state["w"] == 7).all(), "0 is not 'the latest'"
    assert (ms.open(tmp_path / "run").load(0)["w"] == 7).all()


_EXACT: list[tuple[Any, int]] = [
    (np.int64(7), 7),
    (torch.tensor(8), 8),
    (np.uint8(9), 9),
    (np.array(10), 10),
    (_Exact(11), 11),
    (torch.tensor(12, dtype=torch.int32), 12),
    (2**53 + 1, 2**53 + 1),
    (np.int64(2**53 + 3), 2**53 + 3),
    (torch.tensor(2**62 + 1), 2**62 + 1),
    (2**63 - 1, 2**63 - 1),
    (np.uint64(2**63 - 2), 2**63 - 2),
]


def test_exact_integers(tmp_path: Path) -> None:
    run = tmp_path / "run"
    with ms.Checkpointer(run) as ckpt:
        for number, (step, value) in enumerate(_EXACT):
            pending = ckpt.save(step, {"w": np.full(10, number)})
            info = pending.result()
            assert type(pending.step) is int and type(info.step) is int and info.step == value
            assert int(info.name.split("-")[1]) == value
            assert json.loads((run / info.name / "manifest.json").read_text())["step"] == value
        for number, (step, value) in enumerate(_EXACT):
            restored = ckpt.restore(step=step)
            assert restored is not None and restored.step == value and (restored.state["w"] == number).all()
    assert [info.step for info in ms.open(run).checkpoints()] == [value for _, value in _EXACT]


def test_a_tensor_as_counter_is_read_once(tmp_path: Path) -> None:
    """The step is what the counter was at the call, not what it became."""
    counter = torch.tensor(5)
    with ms.Checkpointer(tmp_path / "run") as ckpt:
        pending = ckpt.save(counter, {"w": np.zeros(10)})  # type: ignore[arg-type]
        counter += 100
        assert pending.result().step == 5


_NOT_WHOLE: list[Any] = [
    3.0,
    np.float64(3),
    torch.tensor(3.0),
    True,
    False,
    np.bool_(True),
    torch.tensor(True),
    "10",
    None,
    b"1",
    1j,
    [1],
    np.array([1, 2]),
    torch.tensor([1, 2]),
]
_OUT_OF_RANGE: list[Any] = [-1, np.int64(-5), torch.tensor(-1), 2**63, np.uint64(2**63), 2**200]


@pytest.mark.parametrize("call", ["save", "step", "restore"])
def test_the_rest_is_refused(tmp_path: Path, call: str) -> None:
    run = tmp_path / "run"
    with ms.Checkpointer(run, every=1) as ckpt:
        state = {"w": np.zeros(10)}
        for kind, steps in ((TypeError, _NOT_WHOLE), (ValueError, _OUT_OF_RANGE)):
            for step in steps:
                if call == "restore" and step is None:
                    continue  # the latest
                with pytest.raises(kind, match="step must be"):
                    if call == "restore":
                        ckpt.restore(step=step)
                    else:
                        getattr(ckpt, call)(step, state)
        assert ckpt.statistics().saves_begun == 0
    assert not run.exists(), "nothing was written"
