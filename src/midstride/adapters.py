"""What the library needs to know of a framework's arrays and objects, and how a framework's room is found.

Arrays and objects are described by their framework's *adapter*, found by the package that the
object's class comes from, so no framework is imported before one of its objects is seen.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

from midstride.tree import Node, Path, Tree

_ADAPTERS = {
    "numpy": "midstride.numpy_arrays",
    "torch": "midstride.torch.adapter",
    "tensorflow": "midstride.tensorflow.adapter",
    "keras": "midstride.keras.adapter",
}
"""Module of the adapter for the classes of each top-level package."""


@dataclass(slots=True)
class ArrayLeaf:
    """An array in the caller's memory."""

    path: Path
    dtype: str
    """A key of ``dtypes.DTYPES``."""
    shape: tuple[int, ...]
    nbytes: int
    """Bytes of its elements, packed; a view counts its own elements only."""
    source: Any
    address: int | None
    """Of the first element; None for an array without elements."""
    adapter: ArrayAdapter
    variable: bool = False
    """A place that holds an array, rather than an array: a restore fills it wherever it stands in the state,
    and gives the caller no other in its stead."""


@dataclass(slots=True)
class Destination:
    """Where the bytes of one array go on a restore."""

    buffer: np.ndarray
    """Its packed bytes in C order, little-endian; often the very memory of the array to fill."""
    finish: Callable[[], Any]
    """Called when the buffer holds verified bytes: returns the array that the caller gets."""
    in_place: bool = False
    """True where filling the buffer changes an array that the caller already has."""


class ArrayAdapter(Protocol):
    """What the library needs to know of one framework's arrays and objects."""

    lib: str
    """Name in the manifest: what kind of array a place held."""

    # The way out.

    def leaf(self, value: Any, path: Path) -> ArrayLeaf | None:
        """Describe an array; None for what is not one. ``UnsupportedState`` for arrays that cannot be saved."""
        ...

    def memory_key(self, value: Any) -> tuple[Any, ...]:
        """Equal for two arrays that are the same elements of the same memory."""
        ...

    def object_state(self, value: Any) -> tuple[Any, dict[str, Any]] | None:
        """The state of an object and notes to keep with it; None for an object that is nothing special."""
        ...

    def annotate(self, objects: list[LiveObject]) -> None:
        """Called once after a walk with all objects: add the notes that need to know of several."""
        ...

    def synchronize(self, leaves: list[ArrayLeaf]) -> None:
        """Wait until devices have finished computing these arrays."""
        ...

    def view(self, leaf: ArrayLeaf, out: np.ndarray) -> Any:
        """An array of the framework over the bytes ``out``, of the leaf's dtype and shape: for ``copy``."""
        ...

    def copy(self, leaves: list[ArrayLeaf], views: list[Any]) -> None:
        """Copy each leaf's elements, packed in C order, little-endian, into its view."""
        ...

    def copy_part(self, leaf: ArrayLeaf, first: int, last: int, out: np.ndarray) -> None:
        """Copy elements ``first`` to ``last`` (in C order) of one leaf into the bytes ``out``."""
        ...

    # The way in.

    def new_array(self, dtype: str, shape: tuple[int, ...], like: Any = None) -> Destination:
        """Memory for a new array of this dtype and shape, on the device of ``like`` if given."""
        ...

    def fill(self, value: Any) -> Destination:
        """The memory of an array that the caller has."""
        ...

    def convert(self, array: Any, like: Any, *, in_place: bool) -> Any:
        """An array of this framework in the dtype of ``like``; put into ``like`` itself if ``in_place``."""
        ...

    def is_object(self, value: Any) -> bool:
        """Whether ``fit`` and ``load`` are to be used for this object, rather than its own two methods."""
        ...

    def fit(self, value: Any, saved: Node, objects: list[LiveObject], report: Report) -> tuple[Tree, Any]:
        """A saved object's state in the terms of the live object: the tree of what ``load`` will be
        given, and the object's present state where the saved one must match it (None: any)."""
        ...

    def load(self, value: Any, state: Any, saved: Node, strict: bool) -> None:
        """Give a live object its state back."""
        ...


@dataclass(slots=True)
class LiveObject:
    """An object met in a walk. ``notes`` are kept beside its state in the manifest."""

    path: Path
    value: Any
    notes: dict[str, Any]


@dataclass(slots=True)
class Report:
    """What does not fit between a checkpoint and the state it should fill, collected to be told at once."""

    problems: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    strict: bool = True
    """Whether a missing or an unexpected name is a problem or a warning."""
    renamed: dict[str, str] = field(default_factory=dict)
    """Names in the checkpoint -> names in the state, as the caller said."""

    def unmatched(self, text: str) -> None:
        (self.problems if self.strict else self.warnings).append(text)


def adapter_for(cls: type) -> ArrayAdapter | None:
    """The adapter for a class, by the top-level package that it or a base of it comes from."""
    for base in cls.__mro__:
        module = _ADAPTERS.get(base.__module__.partition(".")[0])
        if module is not None:
            return _adapter(module)
    return None


@functools.cache
def _adapter(module: str) -> ArrayAdapter:
    adapter: ArrayAdapter = importlib.import_module(module).ADAPTER
    return adapter


def adapter_of_lib(lib: str) -> ArrayAdapter | None:
    """The adapter for a library's name in a manifest, or None. ``ImportError`` if it is not installed."""
    module = _ADAPTERS.get(lib)
    return _adapter(module) if module is not None else None
