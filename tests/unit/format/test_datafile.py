"""Every header that we build is one that stock safetensors reads to the same bytes; any other is refused."""

from __future__ import annotations

import json
import math
import struct
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors import deserialize
from safetensors.numpy import load

from midstride.dtypes import DTYPES, array_nbytes
from midstride.errors import CorruptCheckpoint
from midstride.format.datafile import build_header, header_nbytes, parse_header, sort_key
from midstride.limits import PAGE_BYTES

names = st.text(max_size=12).filter(lambda name: name != "__metadata__")
shapes = st.lists(st.integers(0, 4), max_size=4).map(tuple)
tensors = st.dictionaries(names, st.tuples(st.sampled_from(sorted(DTYPES)), shapes), max_size=8)


def _file(wanted: dict[str, tuple[str, tuple[int, ...]]], metadata: dict[str, str]) -> tuple[Any, bytes]:
    ordered = sorted(((key, *what) for key, what in wanted.items()), key=lambda t: sort_key(t[1]))
    header = build_header(ordered, metadata)
    data = np.random.default_rng(0).integers(0, 2, header.size - len(header.raw), dtype=np.uint8)
    return header, header.raw + data.tobytes()


@given(tensors, st.dictionaries(st.text(max_size=4), st.text(max_size=4), max_size=2))
def test_stock_safetensors_reads_the_same_bytes(
    wanted: dict[str, tuple[str, tuple[int, ...]]], metadata: dict[str, str]
) -> None:
    header, raw = _file(wanted, metadata)
    found = dict(deserialize(raw))
    assert found.keys() == wanted.keys()
    for tensor in header.tensors:
        dtype = DTYPES[tensor.dtype]
        stock = found[tensor.key]
        assert (stock["dtype"], tuple(stock["shape"])) == (dtype.stored_as, dtype.stored_shape(tensor.shape))
        assert bytes(stock["data"]) == raw[tensor.begin : tensor.end]
        assert tensor.end - tensor.begin == array_nbytes(tensor.dtype, tensor.shape)


@given(tensors)
def test_layout_and_reading_back(wanted: dict[str, tuple[str, tuple[int, ...]]]) -> None:
    header, raw = _file(wanted, {})
    assert len(header.raw) % PAGE_BYTES == 0 and header.size == len(raw)
    assert header_nbytes(raw[:8], len(raw)) == len(header.raw)
    for tensor in header.tensors:
        assert tensor.begin % DTYPES[tensor.dtype].itemsize == 0
    parsed = parse_header(header.raw, len(raw))
    assert {(key, t.begin, t.end) for key, t in parsed.items()} == {(t.key, t.begin, t.end) for t in header.tensors}


@pytest.mark.parametrize("name", ["float64", "uint16", "complex64", "bool", "int8", "float16"])
def test_stock_arrays_equal_ours(name: str) -> None:
    array = (np.arange(24).reshape(2, 3, 4) % 2).astype(name)
    header = build_header([("a~/b", name, (2, 3, 4)), ("empty", name, (0, 2))], {"format": "pt"})
    loaded = load(header.raw + array.tobytes())
    assert np.array_equal(loaded["a~/b"], array) and loaded["a~/b"].dtype == array.dtype
    assert loaded["empty"].shape == (0, 2)


def test_many_keys_move_the_data_by_whole_pages() -> None:
    header = build_header([(f"tensor number {n}", "uint8", (1,)) for n in range(1000)], {})
    assert header.tensors[0].begin == len(header.raw) > 10 * PAGE_BYTES
    assert len(parse_header(header.raw, header.size)) == 1000


@given(st.binary(max_size=200), st.integers(0, 300))
def test_any_bytes_are_a_header_or_a_typed_error(body: bytes, size: int) -> None:
    for raw in (body, struct.pack("<Q", len(body)) + body):
        for file_size in (size, len(raw)):
            try:
                parse_header(raw, file_size)
            except CorruptCheckpoint:
                pass


numbers = st.integers(-1, 30) | st.floats() | st.booleans() | st.none() | st.sampled_from([2**63, 2**64, 10**50])
fields = st.fixed_dictionaries(
    {},
    optional={
        "dtype": st.sampled_from(["U8", "F32", "F4", "F99", "", None, ["U8"]]),
        "shape": st.lists(numbers, max_size=3) | st.text(max_size=2) | numbers,
        "data_offsets": st.lists(numbers, min_size=1, max_size=3) | numbers,
        "more": numbers,
    },
)


@given(st.dictionaries(st.sampled_from("abc"), fields | numbers, max_size=3), st.integers(0, 30))
def test_what_we_accept_stock_accepts_too(entries: dict[str, Any], data_bytes: int) -> None:
    text = json.dumps(entries).encode()
    raw = struct.pack("<Q", len(text)) + text
    try:
        parsed = parse_header(raw, len(raw) + data_bytes)
    except CorruptCheckpoint:
        return
    for tensor in parsed.values():
        assert tensor.end - tensor.begin <= data_bytes and math.prod(tensor.shape) <= 8 * data_bytes
    # Ours may know less of an entry than stock does (unknown fields), but never reads other bytes.
    stock = {key: bytes(value["data"]) for key, value in deserialize(raw + bytes(range(data_bytes)))}
    whole = raw + bytes(range(data_bytes))
    assert stock == {key: whole[tensor.begin : tensor.end] for key, tensor in parsed.items()}
