"""NaN, infinities, missing values and odd types of metrics are never best, never in the way, and leave strict JSON."""

from __future__ import annotations

import decimal
import fractions
import json
import math
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import pytest
import torch

import midstride as ms
from midstride.errors import UnsupportedState

_VALUES: list[Any] = [
    math.nan,
    0.5,
    math.inf,
    -math.inf,
    0.4,
    "missing",
    None,
    np.float32(0.75),
    torch.tensor(0.5),
    np.float64("nan"),
    torch.tensor(math.nan, dtype=torch.bfloat16),
    np.int64(3),
    np.array(2.5),
    7,
]


def _refuse(text: str) -> NoReturn:
    raise AssertionError(f"{text} is not JSON")


def _strict(run: Path) -> int:
    files = [p for p in run.rglob("*") if p.is_file() and (".json" in p.name)]
    for path in files:
        for line in path.read_text().splitlines() if path.suffix == ".jsonl" else [path.read_text()]:
            json.loads(line, parse_constant=_refuse)
    return len(files)


@pytest.mark.parametrize("backwards", [False, True])
def test_best_is_a_number(tmp_path: Path, backwards: bool) -> None:
    run = tmp_path / "run"
    values = _VALUES[::-1] if backwards else _VALUES
    with ms.Checkpointer(run) as ckpt:
        for step, value in enumerate(values):
            ckpt.save(step, {"w": np.full(10, step)}, metrics={} if value == "missing" else {"loss": value}).result()
            ckpt.wait()
        assert _strict(run) == len(values) + 1
        for reader in (ckpt, ms.open(run)):
            lowest, highest = reader.best("loss", "min"), reader.best("loss", "max")
            assert lowest is not None and lowest.metrics["loss"] == 0.4
            assert highest is not None and highest.metrics["loss"] == 7
        for info, value in zip(ckpt.checkpoints(), values, strict=True):
            if value == "missing":
                assert info.metrics == {}
            elif value is None:
                assert info.metrics == {"loss": None}
            else:
                found = info.metrics["loss"]
                assert type(found) in (int, float)
                assert found == value or (math.isnan(value) and found is not None and math.isnan(found))


def test_nan_first_blocks_nothing(tmp_path: Path) -> None:
    with ms.Checkpointer(tmp_path / "run", keep=ms.BestN(1, "loss", "min")) as ckpt:
        for step, (loss, kept) in enumerate(
            [(math.nan, [0]), (0.9, [1]), (-math.inf, [1, 2]), (0.8, [3]), (math.nan, [3, 4])]
        ):
            ckpt.save(step, {"w": np.zeros(10)}, metrics={"loss": loss}).result()
            ckpt.wait()
            assert [info.step for info in ckpt.checkpoints()] == kept


@pytest.mark.parametrize(
    "value",
    [
        decimal.Decimal("0.4"),
        True,
        np.bool_(True),
        torch.tensor(True),
        "0.3",
        b"1",
        1j,
        np.complex64(1),
        fractions.Fraction(1, 3),
        [0.1],
        np.array([0.1]),
        np.zeros((1, 1)),
        torch.zeros(1),
        {"a": 1.0},
        object(),
    ],
)
def test_other_types_are_refused_in_the_caller(tmp_path: Path, value: Any) -> None:
    with ms.Checkpointer(tmp_path / "run") as ckpt:
        ckpt.save(0, {"w": np.zeros(10)}).result()
        ckpt.wait()
        with pytest.raises(UnsupportedState, match=r"'loss'.*Nothing was written"):
            ckpt.save(1, {"w": np.ones(10)}, metrics={"loss": value})
        assert [info.step for info in ckpt.checkpoints()] == [0]
        ckpt.save(2, {"w": np.ones(10)}, metrics={"loss": 0.5}).result()
        ckpt.wait()


@pytest.mark.parametrize("metrics", [[("loss", 1.0)], 0.5, "loss", {1: 0.5}, {None: 0.5}])
def test_metrics_are_named(tmp_path: Path, metrics: Any) -> None:
    with ms.Checkpointer(tmp_path / "run") as ckpt, pytest.raises(TypeError, match="metric"):
        ckpt.save(0, {"w": np.zeros(10)}, metrics=metrics)


def test_huge_and_tiny_numbers_come_back(tmp_path: Path) -> None:
    metrics = {"big": 10**40, "beyond floats": 10**400, "tiny": 5e-324, "minus zero": -0.0, "third": 1 / 3}
    keep = ms.BestN(1, "beyond floats", "max") | ms.LatestN(1)
    with ms.Checkpointer(tmp_path / "run", keep=keep) as ckpt:
        ckpt.save(1, {"w": np.zeros(1)}, metrics={"beyond floats": 1.0}).result()
        ckpt.wait()
        info = ckpt.save(0, {"w": np.zeros(1)}, metrics=metrics).result()
        ckpt.wait()
        (read,) = ckpt.checkpoints()
        assert ckpt.best("beyond floats", "max") == read
        read = ckpt.checkpoints()[0]
        assert info.metrics == read.metrics == metrics
        assert str(read.metrics["minus zero"]) == "-0.0"
    _strict(tmp_path / "run")
