"""Walking a state: what becomes a leaf, what is shared, what is refused and by which name."""

from __future__ import annotations

import enum
import sys
from collections import OrderedDict
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import midstride as ms
from midstride.errors import UnsupportedState
from midstride.format.values import decode_tree, encode_tree
from midstride.save.capture import capture
from midstride.state import walk
from midstride.tree import MAX_DEPTH, ArrayRef, Node, Value, named_leaves, pointer


class _Object:
    def __init__(self, state: Any) -> None:
        self.state = state

    def state_dict(self) -> Any:
        return self.state

    def load_state_dict(self, state: Any) -> None:
        self.state = state


def test_pointers_are_rfc_6901() -> None:
    assert pointer(()) == ""
    assert pointer(("a", "b/c", "~d", 0, None, (1, "x"))) == "/a/b~1c/~0d/0/None/(1, 'x')"


def test_leaves_have_their_paths_in_order() -> None:
    x = np.zeros(3)
    state = {"b": [x, {"c": np.ones((2, 2), np.int8)}], "a": _Object({"inner": np.zeros(())}), "again": x}
    walked = walk(state)
    assert [leaf.path for leaf in walked.leaves] == [("b", 0), ("b", 1, "c"), ("a", "inner")]
    assert [(leaf.dtype, leaf.shape, leaf.nbytes) for leaf in walked.leaves] == [
        ("float64", (3,), 24),
        ("int8", (2, 2), 4),
        ("float64", (), 8),
    ]
    assert list(named_leaves(walked.tree)) == [
        (("b", 0), 0),
        (("b", 1, "c"), 1),
        (("a", "inner"), 2),
        (("again",), 0),
    ]


def test_one_array_is_what_has_the_same_elements_of_the_same_memory() -> None:
    x = np.arange(12.0)
    same = [x, x, x[:], x.view(), x.reshape(12)]
    other = [x[:6], x.reshape(3, 4), x.reshape(3, 4).T, x[::1][1:], x.view(np.int64), x.copy(), x[::-1][::-1][:11]]
    walked = walk(same + other)
    assert isinstance(walked.tree, Node)
    numbers = [child.index for child in walked.tree.children if isinstance(child, ArrayRef)]
    assert numbers == [0] * len(same) + list(range(1, len(other) + 1))
    assert len(walk([np.zeros(0), np.zeros(0)]).leaves) == 2  # without elements nothing is shared


def test_arrays_that_a_state_dict_makes_are_not_taken_for_each_other() -> None:
    class Fresh(_Object):
        def state_dict(self) -> Any:
            return {"x": np.full(1000, self.state)}

    walked = walk([Fresh(n) for n in range(20)])
    assert [leaf.source[0] for leaf in walked.leaves] == list(range(20))


def test_the_walk_is_of_one_moment() -> None:
    state: dict[str, Any] = {"list": [1, 2], "set": {1}, "bytes": bytearray(b"ab"), "od": OrderedDict(a=1)}
    tree = walk(state).tree
    encoded = encode_tree(tree)
    state["list"].append(3)
    state["set"].add(2)
    state["bytes"][0] = 0
    state["od"]["b"] = 2
    assert encode_tree(tree) == encoded
    assert isinstance(tree, Node) and isinstance(tree.children[2], Value) and tree.children[2].value == b"ab"


def test_equal_sets_have_equal_trees() -> None:
    items = [str(n) for n in range(50)]
    assert encode_tree(walk(set(items)).tree) == encode_tree(walk(set(reversed(items))).tree)


class _Huge(enum.Enum):
    A = 7**20000
    B = -(7**20000)


_MEMBERS = {7**20000, -(7**20000), (7**20000, "a"), frozenset({7**20001}), 3, "3", _Huge.A, _Huge.B, (_Huge.A,)}


def test_ints_of_any_size_in_sets(tmp_path: Path) -> None:
    with ms.Checkpointer(tmp_path) as ckpt:
        ckpt.save(1, {"set": _MEMBERS}).result(60)
        back = ckpt.restore({"set": _MEMBERS})
        assert back is not None and back.state["set"] == _MEMBERS
    plain = ms.open(tmp_path).load()["set"]  # two of the enum's members are equal to ints that are there too
    assert type(plain) is tuple
    assert len(plain) == len(_MEMBERS)
    assert set(plain) == {7**20000, -(7**20000), (7**20000, "a"), frozenset({7**20001}), 3, "3", (7**20000,)}


@pytest.mark.parametrize("key", [7**20000, -(7**20000), (1, (7**20000,)), 2**2048, _Huge.A, (1, _Huge.A)], ids=range(6))
def test_keys_that_have_no_text_are_refused(key: Any) -> None:
    with pytest.raises(UnsupportedState, match="^/a/b: a key .*cannot be saved"):
        walk({"a": {"b": {1: 2, key: 1}}})


def test_the_largest_keys(tmp_path: Path) -> None:
    limit = sys.get_int_max_str_digits()
    sys.set_int_max_str_digits(640)  # the least that Python can be set to
    try:
        state = {"x": {2**2048 - 1: np.ones(1), (1 - 2**2048,): np.zeros(1)}}
        with ms.Checkpointer(tmp_path) as ckpt:
            ckpt.save(1, state).result(60)
            back = ckpt.restore()
        assert back is not None and list(back.state["x"]) == list(state["x"])
    finally:
        sys.set_int_max_str_digits(limit)


def test_equal_sets_of_sets_have_equal_trees() -> None:
    def made(order: Any) -> set[Any]:
        return {frozenset(order(map(str, range(n, n + 9)))) for n in order(range(9))}

    assert encode_tree(walk(made(list)).tree) == encode_tree(walk(made(lambda items: list(items)[::-1])).tree)


def _nested(levels: int) -> Any:
    value: Any = 1
    for _ in range(levels):
        value = [value]
    return value


def test_depth(tmp_path: Any) -> None:
    state = _nested(MAX_DEPTH)
    with ms.Checkpointer(tmp_path) as ckpt:
        ckpt.save(1, state).result()
        assert ckpt.restore(state).state == state  # type: ignore[union-attr]
    with pytest.raises(UnsupportedState, match="nested more than 128 levels"):
        walk(_nested(MAX_DEPTH + 2))
    objects: Any = 1
    for _ in range(MAX_DEPTH // 2):
        objects = _Object([objects])
    decode_tree(encode_tree(walk(objects).tree))


def test_objects_without_end() -> None:
    class Endless(_Object):
        def state_dict(self) -> Any:
            return Endless(self)

    with pytest.raises(UnsupportedState, match="nested too deep"):
        capture({"x": Endless(None)})


@pytest.mark.parametrize(
    "make", [lambda a: a.append(a), lambda a: a.append({"x": [a]}), lambda a: a.append(_Object(a))]
)
def test_a_loop_is_named(make: Any) -> None:
    loop: list[Any] = []
    make(loop)
    with pytest.raises(UnsupportedState, match="contains itself"):
        walk({"loop": loop})
    walk([loop := [1], loop, {"again": loop}])  # twice is no loop


def test_a_class_with_both_methods_is_not_an_object_with_a_state() -> None:
    with pytest.raises(UnsupportedState, match="^/x: "):
        walk({"x": _Object})


def test_a_dataclass_that_is_a_container_loses_no_items() -> None:
    @dataclass
    class Output(OrderedDict[str, Any]):
        loss: float = 0.5

    @dataclass
    class Listed(list[Any]):
        name: str = "a"

    assert walk({"x": Output()}).tree.children[0].keys == ["loss"]  # type: ignore[union-attr]
    mirrored = Output()
    mirrored["loss"] = 0.5  # as some libraries do it
    walk({"x": mirrored, "y": Listed()})
    mirrored["other"] = 1
    for lossy in (mirrored, Listed()):
        if isinstance(lossy, list):
            lossy.append(3)
        with pytest.raises(UnsupportedState, match=r"^/x/y: .*items that are not its fields"):
            walk({"x": {"y": lossy}})
