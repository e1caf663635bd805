"""The dtypes that NumPy alone lacks come back as themselves, also where no framework is installed; what a
reader does not know is an error or raw bytes under the dtype's name, never a void or a guess."""

from __future__ import annotations

from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
import torch
import xxhash
from children import run_well
from states import restore, save
from tests import plain_reader
from tests.exact import assert_same

import midstride as ms

_NAMES = ["bfloat16", "float8_e4m3fn", "float8_e5m2", "int4"]

_READ = """
    import sys
    for name in ("torch", "jax", "safetensors"):
        sys.modules[name] = None      # not installed here
    import numpy as np, ml_dtypes
    import midstride as ms
    state = ms.open(sys.argv[1]).load()
    for name, array in state["numpy"].items():
        assert array.dtype == np.dtype(getattr(ml_dtypes, name)), (name, array.dtype)
        assert array.view(np.uint8).ravel().tolist() == list(range(8))[:array.nbytes], (name, array)
    for name, array in state["torch"].items():
        assert array.dtype.name == name, (name, array.dtype)
        assert array.astype(np.float32).tolist() == [0.0, 0.5, 1.0, 1.5], (name, array)
    fp4 = state["packed"]["float4_e2m1fn_x2"]
    assert fp4.dtype == ml_dtypes.float4_e2m1fn, fp4.dtype
    assert fp4.astype(np.float32).tolist() == [[0.5, 1.0], [1.5, -0.5]], fp4
"""


def _state() -> dict[str, dict[str, object]]:
    raw = np.arange(8, dtype=np.uint8)
    halves = torch.tensor([0, 0.5, 1, 1.5])
    return {
        "numpy": {name: raw.view(getattr(ml_dtypes, name)) for name in _NAMES},
        "torch": {name: halves.to(getattr(torch, name)) for name in ("bfloat16", "float8_e4m3fn", "float8_e5m2")},
        "packed": {"float4_e2m1fn_x2": torch.tensor([[0x21], [0x93]], dtype=torch.uint8).view(torch.float4_e2m1fn_x2)},
    }


def test_where_no_framework_is(tmp_path: Path) -> None:
    save(tmp_path, _state())
    run_well(_READ, tmp_path)


def test_each_side_reads_what_the_other_saved(tmp_path: Path) -> None:
    state = _state()
    save(tmp_path, state)
    swapped = {
        "numpy": {"bfloat16": torch.zeros(4, dtype=torch.bfloat16)},
        "torch": {"bfloat16": np.zeros(4, ml_dtypes.bfloat16)},
    }
    back = restore(tmp_path, swapped, strict=False).state
    assert_same(back["torch"]["bfloat16"], np.array([0, 0.5, 1, 1.5], ml_dtypes.bfloat16))
    assert back["numpy"]["bfloat16"].view(torch.uint8).tolist() == list(range(8))


def test_a_dtype_that_the_other_library_lacks_is_named(tmp_path: Path) -> None:
    save(tmp_path, {"w": {"q": np.zeros(3, ml_dtypes.int4)}})
    with pytest.raises(ms.StateMismatch, match=r"/w/q.*int4"):
        restore(tmp_path, {"w": {"q": torch.zeros(3, dtype=torch.int8)}})


def test_a_reader_without_the_dtypes_gets_bytes_and_the_name(tmp_path: Path) -> None:
    save(tmp_path, _state())
    loaded = plain_reader.load(str(tmp_path))["numpy"]
    assert {name: (dtype, raw) for name, (dtype, _, raw) in loaded.items()} == {
        name: (name, bytes(range(8))) for name in _NAMES
    }


def test_a_dtype_of_a_later_version_is_named_and_nothing_is_read(tmp_path: Path) -> None:
    info = save(tmp_path, _state())
    path = tmp_path / info.name / "manifest.json"
    raw = path.read_bytes().replace(b'"dtype":"int4"', b'"dtype":"int5"')
    zeroed = raw[:-35] + b"0" * 32 + raw[-3:]
    path.write_bytes(raw[:-35] + xxhash.xxh3_128_hexdigest(zeroed).encode() + raw[-3:])
    with pytest.raises(ms.NothingRestorable, match="int5"):
        ms.open(tmp_path).load()
