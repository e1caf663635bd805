"""The data file: plain safetensors, laid out for direct I/O.

    8 bytes                length of the header, little-endian
    header                 JSON, padded with spaces so that the data begins at a multiple of 4096
    data                   the tensors back to back, in the header's order, no gaps

Format: https://github.com/huggingface/safetensors#format. Tensors lie by falling item size, so each
begins at a multiple of its own. Dtypes that safetensors lacks are stored as bytes (or, for
complex128, as pairs of float64); the manifest has the true dtype.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from midstride.dtypes import DTYPES, array_nbytes
from midstride.errors import CorruptCheckpoint
from midstride.limits import HEADER_LIMIT_BYTES, PAGE_BYTES

_LENGTH = struct.Struct("<Q")


@dataclass(frozen=True, slots=True)
class Tensor:
    """One tensor of a data file: ``begin`` and ``end`` are byte offsets from the start of the file."""

    key: str
    dtype: str
    """A key of ``dtypes.DTYPES``."""
    shape: tuple[int, ...]
    begin: int
    end: int


@dataclass(frozen=True, slots=True)
class Header:
    """A data file's header (``raw``: everything before the data) and where its tensors lie."""

    raw: bytes
    tensors: tuple[Tensor, ...]
    size: int
    """Bytes of the whole file."""


def build_header(tensors: Iterable[tuple[str, str, tuple[int, ...]]], metadata: Mapping[str, str]) -> Header:
    """Lay out ``(key, dtype, shape)`` triples, in their order, and make the header that tells so.

    The caller orders them by falling item size (``sort_key``); keys are unique.
    """
    entries: dict[str, object] = {"__metadata__": dict(metadata)} if metadata else {}
    spans: list[tuple[str, str, tuple[int, ...], int, int]] = []
    offset = 0
    for key, dtype, shape in tensors:
        end = offset + array_nbytes(dtype, shape)
        stored = DTYPES[dtype]
        entries[key] = {
            "dtype": stored.stored_as,
            "shape": list(stored.stored_shape(shape)),
            "data_offsets": [offset, end],
        }
        spans.append((key, dtype, shape, offset, end))
        offset = end
    text = json.dumps(entries, separators=(",", ":"), ensure_ascii=False).encode()
    start = -(-(len(text) + _LENGTH.size) // PAGE_BYTES) * PAGE_BYTES
    raw = _LENGTH.pack(start - _LENGTH.size) + text.ljust(start - _LENGTH.size)
    placed = tuple(Tensor(key, dtype, shape, start + a, start + b) for key, dtype, shape, a, b in spans)
    return Header(raw, placed, start + offset)


def sort_key(dtype: str) -> int:
    """Sorts tensors by falling item size, so that each begins at a multiple of its own."""
    return -DTYPES[dtype].itemsize


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """What a header says of one tensor, in safetensors' own terms; offsets from the start of the file."""

    stored_as: str
    shape: tuple[int, ...]
    begin: int
    end: int


# Bits an element of everything that safetensors holds.
_BITS = {
    "F4": 4, "F6_E2M3": 6, "F6_E3M2": 6, "BOOL": 8, "U8": 8, "I8": 8, "F8_E4M3": 8, "F8_E5M2": 8, "F8_E8M0": 8,
    "F8_E4M3FNUZ": 8, "F8_E5M2FNUZ": 8, "I16": 16, "U16": 16, "F16": 16, "BF16": 16, "I32": 32, "U32": 32, "F32": 32,
    "C64": 64, "F64": 64, "I64": 64, "U64": 64,
}  # fmt: skip


def header_nbytes(first: bytes, file_size: int) -> int:
    """Length of the whole header from the file's first 8 bytes, checked before anything is allocated."""
    if len(first) < _LENGTH.size:
        raise CorruptCheckpoint(f"a data file of {file_size} bytes is too short to have a header")
    length: int = _LENGTH.unpack(first[: _LENGTH.size])[0]
    if length > HEADER_LIMIT_BYTES or length + _LENGTH.size > file_size:
        raise CorruptCheckpoint(f"the header claims {length} bytes in a file of {file_size}")
    return length + _LENGTH.size


def parse_header(raw: bytes, file_size: int) -> dict[str, StoredTensor]:
    """Read a header strictly: no key twice, no overlap, no gap, no size that does not add up.

    Raises ``CorruptCheckpoint`` for anything else, whatever the bytes are.
    """
    if header_nbytes(raw, file_size) != len(raw):
        raise CorruptCheckpoint("the header's length does not fit the file")
    try:
        entries = json.loads(raw[_LENGTH.size :].decode(), object_pairs_hook=_without_duplicates)
    except (ValueError, RecursionError) as error:
        raise CorruptCheckpoint(f"the header is not JSON: {error}") from error
    if not isinstance(entries, dict):
        raise CorruptCheckpoint("the header is not a JSON object")
    entries.pop("__metadata__", None)
    tensors = {key: _stored_tensor(key, entry, len(raw)) for key, entry in entries.items()}
    position = len(raw)
    for tensor in sorted(tensors.values(), key=lambda t: (t.begin, t.end)):
        if tensor.begin != position:
            raise CorruptCheckpoint(f"the header leaves a gap or an overlap at byte {position}")
        position = tensor.end
    if position != file_size:
        raise CorruptCheckpoint(f"the header tells of {position} bytes in a file of {file_size}")
    return tensors


def _without_duplicates(pairs: list[tuple[str, object]]) -> dict[str, object]:
    result = dict(pairs)
    if len(result) != len(pairs):
        raise ValueError("a key stands twice")
    return result


def _stored_tensor(key: str, entry: object, start: int) -> StoredTensor:
    try:
        stored_as, shape, (begin, end) = entry["dtype"], entry["shape"], entry["data_offsets"]  # type: ignore[index]
        bits = _BITS[stored_as]
        numbers = [*shape, begin, end]
    except (KeyError, TypeError, ValueError) as error:
        raise CorruptCheckpoint(f"the header's entry for {key!r} is not understood") from error
    if len(numbers) > 66 or any(type(n) is not int or not 0 <= n < 2**63 for n in numbers):
        raise CorruptCheckpoint(f"the header's entry for {key!r} has a number out of range")
    if math.prod(shape) * bits != (end - begin) * 8:
        raise CorruptCheckpoint(f"the header's entry for {key!r} has a shape that does not fit its bytes")
    return StoredTensor(stored_as, tuple(shape), start + begin, start + end)
