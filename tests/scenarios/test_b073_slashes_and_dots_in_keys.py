"""Keys with slashes and dots, empty and blank keys, and keys that look alike when joined, are keys like
any other."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file
from states import restore, save
from tests.exact import assert_same


def _nine(base: int) -> dict[Any, Any]:
    values = iter(range(base, base + 9))

    def t() -> np.ndarray:
        return np.full(2, next(values), np.float32)

    return {
        "mlp/~/linear_0": t(),
        "a.b": t(),
        "a": {"b": t()},
        "a/b": t(),
        "": t(),
        " ": t(),
        "..": t(),
        "0": t(),
        0: t(),
    }


@pytest.mark.parametrize("template", [False, True])
@pytest.mark.parametrize("where", ["at the top", "in an item"])
def test_all_nine_come_back(tmp_path: Path, where: str, template: bool) -> None:
    state: Any = _nine(10) if where == "at the top" else {"model": _nine(10), "other": {"model": {"b": np.zeros(1)}}}
    blank: Any = _nine(0) if where == "at the top" else {"model": _nine(0), "other": {"model": {"b": np.ones(1)}}}
    info = save(tmp_path, state)
    assert_same(restore(tmp_path, blank if template else None).state, state)
    assert all(entry.is_file() for entry in (tmp_path / info.name).iterdir())  # no key became a folder


def test_stock_readers_see_every_array_once(tmp_path: Path) -> None:
    info = save(tmp_path, {"model": _nine(0)})
    stored = load_file(tmp_path / info.name / "model.safetensors")
    assert sorted(array[0] for array in stored.values()) == list(range(9))
    assert "/mlp~1~0~1linear_0" in stored and "/a/b" in stored and "/a~1b" in stored


def test_names_of_a_flat_item_stay_as_they_are(tmp_path: Path) -> None:
    flat = {key: np.full(1, n) for n, key in enumerate(["mlp/~/linear_0", "a.b", "a/b", "", "..", "__metadata__"])}
    info = save(tmp_path, {"params": flat})
    stored = load_file(tmp_path / info.name / "params.safetensors")
    assert {"mlp/~/linear_0", "a.b", "a/b", "", ".."} < set(stored)
    assert_same(restore(tmp_path).state, {"params": flat})


def test_one_of_the_nine_alone(tmp_path: Path) -> None:
    save(tmp_path, {"model": _nine(0)})
    for pointer, value in {"/model/mlp~1~0~1linear_0": 0, "/model/a.b": 1, "/model/a/b": 2, "/model/a~1b": 3}.items():
        part = restore(tmp_path, only=pointer).state["model"]
        while isinstance(part, dict):
            (part,) = part.values()
        assert part.tolist() == [value, value], pointer
