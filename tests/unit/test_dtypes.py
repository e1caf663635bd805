"""The table of dtypes agrees with NumPy, ml_dtypes, PyTorch and safetensors."""

from __future__ import annotations

import ml_dtypes  # noqa: F401  (registers its dtypes)
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors import deserialize

from midstride.dtypes import DTYPES, array_nbytes
from midstride.format.datafile import build_header


@pytest.mark.parametrize("name", DTYPES)
def test_item_sizes(name: str) -> None:
    torch = pytest.importorskip("torch", reason="PyTorch is not installed")
    if name != "float4_e2m1fn_x2":
        assert np.dtype(name).itemsize == DTYPES[name].itemsize and np.dtype(name).name == name
    if name not in ("int1", "int2", "int4", "uint1", "uint2", "uint4") and hasattr(torch, name):
        assert getattr(torch, name).itemsize == DTYPES[name].itemsize


@given(st.sampled_from(sorted(DTYPES)), st.lists(st.integers(0, 3), max_size=4).map(tuple))
def test_the_stored_shape_has_the_arrays_bytes(name: str, shape: tuple[int, ...]) -> None:
    header = build_header([("x", name, shape)], {})
    ((_, stock),) = deserialize(header.raw + bytes(array_nbytes(name, shape)))
    assert tuple(stock["shape"]) == DTYPES[name].stored_shape(shape)
    assert len(stock["data"]) == array_nbytes(name, shape)


def test_shapes_that_differ_from_the_arrays() -> None:
    assert DTYPES["complex128"].stored_shape((3,)) == (3, 2)
    assert DTYPES["float4_e2m1fn_x2"].stored_shape((3, 5)) == (3, 10)
    assert DTYPES["float4_e2m1fn_x2"].stored_shape(()) == (2,)
    assert DTYPES["int4"].stored_shape((3,)) == (3,)
