"""Containers keep their types. With a template: its very classes. Without: plain forms (a named tuple is a
tuple, a dataclass is a dict), with a record of the classes there were; never a class of our own that looks
like one."""

from __future__ import annotations

import dataclasses
import enum
import sys
from collections import Counter, OrderedDict, defaultdict, deque
from pathlib import Path, PureWindowsPath
from typing import Any, NamedTuple

import numpy as np
import pytest
from states import nothing_written, restore, save
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


class Color(enum.Enum):
    RED = 1
    BLUE = 2


class Level(enum.IntEnum):
    LOW = 1


class Flags(enum.Flag):
    A = 1
    B = 2


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


_SET = {
    Color.RED,
    Level.LOW,
    (Color.BLUE, 1.0),
    Point(1, Point("a", None)),
    Flags.A | Flags.B,
    frozenset({Color.RED}),
    "x",
    7,
}


@pytest.mark.parametrize("kind", [set, frozenset])
def test_members_of_sets(tmp_path: Path, kind: type) -> None:
    save(tmp_path, {"set": kind(_SET)})
    # The very members, or members of the same classes.
    others = {Color.BLUE, Level.LOW, (Point(0, 0), "other"), Flags.A}
    for template in (_SET, others, {*_SET, Color.BLUE, Other(1, 2)}):
        back = restore(tmp_path, {"set": kind(template)}).state["set"]
        assert type(back) is kind
        assert_same(back, kind(_SET))
        assert sorted(map(_classes, back)) == sorted(map(_classes, _SET))
    # Empty, it has nothing to tell: plain forms.
    save(tmp_path, {"set": kind(_SET - {Level.LOW})}, 2)
    for template in (set(), None):
        back = restore(tmp_path, {"set": kind(template) if template is not None else None}).state["set"]
        assert back == {1, (2, 1.0), (1, ("a", None)), 3, frozenset({1}), "x", 7}
    save(tmp_path, {"set": kind(_SET)}, 3)
    # A class that no member of the state's set has is told, and what has it is not passed off as plain.
    for template, lost in (({Color.RED, Level.LOW, Flags.B}, "Point"), ({1}, "Color"), ({Point(1, 2)}, "Level")):
        with pytest.raises(ms.StateMismatch, match=f"/set/\\d: the checkpoint has .*:{lost}.* no member of that class"):
            restore(tmp_path, {"set": kind(template)})


def _classes(member: Any) -> str:
    parts = sorted(map(_classes, member)) if isinstance(member, tuple | frozenset) else []
    return f"{type(member).__qualname__} {parts}"


def test_members_that_only_look_alike_are_kept_apart(tmp_path: Path) -> None:
    other = enum.Enum("Color", {"RED": 1, "BLUE": 2}, module="elsewhere")
    assert {Color.RED, other.RED} == {other.RED, Color.RED} and Color.RED is not other.RED
    save(tmp_path, {"set": {Color.RED, other.BLUE, 1.0, PureWindowsPath("a")}})
    template = {Color.BLUE, other.RED, True, PureWindowsPath("b")}
    back = restore(tmp_path, {"set": template}).state["set"]
    assert back == {Color.RED, other.BLUE, 1.0, PureWindowsPath("a")}
    assert_same(back, {Color.RED, other.BLUE, 1.0, PureWindowsPath("a")})  # 1.0, and not the True of the template
    # A class under another name (as after a move) is known by a member of equal content, and by nothing less.
    moved = restore(tmp_path, {"set": {Color.RED, Color.BLUE, PureWindowsPath("b")}}).state["set"]
    assert moved == {Color.RED, Color.BLUE, 1.0, PureWindowsPath("a")}
    with pytest.raises(ms.StateMismatch, match=r"elsewhere:Color\.BLUE"):
        restore(tmp_path, {"set": {Color.RED, enum.Enum("Color", {"BLUE": 7}).BLUE}})


class Stateful:
    def __init__(self, state: Any) -> None:
        self.state = state
        self.asked = 0

    def state_dict(self) -> Any:
        self.asked += 1
        if isinstance(self.state, Exception):
            raise self.state
        return self.state

    def load_state_dict(self, state: Any) -> None:
        self.state = state


def _inner() -> dict[str, Any]:
    return {
        "phase": Color.BLUE,
        "history": [Color.RED, Point(1, Color.RED), {"deep": (Color.BLUE, [Other(np.arange(2), 1)])}],
        "by step": {3: Frozen(Color.RED), 4: Frozen((1, 2))},
        "missing": defaultdict(_missing, {"a": Color.RED}),
        "seen": {Color.RED, (Level.LOW, "x")},
        "queue": deque([Point(1, 2)], maxlen=4),
        "raw": bytearray(b"ab"),
        "path": PureWindowsPath("a"),
        "config": Config(1, np.ones(2), Config(2, None, Color.BLUE)),
        "numbers": [1, 2.5, True, None],
    }


def test_values_in_the_state_of_an_object(tmp_path: Path) -> None:
    save(tmp_path, {"object": Stateful(_inner()), "nested": [{"x": Stateful((Color.RED, {"y": Point(1, 2)}))}]})
    present = {
        **_inner(),
        "phase": Color.RED,
        "history": [Color.BLUE, Point(0, Level.LOW), {"deep": (Color.RED, [Other(np.zeros(1), 0)])}, 4],
        "by step": {9: Frozen(0)},
        "seen": {Color.BLUE, Level.LOW},
        "queue": deque(maxlen=9),
        "raw": bytearray(),
        "path": PureWindowsPath(),
        "config": Config(0, None, Config(0, None, Color.RED)),
        "numbers": [2.0, None, 1, 1],
    }
    live = Stateful(present)
    nested = Stateful((Color.BLUE, {"y": Point(0, 0)}))
    restored = restore(tmp_path, {"object": live, "nested": [{"x": nested}]})
    assert restored.warnings == ()
    assert_same(live.state, _inner())
    assert live.state["missing"]["never seen"] == "new"
    assert_same(nested.state, (Color.RED, {"y": Point(1, 2)}))
    assert_same(present["history"][1], Point(0, Level.LOW))  # the present state is only looked at


def test_what_the_present_state_does_not_tell_is_plain(tmp_path: Path) -> None:
    class Size(NamedTuple):
        x: Any
        y: Any

    saved = {"a": Color.RED, "b": Point(1, 2), "c": Frozen(1), "d": 1.5}
    plain = {"a": 1, "b": (1, 2), "c": {"value": 1}, "d": 1.5}
    save(tmp_path, {"object": Stateful(saved)})
    # Other classes at other places, a class of the same fields among them, are no ground to give one.
    for present in ({}, None, {"e": Size(1, 2), "f": Level.LOW}, ["other"], {"a": 3, "b": [1], "c": "text"}):
        live = Stateful(present)
        restore(tmp_path, {"object": live})
        assert_same(live.state, plain)
    # The classes that were saved, at whatever place.
    live = Stateful([Frozen(0), {Color.BLUE: 1}, (Color.BLUE, Point(0, 0))])
    restore(tmp_path, {"object": live})
    assert_same(live.state, saved)


def test_an_object_is_asked_for_its_state_only_where_classes_need_it(tmp_path: Path) -> None:
    """To ask may cost: a loader starts its workers."""
    save(tmp_path, {"plain": Stateful({"x": [1, "a", {2.0}, OrderedDict(a=(None,))]}), "classes": Stateful(Color.RED)})
    live = {"plain": Stateful({}), "classes": Stateful(ValueError("not begun"))}
    restored = restore(tmp_path, live)
    assert live["plain"].asked == 0 and live["classes"].asked == 1
    assert live["classes"].state == 1
    reason, result = restored.warnings
    assert reason.startswith("/classes: ") and "not begun" in reason
    assert "plain forms" in result


def test_values_at_places_that_a_mapping_gets_anew(tmp_path: Path) -> None:
    save(tmp_path, {"default": defaultdict(list, {"a": [Point(1, 2)], "b": [Point(3, Color.RED)]})})
    back = restore(tmp_path, {"default": defaultdict(list, {"a": [Point(0, 0)]})}).state
    assert_same(back, {"default": defaultdict(list, {"a": [Point(1, 2)], "b": [Point(3, 1)]})})


def test_a_bytearray(tmp_path: Path) -> None:
    save(tmp_path, {"raw": bytearray(b"x"), "text": "a", "path": Path("p")})
    assert_same(restore(tmp_path, {"raw": bytearray(), "text": "", "path": Path()}).state["raw"], bytearray(b"x"))
    for key, template in {"text": bytearray(), "path": "", "raw": Path()}.items():
        with pytest.raises(ms.StateMismatch, match=f"/{key}: "):
            restore(tmp_path, {key: template}, only=key)


def test_an_object_that_is_wanted_as_its_state_dict(tmp_path: Path) -> None:
    state = {"seen": {Color.RED, 2}, "number": 1.5, "list": [Color.RED]}
    save(tmp_path, {"object": Stateful(state)})
    back = restore(tmp_path, {"object": {"seen": {Color.BLUE}, "number": 1, "list": []}}).state["object"]
    assert_same(back, {**state, "list": [1]})
    back = restore(tmp_path, {"object": {"seen": {3}, "number": 1, "list": [None]}}).state["object"]
    assert_same(back, {"seen": {1, 2}, "number": 1.5, "list": [1]})  # no error: an object's state may change


class Colour(enum.Enum):
    RED = 7
    BLUE = 2


class Rights(enum.Flag):
    READ = 1
    WRITE = 2


class Outer(enum.Enum):
    INNER = Color.RED
    PAIR = (Color.BLUE, Level.LOW, "x")


def test_an_enum_that_only_has_a_member_of_the_same_name(tmp_path: Path) -> None:
    save(tmp_path, {"e": Color.RED, "f": Flags.A | Flags.B, "o": Stateful([Color.RED, Flags.A | Flags.B])})
    template = {"e": Color.BLUE, "f": Flags.A, "o": Stateful([])}
    for key, other in (("e", Colour.RED), ("f", Rights.READ)):
        with pytest.raises(ms.StateMismatch, match=f"/{key}: .* a member of"):
            restore(tmp_path, {**template, key: other})
    live = Stateful([Colour.BLUE, Rights.READ])
    restore(tmp_path, {**template, "o": live})
    assert_same(live.state, [1, 3])
    # Name and value are equal: the same class under another name. Under its own, the name tells the member.
    save(tmp_path, {"e": Color.BLUE}, 2)
    assert restore(tmp_path, {"e": Colour.RED}).state["e"] is Colour.BLUE
    renumbered = enum.Enum("Color", {"BLUE": 9}, module=__name__)
    assert restore(tmp_path, {"e": renumbered.BLUE}).state["e"] is renumbered.BLUE


@dataclasses.dataclass
class PointOfData:
    x: Any
    y: Any


def test_a_named_tuple_and_a_dataclass_of_the_same_fields(tmp_path: Path) -> None:
    for saved, other, plain in (
        (Point(1, 2), PointOfData(0, 0), (1, 2)),
        (PointOfData(1, 2), Point(0, 0), {"x": 1, "y": 2}),
    ):
        save(tmp_path / type(saved).__name__, {"v": saved, "o": Stateful([saved])})
        with pytest.raises(ms.StateMismatch, match="/v: "):
            restore(tmp_path / type(saved).__name__, {"v": other, "o": Stateful([])})
        for present, wanted in (([other], plain), ([other, saved], saved)):
            live = Stateful(present)
            restore(tmp_path / type(saved).__name__, {"v": saved, "o": live})
            assert_same(live.state, [wanted])


def test_a_fresh_object_gets_plain_forms_with_a_warning(tmp_path: Path) -> None:
    save(tmp_path, {"o": Stateful({"phase": Color.RED, "at": [Point(1, 2)]}), "none": Frozen(1), "n": 1})
    live = Stateful({})
    restored = restore(tmp_path, {"o": live, "none": None, "n": 0})
    assert_same(live.state, {"phase": 1, "at": [(1, 2)]})
    here = f"{__name__}:"
    assert restored.types == {"/o/phase": here + "Color.RED", "/o/at/0": here + "Point", "/none": here + "Frozen"}
    (warning,) = restored.warnings
    assert "2 values in the states of objects" in warning
    assert f"/o/phase ({here}Color.RED)" in warning
    assert "/none" not in warning  # asked for as it is, by the None


def test_members_of_a_set_that_are_equal_in_their_plain_forms(tmp_path: Path) -> None:
    saved = {"set": {Color.RED, 1}, "nested": {frozenset({(Color.BLUE,), (2,)}), "a"}, "object": {Color.RED, 1}}
    save(tmp_path, {**saved, "object": Stateful(saved["object"])})
    restored = restore(tmp_path)
    assert_same(restored.state["set"], (1, 1))
    assert_same(restored.state["nested"], {((2,), (2,)), "a"})
    assert restored.types["/set"] == "builtins:set"
    assert restored.types["/nested/1"] == "builtins:frozenset"
    assert sum(name.endswith("Color.RED") for name in restored.types.values()) == 2
    live = Stateful(None)
    restored = restore(tmp_path, {**saved, "object": live})
    assert_same(restored.state["set"], saved["set"])
    assert_same(restored.state["nested"], saved["nested"])
    assert_same(live.state, (1, 1))
    assert "/object (builtins:set)" in restored.warnings[0]
    # Where the state has a set, it gets one, or nothing.
    for template in (set(), {2}):
        with pytest.raises(ms.StateMismatch, match="/set: .* one would be lost"):
            restore(tmp_path, {"set": template}, only="set")


def test_enums_whose_values_are_enums(tmp_path: Path) -> None:
    state = {"list": [Outer.INNER, Outer.PAIR], "set": {Outer.INNER, Outer.PAIR}}
    save(tmp_path, state)
    plain = (2, 1, "x")
    assert_same(restore(tmp_path).state, {"list": [1, plain], "set": {1, plain}})
    assert_same(restore(tmp_path, state).state, state)
    # By their content, where the class has another name.
    moved = enum.Enum("Moved", {member.name: member.value for member in Outer}, module="elsewhere")
    back = restore(tmp_path, {"list": list(moved), "set": set(moved)}).state
    assert_same(back, {"list": list(moved), "set": set(moved)})


class WithCode(NamedTuple):
    x: Any


class Doubled(WithCode):
    def __new__(cls, x: Any) -> Doubled:
        return super().__new__(cls, x * 2)


@dataclasses.dataclass
class Guarded:
    value: Any
    other: Any = None

    def _refuse(self, *_: object) -> Any:
        raise AssertionError("code of the class ran")

    __copy__ = __deepcopy__ = __reduce__ = __reduce_ex__ = __getstate__ = _refuse


@dataclasses.dataclass
class Slotted:
    __slots__ = ("cache", "value")
    value: Any


@dataclasses.dataclass
class Problem(Exception):
    value: Any


def test_no_code_of_the_class_runs(tmp_path: Path) -> None:
    slotted = Slotted(1)
    slotted.cache = "own"
    guarded = Guarded(1)
    guarded.beside = "own"  # type: ignore[attr-defined]
    state = {"g": guarded, "s": slotted, "t": Doubled(1), "p": Problem(1), "o": Stateful([Guarded(3), Doubled(3)])}
    save(tmp_path, state)
    guarded.value = slotted.value = 0
    live = Stateful([Guarded(0), Doubled(0)])
    back = restore(tmp_path, {"g": guarded, "s": slotted, "t": Doubled(0), "p": Problem(0), "o": live}).state
    assert (back["g"].value, back["g"].beside) == (1, "own")
    assert (back["s"].value, back["s"].cache) == (1, "own")
    assert (guarded.value, slotted.value) == (0, 0)
    assert type(back["p"]) is Problem
    assert back["p"].value == 1
    assert_same(back["t"], Doubled(1))
    assert_same(live.state, [Guarded(3), Doubled(3)])


@dataclasses.dataclass
class Later:
    a: int
    b: Any = dataclasses.field(init=False)


def test_a_field_that_has_no_value(tmp_path: Path) -> None:
    with pytest.raises(ms.UnsupportedState, match=r"^/x/0/b: a field of .*:Later that has no value .* Nothing was"):
        save(tmp_path, {"x": [Later(1)]})
    assert nothing_written(tmp_path)
    full = Later(1)
    full.b = np.ones(2)
    save(tmp_path, {"x": full, "o": Stateful([full])})
    live = Stateful([Later(0)])
    assert_same(restore(tmp_path, {"x": Later(0), "o": live}).state["x"], full)  # in a template it takes what there is
    assert_same(live.state, [full])
