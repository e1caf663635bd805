"""A dtype or a shape that differs from the template's is an error that names the key and both sides.
``cast=True`` converts within floats, within ints (where every value fits) and within complex numbers;
between kinds nothing is ever converted."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch
from states import restore, save
from tests.exact import assert_same

import midstride as ms

_MAKE: dict[str, Callable[[Any, str], Any]] = {
    "numpy": lambda values, dtype: np.array(values).astype(getattr(ml_dtypes, dtype, None) or dtype),
    "torch": lambda values, dtype: torch.tensor(values).to(getattr(torch, dtype)),
}


@pytest.fixture(params=_MAKE)
def make(request: pytest.FixtureRequest) -> Callable[[Any, str], Any]:
    return _MAKE[request.param]


@pytest.mark.parametrize(
    "values, saved, wanted, casts",
    [
        ([16777217], "int32", "float32", False),
        ([1.0], "float32", "int32", False),
        ([1.0], "float32", "complex64", False),
        ([1.00390625], "float32", "bfloat16", True),
        ([1.5], "bfloat16", "float32", True),
        ([0.1], "float64", "float32", True),
        ([2**40], "int64", "int32", False),
        ([7], "int64", "int32", True),
        ([True], "bool", "uint8", False),
        ([1], "uint8", "bool", False),
        ([1], "int16", "uint16", False),
        ([1j], "complex128", "complex64", True),
    ],
)
def test_dtypes(
    tmp_path: Path, make: Callable[[Any, str], Any], values: Any, saved: str, wanted: str, casts: bool
) -> None:
    state = {"state": {"a": {"counter": make(values, saved)}, "fine": make([1], "int8")}}
    save(tmp_path, state)
    template = {"state": {"a": {"counter": make([0], wanted)}, "fine": make([0], "int8")}}
    message = rf"/state/a/counter: .*\b{saved}\b.*\b{wanted}\b"
    with pytest.raises(ms.StateMismatch, match=message):
        restore(tmp_path, template)
    with pytest.raises(ms.StateMismatch, match=message):
        restore(tmp_path, template, strict=False)
    if casts:
        assert_same(restore(tmp_path, template, cast=True).state["state"]["a"]["counter"], make(values, wanted))
    else:
        with pytest.raises(ms.StateMismatch, match="/state/a/counter"):
            restore(tmp_path, template, cast=True)
    assert_same(restore(tmp_path, state).state, state)


@pytest.mark.parametrize("saved, wanted", [((1,), ()), ((), (1,)), ((2, 3), (3, 2)), ((2,), (2, 1)), ((0, 3), (0,))])
def test_shapes(tmp_path: Path, make: Callable[[Any, str], Any], saved: Any, wanted: Any) -> None:
    save(tmp_path, {"w": {"x": make(np.ones(saved), "float32")}})
    message = re.escape(f"/w/x: the checkpoint has shape {list(saved)}, the state wants {list(wanted)}")
    with pytest.raises(ms.StateMismatch, match=message):
        restore(tmp_path, {"w": {"x": make(np.zeros(wanted), "float32")}}, cast=True)


def test_all_differences_at_once_and_nothing_is_touched(tmp_path: Path) -> None:
    save(tmp_path, {"model": torch.nn.Linear(2, 3).double(), "n": np.ones(2, np.int64), "s": np.float32(1)})
    live = torch.nn.Linear(2, 4)
    before = live.weight.clone()
    with pytest.raises(ms.StateMismatch) as caught:
        restore(tmp_path, {"model": live, "n": np.ones(2, np.float64), "s": "text"}, cast=True)
    for place in ("/model/weight", "/model/bias", "/n", "/s"):
        assert f"\n  {place}: " in str(caught.value)
    assert torch.equal(live.weight, before)


def test_objects_are_cast_only_when_asked(tmp_path: Path) -> None:
    saved = torch.nn.Linear(3, 3)
    save(tmp_path, {"model": saved})
    live = torch.nn.Linear(3, 3).to(torch.bfloat16)
    with pytest.raises(ms.StateMismatch, match=r"/model/weight: .*float32.*bfloat16.*cast=True"):
        restore(tmp_path, {"model": live})
    restore(tmp_path, {"model": live}, cast=True)
    assert live.weight.dtype == torch.bfloat16 and torch.equal(live.weight, saved.weight.to(torch.bfloat16))


def test_moments_of_another_dtype_than_their_parameter_stay_as_they_were(tmp_path: Path) -> None:
    def made() -> torch.optim.Optimizer:
        return torch.optim.SGD([torch.nn.Parameter(torch.ones(3, dtype=torch.bfloat16))], momentum=0.9)

    saved, live = made(), made()
    moment = torch.tensor([1.00390625, 1e-30, 3.0])  # float32; bfloat16 would round the first
    saved.state[saved.param_groups[0]["params"][0]]["momentum_buffer"] = moment
    save(tmp_path, {"optimizer": saved})
    restore(tmp_path, {"optimizer": live})
    assert_same(live.state_dict()["state"][0]["momentum_buffer"], moment)


def test_python_numbers_come_back_as_they_were_saved(tmp_path: Path) -> None:
    save(tmp_path, {"lr": 1, "count": 16777217, "flag": True, "none": None})
    back = restore(tmp_path, {"lr": 0.1, "count": 0.0, "flag": 0, "none": 3}).state
    assert_same(back, {"lr": 1, "count": 16777217, "flag": True, "none": None})
    for template in ({"lr": "text"}, {"lr": np.zeros(1)}, {"lr": [1]}):
        with pytest.raises(ms.StateMismatch, match="/lr: "):
            restore(tmp_path, template, only="lr")


@pytest.mark.parametrize("shape", [(0, 2**62), (2**61, 0, 5)])
def test_a_shape_that_numpy_has_not(tmp_path: Path, shape: tuple[int, ...]) -> None:
    """Without elements, and yet too large for NumPy: PyTorch has such tensors."""
    save(tmp_path, {"a/b": [torch.empty(shape), torch.ones(2)], "fine": 1})
    reader = ms.open(tmp_path)
    for call in (
        lambda: restore(tmp_path),
        lambda: restore(tmp_path, {"a/b": [], "fine": 1}),
        lambda: reader.load(only="/a~1b/0"),
    ):
        with pytest.raises(ms.StateMismatch, match=rf"/a~1b/0: .*{re.escape(str(list(shape)))}") as caught:
            call()
        assert "only=" in str(caught.value) and "torch" in str(caught.value)
    back = restore(tmp_path, {"a/b": [torch.empty(shape), torch.zeros(2)], "fine": 0}).state
    assert back["a/b"][0].shape == shape and back["a/b"][1].tolist() == [1, 1]
    assert_same(reader.load(only=["/a~1b/1", "fine"]), {"a/b": [np.ones(2, "f4")], "fine": 1})
