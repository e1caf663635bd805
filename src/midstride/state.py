"""Walk a training state into leaves: a tree of nodes, and the arrays that the tree refers to.

``walk`` reads the caller's containers, values and objects once, at one moment. What it returns
holds no reference to anything mutable of the caller's, except the arrays themselves
(``ArrayLeaf.source``), which ``save.capture`` copies next.

Arrays and objects of a framework are described by that framework's *adapter*, found by the
package that the object's class comes from, so no framework is imported before one of its objects
is seen.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
import importlib
import pathlib
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeGuard

import numpy as np

from midstride.errors import UnsupportedState

Path = tuple[Any, ...]
"""Keys from the root of the state down to a place in it."""

MAX_DEPTH = 128
"""Nesting that a state may have. Far above real states, below Python's own recursion limit."""

MAX_DIMENSIONS = 62
"""Of an array: what NumPy can hold, less what a stored form may add."""

_ADAPTERS = {"numpy": "midstride.numpy_arrays", "torch": "midstride.torch.adapter"}
"""Module of the adapter for the classes of each top-level package."""


# Nodes: the tree that is written into the manifest.


@dataclass(slots=True)
class Value:
    """A Python value that cannot change: None, bool, int, float, complex, str, bytes, Path, Enum, NumPy scalar."""

    value: Any


@dataclass(slots=True)
class ArrayRef:
    """The array of this number in the walk's list of leaves."""

    index: int


@dataclass(slots=True)
class Node:
    """A container, or an object reduced to its ``state_dict``.

    ``kind`` is one of ``CONTAINER_KINDS``. ``keys`` names the children where the kind has names.
    """

    kind: str
    children: list[Tree]
    keys: list[Any] | None = None
    type_name: str | None = None
    """The class, for people and for matching; never used to import anything."""
    extra: dict[str, Any] | None = None
    """Facts of the kind: a deque's ``maxlen``, an adapter's notes on an object. Plain values only."""


Tree = Value | ArrayRef | Node

MAPPING_KINDS = frozenset({"dict", "ordereddict", "defaultdict", "counter"})
SEQUENCE_KINDS = frozenset({"list", "tuple", "deque", "set", "frozenset"})
CONTAINER_KINDS = MAPPING_KINDS | SEQUENCE_KINDS | {"namedtuple", "dataclass", "object"}


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


class Stateful(Protocol):
    """An object that can give its state and take it back."""

    def state_dict(self) -> Any: ...

    def load_state_dict(self, state_dict: Any) -> Any: ...


@dataclass(slots=True)
class Walked:
    """A state, taken apart."""

    tree: Tree
    leaves: list[ArrayLeaf]
    """One for each distinct array: two places that are one memory share a leaf."""


def is_stateful(value: Any) -> TypeGuard[Stateful]:
    """True for an object (not a class) with both methods of ``Stateful``."""
    # By hand: isinstance() with a protocol costs ten times as much, and is asked of every array.
    if isinstance(value, type):
        return False
    return callable(getattr(value, "state_dict", None)) and callable(getattr(value, "load_state_dict", None))


def pointer(path: Path) -> str:
    """A path as an RFC 6901 JSON pointer: ``("a", "b/c", 0)`` is ``/a/b~1c/0``."""
    return "".join("/" + str(key).replace("~", "~0").replace("/", "~1") for key in path)


def type_name(value: Any) -> str:
    """The class of a value, as ``package.module:Class``."""
    return f"{type(value).__module__}:{type(value).__qualname__}"


def walk(state: Any) -> Walked:
    """Take a state apart. ``UnsupportedState`` names the path of the first value that cannot be saved."""
    return _Walk().run(state)


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


def is_named_tuple(value: Any) -> bool:
    """True for an instance of a class made by ``namedtuple`` or ``NamedTuple``."""
    fields = getattr(value, "_fields", None)
    return isinstance(value, tuple) and isinstance(fields, tuple) and len(fields) == len(value)


_PLAIN = (type(None), bool, int, float, complex, str, bytes)
_PLAIN_SET = frozenset(_PLAIN)


@dataclass(slots=True)
class _Walk:
    leaves: list[ArrayLeaf] = field(default_factory=list)
    by_address: dict[int, list[int]] = field(default_factory=dict)
    open_ids: set[int] = field(default_factory=set)
    objects: list[LiveObject] = field(default_factory=list)
    adapters: dict[type, ArrayAdapter | None] = field(default_factory=dict)
    # Objects that a state_dict() made for us must live until the walk ends: a freed array's
    # address may be given to the next one, which would then look like the same memory.
    keep_alive: list[Any] = field(default_factory=list)

    def run(self, state: Any) -> Walked:
        tree = self.visit(state, ())
        for adapter in {id(a): a for a in self.adapters.values() if a is not None}.values():
            adapter.annotate(self.objects)
        return Walked(tree, self.leaves)

    def visit(self, value: Any, path: Path) -> Tree:
        cls = type(value)
        if cls in _PLAIN_SET:
            return Value(value)
        if len(path) > MAX_DEPTH:
            raise UnsupportedState(f"{pointer(path)[:200]}: nested more than {MAX_DEPTH} levels deep")
        container = _CONTAINERS.get(cls)
        if container is not None:
            return self._guarded(container, value, path)
        if cls not in self.adapters:
            self.adapters[cls] = adapter_for(cls)
        adapter = self.adapters[cls]
        if adapter is not None:
            leaf = adapter.leaf(value, path)
            if leaf is not None:
                return self._reference(leaf)
            found = adapter.object_state(value)
            if found is not None:
                state, notes = found
                return self._guarded(lambda walk, value, at: walk.object(value, state, notes, at), value, path)
        return self._guarded(_other, value, path)

    def _guarded(self, visit: Callable[[_Walk, Any, Path], Tree], value: Any, path: Path) -> Tree:
        if id(value) in self.open_ids:
            raise UnsupportedState(f"{pointer(path)[:200]}: the {type(value).__name__} contains itself")
        self.open_ids.add(id(value))
        try:
            return visit(self, value, path)
        finally:
            self.open_ids.discard(id(value))

    def _reference(self, leaf: ArrayLeaf) -> ArrayRef:
        index = len(self.leaves)
        if leaf.address is not None:
            neighbours = self.by_address.get(leaf.address)
            if neighbours is None:
                self.by_address[leaf.address] = [index]
            else:
                # The same first element: the same array, or another view that begins there.
                key = leaf.adapter.memory_key(leaf.source)
                for other in neighbours:
                    known = self.leaves[other]
                    if known.adapter is leaf.adapter and known.adapter.memory_key(known.source) == key:
                        return ArrayRef(other)
                neighbours.append(index)
        if len(leaf.shape) > MAX_DIMENSIONS:
            raise UnsupportedState(
                f"{pointer(leaf.path)}: arrays of more than {MAX_DIMENSIONS} dimensions cannot be saved"
            )
        self.leaves.append(leaf)
        return ArrayRef(index)

    def object(self, value: Any, state: Any, notes: dict[str, Any], path: Path) -> Node:
        self.keep_alive.append(state)
        self.objects.append(LiveObject(path, value, notes))
        return Node("object", [self.visit(state, path)], type_name=type_name(value), extra=notes)

    def children(self, items: Iterable[tuple[Any, Any]], path: Path) -> list[Tree]:
        return [self.visit(value, (*path, key)) for key, value in items]


def _check_key(key: Any, path: Path) -> None:
    if type(key) is tuple:
        for part in key:
            _check_key(part, path)
    elif type(key) is str:
        try:
            key.encode()
        except UnicodeEncodeError:
            raise UnsupportedState(f"{pointer(path)}: the key {key!r} is not valid Unicode text") from None
    elif type(key) not in (int, bool, float, type(None)):
        raise UnsupportedState(
            f"{pointer(path)}: a key of type {type(key).__name__} ({key!r}) cannot be saved; "
            "keys are str, int, bool, float, None or tuples of these"
        )


def _mapping(kind: str, extra: Callable[[Any], dict[str, Any] | None] = lambda _: None) -> Callable[..., Tree]:
    def visit(walk: _Walk, value: Any, path: Path) -> Tree:
        items = list(value.items())
        for key, _ in items:
            if type(key) is not str or not key.isascii():
                _check_key(key, path)
        return Node(kind, walk.children(items, path), keys=[key for key, _ in items], extra=extra(value))

    return visit


def _sequence(kind: str, extra: Callable[[Any], dict[str, Any] | None] = lambda _: None) -> Callable[..., Tree]:
    def visit(walk: _Walk, value: Any, path: Path) -> Tree:
        return Node(kind, walk.children(enumerate(list(value)), path), extra=extra(value))

    return visit


def _set(kind: str) -> Callable[..., Tree]:
    def visit(walk: _Walk, value: Any, path: Path) -> Tree:
        # Sorted, so that equal sets have equal trees whatever the order of their hashes.
        ordered = sorted(value, key=lambda item: (type(item).__name__, repr(item)))
        children = walk.children(enumerate(ordered), path)
        if not all(map(is_hashable, children)):
            raise UnsupportedState(
                f"{pointer(path) or '/'}: a {kind} whose members are arrays or objects cannot be saved; save a list"
            )
        return Node(kind, children)

    return visit


def is_hashable(tree: Tree) -> bool:
    """Whether the plain form of a place can be a member of a set."""
    if isinstance(tree, Node):
        return tree.kind in ("tuple", "namedtuple", "frozenset") and all(map(is_hashable, tree.children))
    return isinstance(tree, Value)


def _factory(value: defaultdict[Any, Any]) -> dict[str, Any]:
    factory = value.default_factory
    return {"factory": None if factory is None else getattr(factory, "__qualname__", repr(factory))}


def _bytearray(walk: _Walk, value: bytearray, path: Path) -> Tree:
    return Value(bytes(value))


_CONTAINERS: dict[type, Callable[[_Walk, Any, Path], Tree]] = {
    dict: _mapping("dict"),
    OrderedDict: _mapping("ordereddict"),
    defaultdict: _mapping("defaultdict", _factory),
    Counter: _mapping("counter"),
    list: _sequence("list"),
    tuple: _sequence("tuple"),
    deque: _sequence("deque", lambda value: {"maxlen": value.maxlen}),
    set: _set("set"),
    frozenset: _set("frozenset"),
    bytearray: _bytearray,
}


def _other(walk: _Walk, value: Any, path: Path) -> Tree:
    """What is known by what it can do, not by its exact class."""
    if isinstance(value, enum.Enum):
        return Value(value)
    if isinstance(value, np.generic):
        return Value(value)
    if isinstance(value, pathlib.PurePath):
        return Value(value)
    if is_named_tuple(value):
        children = walk.children(zip(value._fields, value, strict=True), path)
        return Node("namedtuple", children, keys=list(value._fields), type_name=type_name(value))
    if is_stateful(value):
        return walk.object(value, value.state_dict(), {}, path)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        names = [f.name for f in dataclasses.fields(value)]
        children = walk.children(((name, getattr(value, name)) for name in names), path)
        return Node("dataclass", children, keys=names, type_name=type_name(value))
    raise UnsupportedState(
        f"{pointer(path) or '/'}: a value of type {type_name(value)} cannot be saved. Nothing was written. "
        "Save plain values and arrays, or give the object state_dict() and load_state_dict()"
    )


def named_leaves(tree: Tree) -> Iterator[tuple[Path, int]]:
    """Every place in the tree that refers to an array: its path and the array's number, in order."""
    stack: list[tuple[Path, Tree]] = [((), tree)]
    while stack:
        path, node = stack.pop()
        if isinstance(node, ArrayRef):
            yield path, node.index
        elif isinstance(node, Node):
            if node.kind == "object":
                stack.append((path, node.children[0]))
                continue
            keys = node.keys if node.keys is not None else range(len(node.children))
            places = [((*path, key), child) for key, child in zip(keys, node.children, strict=True)]
            stack.extend(reversed(places))
