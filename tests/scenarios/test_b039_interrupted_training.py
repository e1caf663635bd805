"""An exception never makes a checkpoint: what is on disk is what the run asked to save, before it.

Leaving the ``with`` block by an exception finishes the save in flight, begins none, and shows the
exception. A half updated state cannot replace a saved step unless ``overwrite`` is said; an emergency
copy goes to a folder of its own, where no resume looks.
"""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers import folders, values_in
from hooked import Gate, HookedStorage

import midstride as ms
from midstride.storage import open_storage


class _Model:
    def __init__(self) -> None:
        self.a, self.b = np.zeros(1000), np.zeros(1000)

    def half_update(self, value: float) -> None:
        self.a[:] = value
        signal.raise_signal(signal.SIGINT)  # between two parameters
        self.b[:] = value

    def state(self) -> dict[str, Any]:
        return {"model": {"a": self.a, "b": self.b}}


def _is_good(path: Path) -> None:
    reader = ms.open(path)
    assert [info.step for info in reader.checkpoints()] == [10]
    assert values_in(reader.load()) == {1}
    assert len(folders(path)) == 1


@pytest.mark.parametrize("value", [2.0, float("nan")])
def test_interrupted_between_two_updates(tmp_path: Path, value: float) -> None:
    model = _Model()
    with pytest.raises(KeyboardInterrupt), ms.Checkpointer(tmp_path, every=10) as ckpt:
        model.a[:] = model.b[:] = 1
        assert ckpt.step(10, model.state()) is not None
        model.half_update(value)
    _is_good(tmp_path)


def test_save_in_flight_is_finished(tmp_path: Path) -> None:
    gate = Gate()
    model = _Model()
    with (
        pytest.raises(KeyboardInterrupt),
        ms.Checkpointer(HookedStorage(open_storage(tmp_path), gate), every=10) as ckpt,
    ):
        model.a[:] = model.b[:] = 1
        assert ckpt.step(10, model.state()) is not None
        assert gate.reached.wait(60)
        try:
            model.half_update(2)
        finally:
            gate.open()
    _is_good(tmp_path)


def test_handler_that_saves_at_the_same_step(tmp_path: Path) -> None:
    model = _Model()
    run, emergency = tmp_path / "run", tmp_path / "run" / "emergency"
    with pytest.raises(KeyboardInterrupt), ms.Checkpointer(run, every=10) as ckpt:
        try:
            model.a[:] = model.b[:] = 1
            ckpt.step(10, model.state())
            model.half_update(float("nan"))
        except KeyboardInterrupt:
            with pytest.raises(ms.StepExists):
                ckpt.save(10, model.state())
            with ms.Checkpointer(emergency) as other:
                other.save(10, model.state())
            raise
    _is_good(run)
    with ms.Checkpointer(run) as ckpt:
        restored = ckpt.restore()
        assert restored is not None and restored.warnings == () and values_in(restored.state) == {1}
        ckpt.save(20, restored.state)
    asked_for = ms.open(emergency).load(10)["model"]
    assert np.isnan(asked_for["a"]).all() and values_in(asked_for["b"]) == {1}
