"""Arrays of objects, strings, dates and records, and objects of unknown classes, are refused in ``save()``
with their path, before anything is written. Nothing is pickled, and a restore leaves nothing out without
saying so."""

from __future__ import annotations

import pickle
import sys
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import pytest
import torch
from states import nothing_written, restore, save

import midstride as ms


class _Unknown:
    def __init__(self) -> None:
        self.x = 1


class _HalfStateful:
    def state_dict(self) -> dict[str, Any]:
        return {}


class _Slice:
    """A state_dict() that holds what cannot be saved."""

    def state_dict(self) -> dict[str, Any]:
        return {"fine": 1, "hook": print}

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


_REFUSED: dict[str, Any] = {
    "object array": np.array(["a", None], object),
    "text array": np.array(["abcde"], "<U5"),
    "bytes array": np.array([b"abc"]),
    "dates": np.array(["2020-01-01"], "datetime64[D]"),
    "durations": np.array([1], "timedelta64[s]"),
    "records": np.zeros(2, [("a", "i4"), ("b", "f8")]),
    "record": np.zeros(2, [("a", "i4"), ("b", "f8")])[0],
    "date": np.datetime64("2020-01-01"),
    "masked array": np.ma.masked_array([1, 2], [True, False]),
    "record array": np.rec.array([(1, 2.0)]),
    "lambda": lambda x: x,
    "instance": _Unknown(),
    "half stateful": _HalfStateful(),
    "class": _Unknown,
    "class of tensors": torch.Tensor,
    "torch generator": torch.Generator(),
    "numpy generator": np.random.default_rng(),
    "device": torch.device("cpu"),
    "dtype": np.dtype("f4"),
    "module": sys,
    "file": open(__file__),
    "iterator": iter([1]),
    "range": range(3),
    "slice": slice(1),
    "memoryview": memoryview(b"x"),
    "lock": __import__("threading").Lock(),
}


@pytest.mark.parametrize("name", _REFUSED)
def test_refused_in_the_caller(tmp_path: Path, name: str) -> None:
    with ms.Checkpointer(tmp_path / "run") as ckpt:
        with pytest.raises(ms.UnsupportedState, match="/outer/0/b~1c: .*Nothing was written"):
            ckpt.save(1, {"w": np.ones(3), "outer": [{"b/c": _REFUSED[name]}]})
        assert nothing_written(tmp_path / "run")
        assert ckpt.statistics().saves_begun == 0
        ckpt.save(1, {"w": np.ones(3)}).result()
    assert ms.open(tmp_path / "run").load()["w"].tolist() == [1, 1, 1]


def test_below_an_object_and_in_a_loop(tmp_path: Path) -> None:
    loop: list[Any] = []
    loop.append({"again": loop})
    deep: Any = 1
    for _ in range(200):
        deep = [deep]
    with ms.Checkpointer(tmp_path / "run") as ckpt:
        for state, match in (
            ({"sampler": _Slice()}, "/sampler/hook: "),
            ({"loop": loop}, "/loop/0/again: .*contains itself"),
            ({"deep": deep}, "/deep/0/0.*levels deep"),
            (_Unknown(), "^/: "),
        ):
            with pytest.raises(ms.UnsupportedState, match=match):
                ckpt.save(1, state)
            with pytest.raises(ms.UnsupportedState, match=match):
                ckpt.step(1, state)
        assert nothing_written(tmp_path / "run")


def test_nothing_is_pickled_or_unpickled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **__: Any) -> NoReturn:
        raise AssertionError("pickle was used")

    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.AdamW(model.parameters())  # PyTorch's first one loads modules that use pickle
    for name in ("dump", "dumps", "load", "loads", "Pickler", "Unpickler"):
        monkeypatch.setattr(pickle, name, refuse)
    state = {"model": model, "rng": ms.RNG(), "optimizer": optimizer}
    info = save(tmp_path, {**state, "args": {"lr": 0.1}})
    restore(tmp_path, {**state, "args": {"lr": 0}})
    for file in (tmp_path / info.name).iterdir():
        assert not file.read_bytes().startswith((b"\x80", b"PK"))  # a pickle, or a zip of them


def test_a_part_that_cannot_be_put_back_is_told(tmp_path: Path) -> None:
    class Broken:
        def state_dict(self) -> dict[str, Any]:
            return {"x": 1}

        def load_state_dict(self, state: dict[str, Any]) -> None:
            raise ValueError("a bad day")

    save(tmp_path, {"broken": Broken(), "w": np.ones(1)})
    with ms.Checkpointer(tmp_path) as ckpt:
        with pytest.raises(ms.StateMismatch, match="a bad day"):
            ckpt.restore({"broken": Broken(), "w": np.zeros(1)}, strict=False)
        with pytest.raises(ms.SaveError, match="not whole"):
            ckpt.save(2, {"w": np.zeros(1)})
