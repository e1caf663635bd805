"""The dtypes that can be saved, and how arrays of each lie in a file.

Names are NumPy's or ml_dtypes' own where they have the dtype, PyTorch's where only it does. What
safetensors lacks is stored as bytes (or, complex128, as pairs of float64); the manifest has the
true dtype.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class DType:
    """One row of the table."""

    name: str
    """Name in the manifest; NumPy's or ml_dtypes' own name where they have the dtype."""
    itemsize: int
    """Bytes an element in memory and in the file."""
    stored_as: str
    """safetensors' name of what is stored."""
    last_dim: int = 0
    """0: the shape as it is; -1: an extra last dimension of 2; 2: the last dimension counts double (0-d: it is 2)."""

    def stored_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """The shape that the safetensors header tells for an array of this dtype."""
        if self.last_dim == -1:
            return (*shape, 2)
        if self.last_dim:
            return (*shape[:-1], math.prod(shape[-1:]) * self.last_dim)
        return shape


def _dtypes() -> dict[str, DType]:
    plain = {
        "bool": (1, "BOOL"), "int8": (1, "I8"), "uint8": (1, "U8"), "int16": (2, "I16"), "uint16": (2, "U16"),
        "int32": (4, "I32"), "uint32": (4, "U32"), "int64": (8, "I64"), "uint64": (8, "U64"),
        "float16": (2, "F16"), "bfloat16": (2, "BF16"), "float32": (4, "F32"), "float64": (8, "F64"),
        "complex64": (8, "C64"), "float8_e4m3fn": (1, "F8_E4M3"), "float8_e5m2": (1, "F8_E5M2"),
        "float8_e8m0fnu": (1, "F8_E8M0"), "float8_e4m3fnuz": (1, "F8_E4M3FNUZ"), "float8_e5m2fnuz": (1, "F8_E5M2FNUZ"),
    }  # fmt: skip
    # One element a byte in memory (ml_dtypes); safetensors has no such layout, so the bytes are kept.
    as_bytes = (
        "float8_e3m4", "float8_e4m3", "float8_e4m3b11fnuz", "float6_e2m3fn", "float6_e3m2fn",
        "float4_e2m1fn", "int1", "int2", "int4", "uint1", "uint2", "uint4",
    )  # fmt: skip
    table = [DType(name, size, stored) for name, (size, stored) in plain.items()]
    table += [DType(name, 1, "U8") for name in as_bytes]
    table.append(DType("complex128", 16, "F64", last_dim=-1))
    # PyTorch's packed fp4: two elements a byte; safetensors counts elements.
    table.append(DType("float4_e2m1fn_x2", 1, "F4", last_dim=2))
    return {dtype.name: dtype for dtype in table}


DTYPES: Mapping[str, DType] = _dtypes()


def array_nbytes(dtype: str, shape: tuple[int, ...]) -> int:
    """Bytes of an array in a file and in packed memory."""
    return math.prod(shape) * DTYPES[dtype].itemsize
