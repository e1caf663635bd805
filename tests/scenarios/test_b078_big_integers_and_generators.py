"""Integers of any size and the states of random generators come back exactly, so that their streams go on
as if nothing had happened."""

from __future__ import annotations

import json
import math
import random
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import pytest
from states import restore, round_trip, save
from tests.exact import assert_same

import midstride as ms


@pytest.mark.parametrize("kind", ["PCG64", "PCG64DXSM", "MT19937", "Philox", "SFC64"])
@pytest.mark.parametrize("template", [False, True])
def test_a_generator_goes_on(tmp_path: Path, kind: str, template: bool) -> None:
    made = np.random.Generator(getattr(np.random, kind)(1))
    made.normal(size=7)
    made.integers(0, 9, dtype=np.uint32)  # leaves half a word for the next call
    state = {"rng": made.bit_generator.state}
    expected = made.normal(size=100), made.integers(0, 2**60, 100)
    other = np.random.Generator(getattr(np.random, kind)(2))
    back = round_trip(tmp_path, state, {"rng": other.bit_generator.state} if template else None)
    assert_same(back, state)
    other.bit_generator.state = back["rng"]
    assert_same((other.normal(size=100), other.integers(0, 2**60, 100)), expected)


def test_states_of_python_and_of_the_old_numpy_generator(tmp_path: Path) -> None:
    generator, old = random.Random(3), np.random.RandomState(3)
    generator.gauss(0, 1)
    old.normal()
    state = {"python": generator.getstate(), "tuple": old.get_state(), "dict": old.get_state(legacy=False)}
    expected = [generator.gauss(0, 1) for _ in range(100)], old.normal(size=100)
    back = round_trip(tmp_path, state)
    assert_same(back, state)
    for key in ("tuple", "dict"):
        generator, old = random.Random(), np.random.RandomState()
        generator.setstate(back["python"])
        old.set_state(back[key])
        assert_same(([generator.gauss(0, 1) for _ in range(100)], old.normal(size=100)), expected)


def test_the_processes_own_generators(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch", reason="PyTorch is not installed")

    def draw() -> Any:
        return [random.random() for _ in range(100)], np.random.rand(100), torch.rand(100)

    with ms.Checkpointer(tmp_path) as ckpt:
        ckpt.save(1, {"rng": ms.RNG()})
        expected = draw()
        random.seed(0), np.random.seed(0), torch.manual_seed(0)
        ckpt.restore({"rng": ms.RNG()})
        assert_same(draw(), expected)


def _refuse(text: str) -> NoReturn:
    raise AssertionError(f"{text} is not JSON")


def test_values_that_json_does_not_hold(tmp_path: Path) -> None:
    state = {
        "n": 2**200,
        "m": -(2**63) - 1,
        "f": 1e400,
        "b": b"\x00\xff",
        "edges": [sign * 2**power + by for power in (53, 63, 64) for sign in (-1, 1) for by in (-1, 0, 1)],
        "floats": [-math.inf, math.nan, -0.0, 5e-324, 0.1, 1e22, float(2**53), 1.7976931348623157e308],
        "huge": 7**20000,  # more digits than Python turns into decimal text
        "complex": complex(math.nan, -math.inf),
        "scalar": [np.uint64(2**64 - 1), np.float32(0.1), np.float64(1e-310), np.bool_(True), np.complex128(-0.0)],
    }
    info = save(tmp_path, state)
    assert_same(restore(tmp_path).state, state)
    json.loads((tmp_path / info.name / "manifest.json").read_bytes(), parse_constant=_refuse)
