"""Keys come back with their types: int, str, bool, float, None and tuples are never each other. Others are
refused in save()."""

from __future__ import annotations

import enum
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from states import nothing_written, restore, round_trip, save
from tests.exact import assert_same

import midstride as ms


class _Color(enum.Enum):
    RED = 1


class _Text(str):
    __slots__ = ()


def _state() -> dict[str, Any]:
    t = np.arange(3.0)
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    return {
        "milestones": Counter({25: 1, 50: 1}),
        "both": {1: "a", "1": "b"},
        "bool": {True: "x", False: t},
        "pair": {(0, 1): t, (): 1, ((1, "1"), None): 2},
        "none": {None: t, "None": 1},
        "float": {1.5: t, float("inf"): 1, -0.0: 2},
        "big": {2**70: 1, -(2**63): 2},
        "state": optimizer.state_dict()["state"],
    }


def test_two_generations(tmp_path: Path) -> None:
    state = _state()
    first = restore_native(tmp_path / "1", state)
    assert_same(first, state)
    second = restore_native(tmp_path / "2", first)
    assert_same(second, state)


def restore_native(path: Path, state: dict[str, Any]) -> Any:
    """With a template, so that tensors come back as tensors."""
    return round_trip(path, state, state)


def test_without_a_template(tmp_path: Path) -> None:
    state = _state()
    back = round_trip(tmp_path, state)
    moments = back.pop("state")
    for number, fields in state.pop("state").items():
        for name, tensor in fields.items():
            assert_same(moments[number][name], tensor.numpy())
    assert_same(back, state)


def test_equal_keys_of_other_types_are_no_match(tmp_path: Path) -> None:
    save(tmp_path, {"both": {1: np.zeros(1)}})
    for key in ("1", True, 1.0):
        with pytest.raises(ms.StateMismatch, match=r"/both/1"):
            restore(tmp_path, {"both": {key: np.zeros(1)}})


def test_a_scheduler_meets_its_milestones(tmp_path: Path) -> None:
    def made() -> tuple[torch.optim.Optimizer, Any]:
        optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=1.0)
        return optimizer, torch.optim.lr_scheduler.MultiStepLR(optimizer, [2, 4])

    def steps(optimizer: torch.optim.Optimizer, scheduler: Any, count: int) -> list[float]:
        rates = []
        for _ in range(count):
            optimizer.step()
            scheduler.step()
            rates.append(scheduler.get_last_lr()[0])
        return rates

    path = tmp_path / "run"
    original = made()
    rates = steps(*original, 1)
    for generation in range(4):
        live = made()
        save(path, {"optimizer": original[0], "scheduler": original[1]}, generation)
        restore(path, {"optimizer": live[0], "scheduler": live[1]})
        assert live[1].milestones == Counter({2: 1, 4: 1})
        rates += steps(*live, 1)
        original = live
    assert rates == pytest.approx([1, 0.1, 0.1, 0.01, 0.01])


@pytest.mark.parametrize(
    "key",
    [
        b"x",
        frozenset({1}),
        _Color.RED,
        np.int64(1),
        np.float64(1.0),
        _Text("x"),
        (1, b"x"),
        "\ud800",
        object,
        torch.float32,
    ],
)
def test_other_keys_are_refused_in_the_caller(tmp_path: Path, key: Any) -> None:
    with ms.Checkpointer(tmp_path / "run") as ckpt:
        with pytest.raises(ms.UnsupportedState, match="/outer/inner: "):
            ckpt.save(1, {"outer": {"inner": {"fine": 1, key: np.zeros(1)}}})
        assert nothing_written(tmp_path / "run")
        ckpt.save(1, {"outer": {"inner": {"fine": 1}}}).result()
