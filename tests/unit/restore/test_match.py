"""Fitting saved trees to templates, without any storage: what is equal, what is told, what is left alone."""

from __future__ import annotations

import dataclasses
import enum
import pathlib
from collections import Counter, OrderedDict, defaultdict, deque
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np
import pytest
from tests.exact import assert_same

from midstride.adapters import Report
from midstride.errors import StateMismatch
from midstride.format.manifest import ArrayRecord, Manifest, Slice
from midstride.format.values import decode_tree, encode_tree
from midstride.restore.match import ANYTHING, Fill, Matcher
from midstride.state import walk
from midstride.tree import Tree


class Saved:
    """A state as a checkpoint has it."""

    def __init__(self, state: Any) -> None:
        walked = walk(state)
        self.tree: Tree = decode_tree(encode_tree(walked.tree))
        self.data = [np.ascontiguousarray(leaf.source).reshape(-1).view(np.uint8) for leaf in walked.leaves]
        arrays = tuple(
            ArrayRecord(leaf.dtype, leaf.shape, leaf.adapter.lib, (Slice(0, "", (), (), 0, 0, data.tobytes().hex()),))
            for leaf, data in zip(walked.leaves, self.data, strict=True)
        )
        self.manifest = Manifest("", 1, None, 1, "", "", {}, 1, {}, None, arrays, ())

    def match(self, template: Any = ANYTHING, *, strict: bool = True, **options: Any) -> tuple[Fill, Report]:
        report = Report(strict=strict)
        matcher = Matcher(self.manifest, report, cast=options.get("cast", False), parts=options.get("parts", {}))
        return matcher.match(template, self.tree), report

    def put(self, template: Any = ANYTHING, **options: Any) -> Any:
        fill, report = self.match(template, **options)
        assert report.problems == []
        for index, destination, first in fill.destinations:
            destination.buffer[:] = self.data[index][first : first + destination.buffer.size]
        for load in (*fill.loads, *fill.last_loads):
            load()
        return fill.build()

    def problems(self, template: Any, **options: Any) -> list[str]:
        return self.match(template, **options)[1].problems


class Color(enum.Enum):
    RED = 1
    BLUE = 2


class Point(NamedTuple):
    x: Any
    y: Any


@dataclasses.dataclass
class Config:
    w: Any
    n: int


class Box:
    """An object with a state, of which the order of loading is kept."""

    order: list[str] = []  # noqa: RUF012

    def __init__(self, name: str, state: Any = None, *, last: bool = False) -> None:
        self.name, self.state, self.restore_last = name, state, last

    def state_dict(self) -> Any:
        return self.state

    def load_state_dict(self, state: Any) -> None:
        Box.order.append(self.name)
        self.state = state


def test_differences_are_told_all_at_once_with_the_nearest_names() -> None:
    saved = Saved(
        {"model": {"fc.weight": np.zeros(3), "fc.bias": np.zeros(2)}, "lr": 0.1, "n": [1, 2], "p": Point(1, 2)}
    )
    template = {
        "model": {"fc.wieght": np.zeros(3), "fc.bias": np.zeros(4)},
        "lr": np.zeros(1),
        "n": {"a": 1},
        "p": Config(1, 2),
    }
    problems = saved.problems(template)
    for start in (
        "/model/fc.wieght: is not in the checkpoint (the checkpoint has fc.weight)",
        "/model/fc.weight: is in the checkpoint, not in the state (it has fc.wieght)",
        "/model/fc.bias: the checkpoint has shape [2], the state wants [4]",
        "/lr: the checkpoint holds a float, the state wants an array float64[1]",
        "/n: the checkpoint holds a list, the state wants a dict",
        "/p: the checkpoint holds a namedtuple",
    ):
        assert any(problem.startswith(start) for problem in problems), start
    assert len(problems) == 6


def test_lenient_names_but_never_lenient_shapes() -> None:
    saved = Saved({"a": np.ones(2), "b": np.ones(2), "gone": 1})
    _, report = saved.match({"a": np.zeros(2), "b": np.zeros(3), "new": 7}, strict=False)
    assert report.problems == ["/b: the checkpoint has shape [2], the state wants [3]"]
    assert len(report.warnings) == 2
    assert saved.put({"a": np.zeros(2), "b": np.zeros(2), "new": 7}, strict=False)["new"] == 7
    assert saved.problems({"other": 1}, strict=False) == ["/: nothing in the checkpoint matches the state"]


def test_arrays_are_new_and_the_template_is_untouched() -> None:
    template = {"w": np.zeros(3), "t": (np.zeros(1), [np.zeros(1)])}
    saved = Saved({"w": np.ones(3), "t": (np.ones(1), [np.ones(1)])})
    fill, _ = saved.match(template)
    assert not fill.in_place
    back = saved.put(template)
    assert back["w"] is not template["w"] and not template["w"].any() and back["w"].all()


def test_empty_templates_and_those_of_another_length_take_what_there_is() -> None:
    saved = Saved({"d": {"a": 1, 2: np.ones(1)}, "l": [1, 2, 3], "t": (1, "a"), "q": deque([1], 4), "s": {1, 2}})
    back = saved.put({"d": {}, "l": [], "t": (0,), "q": deque([5, 6], 9), "s": set()})
    assert_same(back, {"d": {"a": 1, 2: np.ones(1)}, "l": [1, 2, 3], "t": (1, "a"), "q": deque([1], 9), "s": {1, 2}})
    assert saved.problems({"d": {}, "l": [np.zeros(1)], "t": (), "q": deque(), "s": set()}) == [
        "/l: the checkpoint has 3 items, the state wants 1"
    ]


def test_counters_and_default_dicts_grow() -> None:
    saved = Saved({"c": Counter(a=3), "d": defaultdict(list, x=[1]), "o": OrderedDict(z=1, a=2)})
    back = saved.put({"c": Counter(b=9), "d": defaultdict(dict, y={}), "o": OrderedDict(a=0, z=0)})
    assert back["c"] == Counter(a=3) and back["d"] == {"x": [1]} and back["d"].default_factory is dict
    assert_same(back["o"], OrderedDict(a=2, z=1))  # the order is the template's


def test_values_keep_their_class() -> None:
    saved = Saved(
        {"e": Color.BLUE, "p": pathlib.Path("a/b"), "f": np.float32(0.1), "i": 2**70, "b": b"x", "none": None}
    )
    state = {"e": Color.BLUE, "p": pathlib.Path("a/b"), "f": np.float32(0.1), "i": 2**70, "b": b"x", "none": None}
    blank = {"e": Color.RED, "p": pathlib.Path(), "f": np.float32(0), "i": 0, "b": b"", "none": None}
    assert_same(saved.put(blank), state)
    assert saved.put()["e"] == 2
    assert saved.match()[0].types == {"/e": f"{__name__}:Color.BLUE"}
    windows = saved.put({**blank, "p": pathlib.PureWindowsPath("c")})["p"]
    assert_same(windows, pathlib.PureWindowsPath("a/b"))
    other = enum.Enum("Color", {"GREEN": 1})
    for key, wrong in {"e": other.GREEN, "i": "0", "b": "", "p": np.zeros(1)}.items():
        (problem,) = saved.problems({**blank, key: wrong})
        assert problem.startswith(f"/{key}: ")


@pytest.mark.parametrize(
    "values, wanted, fits",
    [
        (np.array([1.5]), np.float32, True),
        (np.array([1.5], np.float32), ml_dtypes.bfloat16, True),
        (np.array([1.5], ml_dtypes.float8_e4m3fn), np.float64, True),
        (np.array([1], np.int64), np.int8, True),
        (np.array([7], np.int8), ml_dtypes.int4, True),
        (np.array([1j]), np.complex64, True),
        (np.array([True]), np.uint8, False),
        (np.array([1], np.uint8), np.int16, False),
        (np.array([1.0]), np.complex128, False),
        (np.array([1]), np.float64, False),
    ],
)
def test_casts(values: np.ndarray, wanted: Any, fits: bool) -> None:
    saved, template = Saved([values]), [np.zeros(1, wanted)]
    (problem,) = saved.problems(template)
    assert ("cast=True" in problem) == fits
    if fits:
        assert_same(saved.put(template, cast=True), [values.astype(wanted)])
    else:
        assert len(saved.problems(template, cast=True)) == 1


@pytest.mark.parametrize(
    "value, wanted", [(300, np.int8), (-9, ml_dtypes.int4), (2**40, np.int32), (-(2**31) - 1, np.int32)]
)
def test_integers_that_do_not_fit_are_never_wrapped(value: int, wanted: Any) -> None:
    with pytest.raises(StateMismatch, match=r"^/x: .*do not fit"):
        Saved({"x": np.array([1, value])}).put({"x": np.zeros(2, wanted)}, cast=True)


def test_parts_of_an_array() -> None:
    x = np.arange(60).reshape(5, 4, 3)
    saved = Saved([x])
    for part in (
        (slice(1, 3),),
        (slice(None, None, 2), slice(1, None)),
        (slice(-2, None),),
        (slice(9, 2),),
        (slice(0, 5),) * 3,
    ):
        fill, _ = saved.match(parts={0: part})
        ((_, destination, first),) = fill.destinations
        assert first % x[0].nbytes == 0 and destination.buffer.size <= x.nbytes
        (found,) = saved.put(parts={0: part})
        assert_same(found, x[part].copy())
        assert found.base is None or found.base.nbytes <= max(destination.buffer.size, 1)
    with pytest.raises(TypeError, match="4 slices for an array of 3"):
        saved.match(parts={0: (slice(1),) * 4})


def test_objects_are_loaded_in_order_and_random_state_last() -> None:
    Box.order.clear()
    names = ["rng", "b", "a"]
    saved = Saved({name: Box(name, {"w": np.full(2, n), "n": n}) for n, name in enumerate(names)})
    live = {name: Box(name, last=name == "rng") for name in names}
    back = saved.put(live)
    assert Box.order == ["b", "a", "rng"]
    for n, name in enumerate(names):
        assert back[name] is live[name]
        assert_same(live[name].state, {"w": np.full(2, n), "n": n})
    # What was saved as an object may be wanted as its state, and the other way round.
    assert_same(saved.put({"rng": {}, "b": {}, "a": {}})["a"], {"w": np.full(2, 2), "n": 2})
    assert Saved({"x": {"n": 1}}).put({"x": (box := Box("x"))})["x"] is box and box.state == {"n": 1}
    assert Saved({"x": 1}).problems({"x": Box("x")})[0].startswith("/x: the checkpoint holds a int")


def test_one_array_at_two_places_is_one_again() -> None:
    x = np.arange(3)
    back = Saved({"a": x, "b": [x], "c": x.copy()}).put()
    assert back["a"] is back["b"][0] and back["a"] is not back["c"]
    templated = Saved({"a": x, "b": [x]}).put({"a": np.zeros(3, int), "b": [np.zeros(3, int)]})
    assert_same(templated, {"a": x, "b": [x]})


def test_dataclasses_by_field() -> None:
    saved = Saved(Config(np.ones(2), 3))
    template = Config(np.zeros(2), 0)
    assert_same(saved.put(template), Config(np.ones(2), 3))
    assert template.n == 0
    assert len(saved.problems(dataclasses.make_dataclass("Config", ["w", "m"])(np.zeros(2), 0))) == 2


def test_a_named_tuple_by_its_fields() -> None:
    saved = Saved([Point(1, np.ones(1))])
    assert_same(saved.put([Point(0, np.zeros(1))]), [Point(1, np.ones(1))])
    swapped = NamedTuple("Point", [("y", Any), ("x", Any)])  # noqa: UP014
    assert saved.problems([swapped(np.zeros(1), 0)])[0].startswith("/0: the checkpoint has the fields ['x', 'y']")
