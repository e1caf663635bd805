"""Every dtype of NumPy, ml_dtypes and PyTorch, in every shape: the same bits, dtype and shape come back,
or ``save()`` names the key that it refuses."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch
from states import nothing_written, restore, save
from tests.exact import assert_same

import midstride as ms
from midstride.dtypes import DTYPES

_SHAPES = [(), (0,), (0, 3), (1,), (2, 3), (2, 128, 130)]

_FINE = [
    np.bool_, np.int8, np.int16, np.int32, np.int64, np.uint8, np.uint16, np.uint32, np.uint64,
    np.float16, np.float32, np.float64, np.complex64, np.complex128, ml_dtypes.bfloat16,
    *[getattr(ml_dtypes, name) for name in sorted(vars(ml_dtypes)) if name.startswith(("float", "int", "uint"))],
]  # fmt: skip

_PLACEHOLDERS = {"int1", "int2", "int4", "uint1", "uint2", "uint4"}
"""Dtypes of ml_dtypes; under these names PyTorch has stand-ins with no layout of their own."""


def _bits(dtype: Any, shape: tuple[int, ...]) -> np.ndarray:
    """Random bits: NaNs with payloads, denormals, both zeros."""
    size = np.dtype(dtype).itemsize
    raw = np.random.default_rng(0).integers(0, 256, math.prod(shape) * size, dtype=np.uint8)
    if np.dtype(dtype) == np.bool_:
        raw &= 1
    return raw.view(dtype).reshape(shape)


@pytest.mark.parametrize("staging_bytes", [None, 256 * 1024])
@pytest.mark.parametrize("template", [False, True])
def test_numpy(tmp_path: Path, template: bool, staging_bytes: int | None) -> None:
    state = {f"{np.dtype(d).name}{list(s)}": _bits(d, s) for d in _FINE if isinstance(d, type) for s in _SHAPES}
    assert len({array.dtype for array in state.values()}) >= len(DTYPES) - 1  # all but PyTorch's packed fp4
    save(tmp_path, {"zoo": state}, staging_bytes=staging_bytes)
    blank = {key: np.zeros_like(array) for key, array in state.items()}
    back = restore(tmp_path, {"zoo": blank} if template else None).state
    assert_same(back, {"zoo": state})


def test_special_values(tmp_path: Path) -> None:
    words = np.array([0x7FC00001, 0xFFC12345, 0x7F800001, 0x80000000, 0x00000001, 0x807FFFFF, 0xFF800000], np.uint32)
    halves = np.array([0x7E01, 0xFC01, 0x8000, 0x0001, 0xFFFF, 0x7F81], np.uint16)
    state = {
        "float32": words.view(np.float32),
        "float16": halves.view(np.float16),
        "bfloat16": halves.view(ml_dtypes.bfloat16),
        "torch": torch.from_numpy(words.copy()).view(torch.float32),
        "torch bfloat16": torch.from_numpy(halves.copy()).view(torch.bfloat16),
        "torch float16": torch.from_numpy(halves.copy()).view(torch.float16),
    }
    save(tmp_path, {"values": state})
    assert_same(restore(tmp_path, {"values": dict(state)}).state["values"], state)


@pytest.mark.parametrize("dtype", [np.longdouble, np.clongdouble, "S3", "M8[s]", "V2"])
def test_numpy_dtypes_that_are_refused(tmp_path: Path, dtype: Any) -> None:
    for value in (np.zeros((2,), dtype), np.zeros((), dtype), np.zeros((), dtype)[()]):
        with ms.Checkpointer(tmp_path / "run") as ckpt, pytest.raises(ms.UnsupportedState, match="/a/b"):
            ckpt.save(1, {"a": {"b": value}})
        assert nothing_written(tmp_path / "run")


@pytest.mark.filterwarnings("ignore::UserWarning")  # PyTorch's own, about the odder of its dtypes
def test_torch(tmp_path: Path) -> None:
    fine: dict[str, torch.Tensor] = {}
    refused: dict[str, torch.Tensor] = {}
    for dtype in {d for d in vars(torch).values() if isinstance(d, torch.dtype)}:
        for shape in _SHAPES[:-1]:
            try:
                tensor = torch.empty(shape, dtype=dtype)
                if tensor.numel():
                    raw = torch.from_numpy(_bits(np.uint8, (tensor.numel() * tensor.element_size(),)).copy())
                    if dtype == torch.bool:
                        raw &= 1
                    tensor = raw.view(dtype).view(shape)
            except RuntimeError:
                continue  # PyTorch itself cannot make one
            name = str(dtype).removeprefix("torch.")
            (fine if name in DTYPES and name not in _PLACEHOLDERS else refused)[f"{dtype}{list(shape)}"] = tensor
    assert {
        "torch.bfloat16[2, 3]",
        "torch.float8_e4m3fn[]",
        "torch.int64[0, 3]",
        "torch.float8_e8m0fnu[0, 3]",
        "torch.uint64[1]",
    } < set(fine)
    assert "torch.float4_e2m1fn_x2[2, 3]" in fine and "torch.complex128[]" in fine
    save(tmp_path, {"zoo": fine})
    blank = {key: torch.empty_like(tensor) for key, tensor in fine.items()}
    assert refused
    assert_same(restore(tmp_path, {"zoo": blank}).state, {"zoo": fine})
    for key, tensor in refused.items():
        with ms.Checkpointer(tmp_path / "refused") as ckpt, pytest.raises(ms.UnsupportedState, match="/zoo/here"):
            ckpt.save(1, {"zoo": {"here": tensor, "there": torch.ones(1)}})
        assert nothing_written(tmp_path / "refused"), key
