"""Where the bytes of each array go: into memory that the caller has, or into new arrays."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from midstride.adapters import ArrayAdapter, ArrayLeaf, Destination, Report, adapter_of_lib
from midstride.dtypes import DTYPES, array_nbytes
from midstride.errors import StateMismatch, UnsupportedState
from midstride.format.manifest import ArrayRecord
from midstride.restore.select import Index
from midstride.tree import Path, pointer

Build = Callable[[], Any]
"""Called when all bytes are there: gives the value of one place of the state."""


@dataclass(slots=True)
class Fill:
    """Where bytes must go, and how the state is put together afterwards."""

    destinations: list[tuple[int, Destination, int]] = field(default_factory=list)
    """Array number, where it goes, and the byte of it that the buffer begins with. One array may go
    to several places."""
    loads: list[Callable[[], None]] = field(default_factory=list)
    """Give the objects their state back, in the order of the state."""
    last_loads: list[Callable[[], None]] = field(default_factory=list)
    """The same for objects that must come last: random state, which others may consume."""
    build: Build = lambda: None
    types: dict[str, str] = field(default_factory=dict)
    """Path -> original class, for what comes in its plain form."""

    @property
    def in_place(self) -> bool:
        return any(destination.in_place for _, destination, _ in self.destinations)


def report_difference(report: Report, path: Path, has: str, wanted: str) -> None:
    report.problems.append(f"{pointer(path) or '/'}: the checkpoint {has}, the state wants {wanted}")


class ArrayFiller:
    """Finds the destinations of one checkpoint's arrays. Nothing is read; what does not fit is reported."""

    def __init__(
        self, arrays: Sequence[ArrayRecord], fill: Fill, report: Report, *, cast: bool, parts: Mapping[int, Index]
    ) -> None:
        """``parts``: arrays of which only a part is wanted."""
        self._arrays = arrays
        self._fill = fill
        self._report = report
        self._cast = cast
        self._parts = parts
        self._whole: dict[tuple[int, bool], Build] = {}
        self._tied: dict[tuple[int, tuple[Any, ...]], Build] = {}
        self._by_memory: dict[tuple[Any, ...], int] = {}
        # A memory key is of use only while what it was made of lives.
        self._alive: list[Any] = []

    def like(
        self, adapter: ArrayAdapter, template: Any, leaf: ArrayLeaf, index: int, path: Path, *, in_place: bool
    ) -> Build:
        """Array number ``index`` for the place of the template's array ``leaf``: into it, or a new one like it."""
        if leaf.variable and not in_place:
            # It is the caller's own, so it is filled when objects are loaded, and stays where it is.
            self._fill.loads.append(self.like(adapter, template, leaf, index, path, in_place=True))
            return lambda: template
        saved = self._arrays[index]
        if saved.shape != leaf.shape:
            report_difference(self._report, path, f"has shape {list(saved.shape)}", f"{list(leaf.shape)}")
            return lambda: None
        if saved.dtype != leaf.dtype:
            return self._cast_array(adapter, template, leaf, index, path, in_place=in_place)
        if not in_place:
            return self._new_like(adapter, template, leaf, index, path)
        return self._in_place(adapter, template, leaf, index, path)

    def free(self, index: int, path: Path, *, native: bool) -> Build:
        """Array number ``index`` for a place that wants nothing special: NumPy's, or its own library's (``native``)."""
        saved = self._arrays[index]
        key = (index, native)
        if key not in self._whole:
            adapter = adapter_of_lib(saved.lib if native else "numpy")
            if adapter is None:
                raise UnsupportedState(f"arrays of {saved.lib} are not known to this Midstride")
            # Places that were one array are one array again.
            part = self._part if index in self._parts else self._all
            self._whole[key] = _once(part(adapter, index, path))
        return self._whole[key]

    def _new(
        self, adapter: ArrayAdapter, index: int, shape: tuple[int, ...], path: Path, like: Any = None, first: int = 0
    ) -> tuple[Build, Destination | None]:
        saved = self._arrays[index]
        try:
            destination = adapter.new_array(saved.dtype, shape, like)
        except StateMismatch as error:
            self._report.problems.append(
                f"{pointer(path) or '/'}: {error}. It was saved from {saved.lib}: restore into a state with an array "
                f"of {saved.lib} here, or leave it out with only="
            )
            return lambda: None, None
        return self._destination(index, destination, first), destination

    def _new_like(self, adapter: ArrayAdapter, template: Any, leaf: ArrayLeaf, index: int, path: Path) -> Build:
        """A new array; one for all places of the template that are one memory and were one array."""
        if leaf.address is None:
            return self._new(adapter, index, leaf.shape, path, template)[0]
        key = (index, adapter.memory_key(template))
        if key not in self._tied:
            self._tied[key] = _once(self._new(adapter, index, leaf.shape, path, template)[0])
            self._alive.append(template)
        return self._tied[key]

    def _in_place(self, adapter: ArrayAdapter, template: Any, leaf: ArrayLeaf, index: int, path: Path) -> Build:
        memory = adapter.memory_key(template) if leaf.address is not None else None
        if memory is not None and memory in self._by_memory:
            other = self._by_memory[memory]
            if other != index and _digests(self._arrays[other]) != _digests(self._arrays[index]):
                self._report.problems.append(
                    f"{pointer(path)}: shares its memory with another array here (tied), but the checkpoint has "
                    "two different arrays for them"
                )
            return lambda: template
        destination = adapter.fill(template)
        if memory is not None:
            self._by_memory[memory] = index
            self._alive.append(template)
        return self._destination(index, destination)

    def _destination(self, index: int, destination: Destination, first: int = 0) -> Build:
        self._fill.destinations.append((index, destination, first))
        return destination.finish

    def _cast_array(
        self, adapter: ArrayAdapter, template: Any, leaf: ArrayLeaf, index: int, path: Path, *, in_place: bool
    ) -> Build:
        saved = self._arrays[index].dtype
        if not self._cast or not _can_cast(saved, leaf.dtype):
            hint = " (cast=True converts it)" if _can_cast(saved, leaf.dtype) else ""
            report_difference(self._report, path, f"has dtype {saved}", leaf.dtype + hint)
            return lambda: None
        build, destination = self._new(adapter, index, leaf.shape, path)

        def convert() -> Any:
            array = build()
            if destination is not None and "int" in saved and not _ints_fit(destination.buffer, saved, leaf.dtype):
                raise StateMismatch(f"{pointer(path)}: {saved} values of the checkpoint do not fit {leaf.dtype}")
            return adapter.convert(array, template, in_place=in_place)

        return convert

    def _all(self, adapter: ArrayAdapter, index: int, path: Path) -> Build:
        return self._new(adapter, index, self._arrays[index].shape, path)[0]

    def _part(self, adapter: ArrayAdapter, index: int, path: Path) -> Build:
        """Rows are read alone; of the other dimensions everything is read and then cut."""
        saved, part = self._arrays[index], self._parts[index]
        if len(part) > len(saved.shape):
            raise TypeError(f"only= has {len(part)} slices for an array of {len(saved.shape)} dimensions")
        start, stop, step = part[0].indices(saved.shape[0])
        rows = max(0, stop - start)
        row_bytes = array_nbytes(saved.dtype, saved.shape[1:])
        finish, _ = self._new(adapter, index, (rows, *saved.shape[1:]), path, first=start * row_bytes)
        cut = (slice(None, None, step), *part[1:])
        return lambda: finish()[cut].copy() if part[1:] or step > 1 else finish()


def _once(build: Build) -> Build:
    made: list[Any] = []

    def once() -> Any:
        if not made:
            made.append(build())
        return made[0]

    return once


def _digests(array: ArrayRecord) -> list[str]:
    return [part.digest for part in array.slices]


def _can_cast(saved: str, wanted: str) -> bool:
    """Within floats, within ints, within complex numbers; never between these."""
    return _kind(saved) == _kind(wanted)


def _kind(dtype: str) -> str:
    for kind in ("float", "complex", "uint", "int"):
        if dtype.removeprefix("b").startswith(kind) and dtype in DTYPES:
            return kind
    return dtype


def _ints_fit(packed: np.ndarray, saved: str, wanted: str) -> bool:
    """Whether every value of an array's packed bytes is one of the dtype ``wanted``."""
    values = packed.view(np.dtype(saved).newbyteorder("<"))
    return bool((values.astype(wanted).astype(saved) == values).all())
