"""None and empty containers are part of the structure: nothing vanishes, nothing shifts, None is not 0."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from states import restore, round_trip, save
from tests.exact import assert_same


class EmptyState(NamedTuple):
    """As optimizers written in functions have between their parts."""


class ScaleState(NamedTuple):
    count: Any
    inner: Any


def _chain(fill: int) -> Any:
    empty = EmptyState()
    return (np.full(2, fill), empty, None, {}, [], (), (empty, (ScaleState(fill, empty), None)), fill)


def test_a_chain_of_empty_states(tmp_path: Path) -> None:
    assert_same(round_trip(tmp_path, _chain(1), _chain(0)), _chain(1))
    second = {"opt": _chain(1), "none": None, "nothing": {"a": {}, "b": [[], [None, None]]}}
    assert_same(round_trip(tmp_path / "2", second, second), second)


def test_without_a_template_empty_states_are_empty_tuples(tmp_path: Path) -> None:
    save(tmp_path, _chain(1))
    restored = restore(tmp_path)
    assert_same(restored.state, (np.full(2, 1), (), None, {}, [], (), ((), ((1, ()), None)), 1))
    assert restored.types["/1"] == f"{__name__}:EmptyState"


def test_a_state_of_nothing_else(tmp_path: Path) -> None:
    for number, state in enumerate([None, {}, [], (), EmptyState(), {"a": None}]):
        assert_same(round_trip(tmp_path / str(number), state, state), state)


def _params() -> list[torch.nn.Parameter]:
    return [torch.nn.Parameter(torch.ones(2)), torch.nn.Parameter(torch.ones(3))]


def test_optimizers_that_have_no_state_yet(tmp_path: Path) -> None:
    for name, make in {
        "sgd": lambda p, lr: torch.optim.SGD(p, lr=lr),
        "adamw": lambda p, lr: torch.optim.AdamW(p, lr=lr),
    }.items():
        saved, live = make(_params(), 0.5), make(_params(), 0.1)
        if name == "sgd":  # it never has a state, even after a step
            for parameter in saved.param_groups[0]["params"]:
                parameter.grad = torch.ones_like(parameter)
            saved.step()
        path = tmp_path / name
        as_dict = round_trip(path, {"optimizer": saved.state_dict()})
        assert_same(as_dict, {"optimizer": saved.state_dict()})
        save(path, {"optimizer": saved}, 2)
        restore(path, {"optimizer": live})
        assert_same(live.state_dict(), saved.state_dict())
        live.step()
