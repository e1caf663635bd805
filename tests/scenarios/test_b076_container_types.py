"""Containers keep their types. With a template: its very classes. Without: plain forms (a named tuple is a
tuple, a dataclass is a dict), with a record of the classes there were; never a class of our own that looks
like one."""

from __future__ import annotations

import dataclasses
import sys
from collections import Counter, OrderedDict, defaultdict, deque
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from states import restore, save
from tests.exact import assert_same

import midstride as ms


class Point(NamedTuple):
    x: Any
    y: Any


class Other(NamedTuple):
    x: Any
    z: Any


@dataclasses.dataclass
class Config:
    width: int
    weights: Any
    inner: Any = None


@dataclasses.dataclass(frozen=True, slots=True)
class Frozen:
    value: Any


def _missing() -> str:
    return "new"


def _state(fill: int) -> dict[str, Any]:
    t = np.full(2, fill)
    return {
        "tuple": (t, [t + 1, (t + 2, ())], fill),
        "named": Point(t, Point(fill, [Point(1, 2)])),
        "default": defaultdict(list, {"a": [t + 3]}),
        "custom": defaultdict(_missing, {"a": fill}),
        "ordered": OrderedDict([("z", t + 4), ("a", fill)]),
        "dataclass": Config(fill, t + 5, Config(1, (t + 6,), Frozen(Point(t + 7, fill)))),
        "deque": deque([t + 8, fill], maxlen=5),
        "set": {fill, "1", 2.0, None},
        "frozenset": frozenset({(fill, "a"), b"b"}),
        "counter": Counter({"a": fill}),
        "nested": {"list": [OrderedDict(a=(Point(t + 9, deque([{fill}])),))]},
    }


def test_with_a_template(tmp_path: Path) -> None:
    save(tmp_path, _state(3))
    template = _state(0)
    restored = restore(tmp_path, template)
    assert_same(restored.state, _state(3))
    assert restored.state["custom"]["never seen"] == "new"
    assert restored.types == {}
    assert_same(template, _state(0))  # containers are made anew, the caller's stay as they were


def test_without_a_template(tmp_path: Path) -> None:
    save(tmp_path, _state(3))
    classes = set(map(id, _all_classes()))
    restored = restore(tmp_path)
    assert set(map(id, _all_classes())) <= classes, "a restore made a class"
    state = restored.state
    t = np.full(2, 3)
    assert_same(state["tuple"], _state(3)["tuple"])
    assert_same(state["named"], (t, (3, [(1, 2)])))
    assert_same(state["default"], _state(3)["default"])
    assert_same(state["custom"], defaultdict(None, {"a": 3}))  # its factory is code, and stays out
    inner = {"width": 1, "weights": (t + 6,), "inner": {"value": (t + 7, 3)}}
    assert_same(state["dataclass"], {"width": 3, "weights": t + 5, "inner": inner})
    assert_same(state["nested"], {"list": [OrderedDict(a=((t + 9, deque([{3}])),))]})
    for key in ("ordered", "deque", "set", "frozenset", "counter"):
        assert_same(state[key], _state(3)[key])
    here = f"{__name__}:"
    assert restored.types == {
        "/named": here + "Point",
        "/named/y": here + "Point",
        "/named/y/y/0": here + "Point",
        "/dataclass": here + "Config",
        "/dataclass/inner": here + "Config",
        "/dataclass/inner/inner": here + "Frozen",
        "/dataclass/inner/inner/value": here + "Point",
        "/nested/list/0/a/0": here + "Point",
    }


def _all_classes() -> list[type]:
    found, queue = [], [tuple, dict, object]
    while queue:
        cls = queue.pop()
        found.append(cls)
        queue += type.__subclasses__(cls)
    return found


@pytest.mark.parametrize(
    "key, template",
    [
        ("tuple", [np.zeros(2), [np.zeros(2), (np.zeros(2), ())], 0]),
        ("named", Other(np.zeros(2, int), Point(0, []))),
        ("named", (np.zeros(2, int), (0, []))),
        ("deque", [np.zeros(2), 0]),
        ("set", frozenset({1})),
        ("dataclass", Point(0, 0)),
        ("dataclass", Frozen(0)),
        ("tuple", {"a": 1}),
    ],
)
def test_another_type_in_the_template_is_told(tmp_path: Path, key: str, template: Any) -> None:
    save(tmp_path, _state(3))
    with pytest.raises(ms.StateMismatch, match=f"/{key}"):
        restore(tmp_path, {key: template}, only=key)


def test_no_class_is_imported_by_its_name(tmp_path: Path) -> None:
    module = type(sys)("vanished")
    exec("from typing import NamedTuple\nclass Gone(NamedTuple):\n    x: int", module.__dict__)
    sys.modules["vanished"] = module
    try:
        save(tmp_path, {"gone": module.Gone(1)})
    finally:
        del sys.modules["vanished"]
    restored = restore(tmp_path)
    assert_same(restored.state, {"gone": (1,)})
    assert restored.types == {"/gone": "vanished:Gone"}
