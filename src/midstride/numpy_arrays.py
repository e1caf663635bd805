"""NumPy arrays as leaves of a state, ml_dtypes' dtypes included."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

import ml_dtypes
import numpy as np

from midstride.adapters import ArrayLeaf, Destination, LiveObject, Report
from midstride.dtypes import DTYPES, array_nbytes
from midstride.errors import StateMismatch, UnsupportedState
from midstride.tree import Node, Path, Tree, pointer


class NumpyAdapter:
    """``adapters.ArrayAdapter`` for ``numpy.ndarray`` and ``numpy.memmap``."""

    lib = "numpy"

    def leaf(self, value: Any, path: Path) -> ArrayLeaf | None:
        if not isinstance(value, np.ndarray):
            return None
        if type(value) not in (np.ndarray, np.memmap):
            raise UnsupportedState(
                f"{pointer(path) or '/'}: a {type(value).__name__} is more than its array; save np.asarray(...) of it "
                "and what else it holds. Nothing was written"
            )
        name = value.dtype.name
        if name not in DTYPES:
            raise UnsupportedState(
                f"{pointer(path) or '/'}: arrays of dtype {value.dtype} cannot be saved. Nothing was written"
            )
        address = value.ctypes.data if value.size else None
        return ArrayLeaf(path, name, value.shape, value.size * value.itemsize, value, address, self)

    def memory_key(self, value: np.ndarray) -> tuple[Any, ...]:
        interface = value.__array_interface__
        return (interface["data"][0], value.dtype.str, value.dtype.name, value.shape, value.strides)

    def object_state(self, value: Any) -> None:
        return None

    def annotate(self, objects: list[LiveObject]) -> None:
        pass

    def synchronize(self, leaves: list[ArrayLeaf]) -> None:
        pass

    def view(self, leaf: ArrayLeaf, out: np.ndarray) -> np.ndarray:
        return out.view(_little_endian(leaf.source.dtype)).reshape(leaf.shape)

    def copy(self, leaves: list[ArrayLeaf], views: list[np.ndarray]) -> None:
        for leaf, view in zip(leaves, views, strict=True):
            # copyto() swaps bytes and walks strides as needed, and lets other threads run.
            np.copyto(view, leaf.source)

    def copy_part(self, leaf: ArrayLeaf, first: int, last: int, out: np.ndarray) -> None:
        packed = out.view(_little_endian(leaf.source.dtype))
        for index, begin, end in slabs(leaf.shape, first, last):
            part = leaf.source[index]
            np.copyto(packed[begin - first : end - first].reshape(part.shape), part)

    def new_array(self, dtype: str, shape: tuple[int, ...], like: Any = None) -> Destination:
        if dtype == "float4_e2m1fn_x2":
            return _unpacked_fp4(shape)
        buffer = np.empty(array_nbytes(dtype, shape), np.uint8)
        try:
            array = buffer.view(_little_endian(np.dtype(dtype))).reshape(shape)
        except ValueError as error:  # too large but for a dimension of 0, which NumPy leaves out of its product
            raise StateMismatch(f"NumPy has no {dtype} arrays of shape {list(shape)}") from error
        return Destination(buffer, lambda: array.astype(array.dtype.newbyteorder("="), copy=False))

    def fill(self, value: np.ndarray) -> Destination:
        if value.flags.c_contiguous and value.flags.writeable and value.dtype.isnative and sys.byteorder == "little":
            return Destination(value.reshape(-1).view(np.uint8), lambda: value, in_place=True)
        fresh = self.new_array(value.dtype.name, value.shape)

        def finish() -> np.ndarray:
            np.copyto(value, fresh.finish())
            return value

        return Destination(fresh.buffer, finish)

    def convert(self, array: np.ndarray, like: np.ndarray, *, in_place: bool) -> np.ndarray:
        if not in_place:
            return array.astype(like.dtype)
        np.copyto(like, array, casting="unsafe")
        return like

    def is_object(self, value: Any) -> bool:
        return False

    def fit(self, value: Any, saved: Node, objects: list[LiveObject], report: Report) -> tuple[Tree, Any]:
        raise TypeError("NumPy has no objects with a state of their own")

    def load(self, value: Any, state: Any, saved: Node, strict: bool) -> None:
        raise TypeError("NumPy has no objects with a state of their own")


def _unpacked_fp4(shape: tuple[int, ...]) -> Destination:
    """PyTorch's packed fp4 has no NumPy dtype: give its elements one by one, the low half byte first."""
    buffer = np.empty(int(np.prod(shape)), np.uint8)

    def finish() -> np.ndarray:
        halves = np.stack([buffer & 0xF, buffer >> 4], axis=-1)
        return halves.reshape(*shape[:-1], -1 if shape else 2).view(ml_dtypes.float4_e2m1fn)

    return Destination(buffer, finish)


def _little_endian(dtype: np.dtype) -> np.dtype:
    return dtype if sys.byteorder == "little" and dtype.isnative else dtype.newbyteorder("<")


def slabs(shape: tuple[int, ...], first: int, last: int) -> Iterator[tuple[tuple[Any, ...], int, int]]:
    """Cut elements ``first`` to ``last`` (in C order) of an array into few basic-index views.

    Yields ``(index, begin, end)``: ``array[index]`` holds the elements ``begin`` to ``end``.
    """
    if first >= last:
        return
    if not shape:
        yield (), 0, 1
        return
    row = int(np.prod(shape[1:], dtype=np.int64))
    start, stop = first // row, -(-last // row)
    if first == start * row and last == stop * row:
        yield (slice(start, stop),), first, last
        return
    whole_from, whole_to = -(-first // row), last // row
    if whole_from > whole_to:  # both ends inside one row
        yield from _inside(shape, start, first, last, row)
        return
    yield from _inside(shape, start, first, whole_from * row, row)
    if whole_from < whole_to:
        yield (slice(whole_from, whole_to),), whole_from * row, whole_to * row
    yield from _inside(shape, whole_to, whole_to * row, last, row)


def _inside(
    shape: tuple[int, ...], number: int, first: int, last: int, row: int
) -> Iterator[tuple[tuple[Any, ...], int, int]]:
    base = number * row
    for index, begin, end in slabs(shape[1:], first - base, last - base):
        yield (number, *index), base + begin, base + end


ADAPTER = NumpyAdapter()
