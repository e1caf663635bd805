"""The tree and its values through JSON, and what comes of JSON that is not ours."""

from __future__ import annotations

import enum
import json
import math
import pathlib
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.exact import assert_same

from midstride.errors import CorruptCheckpoint, UnsupportedState
from midstride.format.values import (
    StoredEnum,
    decode_metrics,
    decode_tree,
    encode_tree,
    encode_value,
)
from midstride.tree import ArrayRef, Node, Value


class Color(enum.Enum):
    RED = (1, "r")


texts = st.text(st.characters(exclude_categories=()))  # lone surrogates too
numbers = st.integers() | st.floats() | st.integers(-(2**54), 2**54) | st.integers(-(2**300), 2**300)
scalars = st.sampled_from(
    [np.float32, np.float64, np.float16, np.int8, np.uint64, np.complex64, np.bool_, ml_dtypes.bfloat16]
).flatmap(
    lambda cls: st.binary(min_size=np.dtype(cls).itemsize, max_size=np.dtype(cls).itemsize).map(
        lambda raw: np.frombuffer(raw if cls is not np.bool_ else bytes([raw[0] & 1]), cls)[0]
    )
)
plain = (
    st.none() | st.booleans() | numbers | texts | st.binary() | st.complex_numbers()
    | st.builds(pathlib.Path, st.text(st.characters(exclude_characters="\0"))) | scalars
)  # fmt: skip
nested = st.recursive(plain, lambda inner: st.lists(inner, max_size=3).map(tuple), max_leaves=6)


def _through_json(data: Any) -> Any:
    def refuse(text: str) -> Any:
        raise AssertionError(f"{text} is not JSON")

    return json.loads(json.dumps(data, allow_nan=False), parse_constant=refuse)


@given(nested)
def test_values(value: Any) -> None:
    decoded = decode_tree({"$": "dict", "pairs": [[_through_json(encode_value(value)), 1]]})
    assert isinstance(decoded, Node) and decoded.keys is not None
    assert_same(decoded.keys[0], value)


keys = (
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | texts | st.tuples(st.integers(), st.text())
)
trees = st.recursive(
    plain.map(Value) | st.integers(0, 9).map(ArrayRef),
    lambda inner: (
        st.builds(Node, st.sampled_from(["list", "tuple", "deque"]), st.lists(inner, max_size=3))
        | st.builds(Node, st.sampled_from(["set", "frozenset"]), st.lists(plain.map(Value), max_size=3))
        | st.lists(st.tuples(keys, inner), max_size=3, unique_by=lambda pair: repr(pair[0])).flatmap(
            lambda pairs: st.builds(
                Node,
                st.sampled_from(["dict", "ordereddict", "counter", "namedtuple"]),
                st.just([child for _, child in pairs]),
                st.just([key for key, _ in pairs]),
                st.none() | st.just("module:Class"),
                st.none() | st.dictionaries(st.text(), st.lists(st.integers() | st.none(), max_size=2), min_size=1),
            )
        )
        | st.builds(lambda child: Node("object", [child], None, "a.b:C", {"maxlen": 3}), inner)
    ),
    max_leaves=8,
)  # fmt: skip


@given(trees)
def test_trees(tree: Any) -> None:
    assert_same(decode_tree(_through_json(encode_tree(tree))), tree)


def test_an_enum_is_read_without_its_class() -> None:
    (member,) = [decode_tree(_through_json(encode_value(Color.RED)))]
    assert isinstance(member, Value) and isinstance(member.value, StoredEnum)
    assert (member.value.type_name, member.value.name, member.value.value) == (f"{__name__}:Color", "RED", (1, "r"))


def test_ints_that_other_readers_would_round_are_hexadecimal() -> None:
    assert encode_value(2**53) == 2**53
    assert encode_value(2**53 + 1) == {"$": "int", "v": "0x20000000000001"}
    assert encode_value(-(2**70)) == {"$": "int", "v": hex(-(2**70))}
    assert encode_value(math.inf) == {"$": "float", "v": "inf"}


@pytest.mark.parametrize("value", [np.longdouble(1), np.datetime64(1, "s"), np.str_("x"), np.void(b"x"), object(), [1]])
def test_what_has_no_encoding_is_named(value: Any) -> None:
    with pytest.raises(UnsupportedState, match=r"^/a/b~1c: "):
        encode_value(value, ("a", "b/c"))


def test_keys_that_no_save_makes_are_refused() -> None:
    """Names are made of keys, and Python makes no text of an int that is too long."""
    for key in (2**2048, [-(2**9999)]):
        data = encode_value(tuple(key) if isinstance(key, list) else key)
        with pytest.raises(CorruptCheckpoint, match="key"):
            decode_tree({"$": "dict", "pairs": [[data, 1]]})


json_like = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(
            st.sampled_from(["$", "v", "i", "items", "named", "pairs", "extra", "type", "name", "dtype"]) | st.text(max_size=2),
            inner | st.sampled_from(["int", "float", "str", "bytes", "enum", "numpy", "tuple", "dict", "array", "object"]),
            max_size=4,
        )
    ),
    max_leaves=12,
)  # fmt: skip


@given(json_like)
def test_any_json_is_a_tree_or_a_typed_error(data: Any) -> None:
    for decode in (decode_tree, decode_metrics):
        try:
            decode(data)
        except CorruptCheckpoint:
            pass


def test_nesting_has_a_limit() -> None:
    deep: Any = 1
    for _ in range(250):
        deep = [deep]
    decode_tree(deep)
    for _ in range(50):
        deep = [deep]
    with pytest.raises(CorruptCheckpoint, match="too deep"):
        decode_tree(deep)
