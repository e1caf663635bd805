"""Equality to the last bit and the last type: what a restored state must have."""

from __future__ import annotations

import dataclasses
import sys
from collections import defaultdict, deque
from typing import Any

import numpy as np


def assert_same(found: Any, wanted: Any, at: str = "state") -> None:
    """Equal in value, in class, in the order of keys, and in every bit of every array."""
    assert type(found) is type(wanted), f"{at}: {type(found)} in place of {type(wanted)}"
    if isinstance(wanted, np.ndarray | np.generic):
        assert (found.dtype, found.shape) == (wanted.dtype, wanted.shape), at
        assert found.tobytes() == wanted.tobytes(), at
    elif "torch" in sys.modules and isinstance(wanted, sys.modules["torch"].Tensor):
        assert (found.dtype, found.shape) == (wanted.dtype, wanted.shape), at
        assert tensor_bytes(found) == tensor_bytes(wanted), at
    elif isinstance(wanted, dict):
        assert [(type(k), repr(k)) for k in found] == [(type(k), repr(k)) for k in wanted], at
        if isinstance(wanted, defaultdict):
            assert found.default_factory is wanted.default_factory, at
        for (key, mine), theirs in zip(found.items(), wanted.values(), strict=True):
            assert_same(mine, theirs, f"{at}[{key!r}]")
    elif isinstance(wanted, list | tuple | deque):
        assert len(found) == len(wanted), at
        assert getattr(found, "maxlen", None) == getattr(wanted, "maxlen", None), at
        for number, (mine, theirs) in enumerate(zip(found, wanted, strict=True)):
            assert_same(mine, theirs, f"{at}[{number}]")
    elif isinstance(wanted, set | frozenset):
        assert sorted(map(_typed, found)) == sorted(map(_typed, wanted)), at
    elif dataclasses.is_dataclass(wanted):
        for field in dataclasses.fields(wanted):
            assert_same(getattr(found, field.name), getattr(wanted, field.name), f"{at}.{field.name}")
    elif isinstance(wanted, int):
        assert found == wanted, at
    else:
        assert repr(found) == repr(wanted), at  # NaN equals itself here, and -0.0 is not 0.0


def _typed(value: Any) -> tuple[str, str]:
    if isinstance(value, tuple | frozenset):
        parts = [str(_typed(part)) for part in value]
        return type(value).__name__, str(parts if isinstance(value, tuple) else sorted(parts))
    return type(value).__name__, repr(value)


def tensor_bytes(tensor: Any) -> bytes:
    """A tensor's elements, packed in C order."""
    import torch

    packed = tensor.detach().resolve_conj().resolve_neg().contiguous().reshape(-1)
    return packed.view(torch.uint8).numpy().tobytes() if packed.numel() else b""
