"""Any state that can be saved comes back: with a template in its exact classes, without one in its plain forms."""

from __future__ import annotations

import dataclasses
import enum
import math
import pathlib
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.exact import assert_same

import midstride as ms
from midstride.storage import MemoryStorage

torch = pytest.importorskip("torch", reason="PyTorch is not installed")


class Pair(NamedTuple):
    first: Any
    second: Any


@dataclasses.dataclass
class Record:
    value: Any
    more: Any = None


class Color(enum.Enum):
    RED = "r"
    BLUE = "b"


class Object:
    def __init__(self, state: Any) -> None:
        self.state = state

    def state_dict(self) -> Any:
        return self.state

    def load_state_dict(self, state: Any) -> None:
        self.state = state


_DTYPES = [
    np.dtype(name) for name in ("f4", "f8", "f2", "i1", "i4", "i8", "u2", "u8", "?", "c8", "c16", "bfloat16", "int4")
]
_DTYPES += [np.dtype(ml_dtypes.float8_e4m3fn)]
_TORCH = [torch.float32, torch.bfloat16, torch.int64, torch.uint8, torch.bool, torch.complex64, torch.float8_e5m2]
_SHAPES = st.lists(st.integers(0, 5), max_size=4).map(tuple)


@st.composite
def arrays(draw: st.DrawFn) -> np.ndarray:
    dtype, shape = draw(st.sampled_from(_DTYPES)), draw(_SHAPES)
    seed = draw(st.integers(0, 2**16))
    raw = np.random.default_rng(seed).integers(0, 256, (*shape, dtype.itemsize), dtype=np.uint8)
    if dtype == np.bool_:
        raw &= 1
    array = raw.view(dtype).reshape(shape)
    for axis in range(array.ndim):
        array = draw(
            st.sampled_from([array, np.flip(array, axis), array[(slice(None),) * axis + (slice(None, None, 2),)]])
        )
    return draw(st.sampled_from([array, array.T]))


@st.composite
def tensors(draw: st.DrawFn) -> Any:
    dtype, shape = draw(st.sampled_from(_TORCH)), draw(_SHAPES)
    count = math.prod(shape) * dtype.itemsize
    raw = np.random.default_rng(draw(st.integers(0, 2**16))).integers(
        0, 2 if dtype == torch.bool else 256, count, np.uint8
    )
    tensor = torch.from_numpy(raw).view(dtype).view(shape) if count else torch.empty(shape, dtype=dtype)
    return tensor.mT if tensor.ndim > 1 and draw(st.booleans()) else tensor


keys = (
    st.text(max_size=4) | st.integers() | st.booleans() | st.none() | st.tuples(st.integers(0, 3), st.text(max_size=1))
)
hashable = st.recursive(
    st.none() | st.integers() | st.text(max_size=3) | st.binary(max_size=2) | st.sampled_from(Color),
    lambda inner: (
        st.lists(inner, max_size=2).map(tuple) | st.builds(Pair, inner, inner) | st.frozensets(inner, max_size=2)
    ),
    max_leaves=4,
)
leaves = (
    st.none() | st.booleans() | st.integers() | st.floats() | st.complex_numbers() | st.text(max_size=5) | st.binary(max_size=5)
    | st.integers(-(2**200), 2**200) | st.sampled_from([np.float32(0.1), np.int64(-3), np.bool_(True), pathlib.Path("a")]) | st.sampled_from(Color)
    | arrays() | tensors()
)  # fmt: skip


def _containers(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    items = st.lists(inner, max_size=3)
    mapping = st.dictionaries(keys, inner, max_size=4)
    return (
        items | items.map(tuple) | mapping | mapping.map(OrderedDict) | mapping.map(lambda d: defaultdict(list, d))
        | st.lists(inner, min_size=2, max_size=2).map(lambda pair: Pair(*pair)) | inner.map(Record)
        | items.map(lambda x: deque(x, maxlen=7)) | st.sets(hashable, max_size=3) | st.frozensets(hashable, max_size=3)
        | st.dictionaries(st.text(max_size=3), st.integers(), max_size=3).map(Counter)
        | inner.map(lambda x: {"here": x, "there": [x]})
    )  # fmt: skip


states = st.dictionaries(
    st.sampled_from(["model", "Model", "a/b", "", "x"]) | keys,
    st.recursive(leaves, _containers, max_leaves=10),
    max_size=4,
)


def plain(value: Any) -> Any:
    """What docs/guides promise of a restore without a template."""
    if isinstance(value, torch.Tensor):
        return _as_numpy(value)
    if isinstance(value, np.ndarray):
        return np.ascontiguousarray(value).reshape(value.shape)
    if isinstance(value, Record):
        return {"value": plain(value.value), "more": plain(value.more)}
    if isinstance(value, Pair):
        return tuple(map(plain, value))
    if isinstance(value, Color):
        return value.value
    if isinstance(value, set | frozenset):
        return type(value)(map(plain, value))
    if isinstance(value, Counter):
        return value
    if isinstance(value, defaultdict):
        return defaultdict(value.default_factory, {key: plain(part) for key, part in value.items()})
    if isinstance(value, dict):
        return type(value)({key: plain(part) for key, part in value.items()})
    if isinstance(value, deque):
        return deque(map(plain, value), value.maxlen)
    return type(value)(map(plain, value)) if isinstance(value, list | tuple) else value


def _as_numpy(tensor: Any) -> np.ndarray:
    raw = tensor.contiguous().reshape(-1)
    data = raw.view(torch.uint8).numpy() if raw.numel() else np.empty(0, np.uint8)
    return data.view(np.dtype(str(tensor.dtype).removeprefix("torch."))).reshape(tuple(tensor.shape))


def _round_trip(state: Any, restore: Callable[[ms.Checkpointer], ms.Restored | None], **options: Any) -> Any:
    storage = MemoryStorage()
    with ms.Checkpointer(storage, **options) as ckpt:
        ckpt.save(1, state).result(60)
    with ms.Checkpointer(storage) as ckpt:
        restored = restore(ckpt)
    assert restored is not None and restored.warnings == ()
    assert ms.open(storage).verify() == {restored.info.name: []}
    return restored.state


@given(states)
@settings(max_examples=150)
def test_with_a_template(state: dict[Any, Any]) -> None:
    back = _round_trip(state, lambda ckpt: ckpt.restore(state))
    assert_same(back, state)
    assert_same(_round_trip(back, lambda ckpt: ckpt.restore(state)), state)


@given(states)
@settings(max_examples=100)
def test_in_the_state_of_an_object(state: dict[Any, Any]) -> None:
    """What it gets has the classes of its present state."""
    live = Object(state)
    _round_trip({"object": Object(state)}, lambda ckpt: ckpt.restore({"object": live}))
    assert live.state is not state
    assert_same(live.state, state)


@given(states)
@settings(max_examples=150)
def test_without_a_template(state: dict[Any, Any]) -> None:
    assert_same(_round_trip(state, lambda ckpt: ckpt.restore()), plain(state))


@given(
    st.lists(
        st.tuples(st.integers(1, 90), st.sampled_from([np.uint8, np.float32, np.complex128])), min_size=1, max_size=4
    )
)
@settings(max_examples=15)
def test_with_little_staging_memory(sizes: list[tuple[int, Any]]) -> None:
    """Arrays begin and end anywhere in the pieces that the staging memory is cut into."""
    state = {
        "x": {
            str(number): np.random.default_rng(number)
            .integers(0, 256, kilobytes * 1009 * 16, dtype=np.uint8)
            .view(dtype)[::-1]
            for number, (kilobytes, dtype) in enumerate(sizes)
        }
    }
    assert_same(_round_trip(state, lambda ckpt: ckpt.restore(), staging_bytes=256 * 1024), plain(state))
