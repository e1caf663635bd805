"""Walk a training state into leaves: a tree of nodes, and the arrays that the tree refers to.

``walk`` reads the caller's containers, values and objects once, at one moment. What it returns
holds no reference to anything mutable of the caller's, except the arrays themselves
(``ArrayLeaf.source``), which ``save.capture`` copies next.
"""

from __future__ import annotations

import dataclasses
import enum
import pathlib
import reprlib
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeGuard

import numpy as np

from midstride.adapters import ArrayAdapter, ArrayLeaf, LiveObject, adapter_for
from midstride.errors import UnsupportedState
from midstride.tree import MAX_DEPTH, ArrayRef, Node, Path, Tree, Value, is_hashable, pointer, type_name

MAX_DIMENSIONS = 62
"""Of an array: what NumPy can hold, less what a stored form may add."""


MAX_KEY_BITS = 2048
"""Of an int that is a key. Names are made of keys, and Python makes decimal text of no int that is longer
than a limit, which can be set as low as 640 digits."""


@dataclass(frozen=True, slots=True)
class Like:
    """A template that takes whatever was saved; ``value`` only tells classes."""

    value: Any


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


def walk(state: Any) -> Walked:
    """Take a state apart. ``UnsupportedState`` names the path of the first value that cannot be saved."""
    return _Walk().run(state)


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
    elif type(key) is int:
        if key.bit_length() > MAX_KEY_BITS:
            raise UnsupportedState(f"{pointer(path)}: a key that is an int of over {MAX_KEY_BITS} bits cannot be saved")
    elif type(key) not in (bool, float, type(None)):
        raise UnsupportedState(
            f"{pointer(path)}: a key of type {type(key).__name__} ({reprlib.repr(key)}) cannot be saved; "
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
        children = walk.children(enumerate(list(value)), path)
        if not all(map(is_hashable, children)):
            raise UnsupportedState(
                f"{pointer(path) or '/'}: a {kind} whose members are arrays or objects cannot be saved; save a list"
            )
        # Sorted, so that equal sets have equal trees whatever the order of their hashes.
        return Node(kind, sorted(children, key=_rank))

    return visit


def _rank(member: Tree) -> str:
    if isinstance(member, Node):
        return f"{member.kind} {member.type_name} ({', '.join(map(_rank, member.children))})"
    value = member.value if isinstance(member, Value) else member
    if isinstance(value, enum.Enum):
        return f"{type_name(value)}.{value.name} {_rank(Value(value.value)) if value.name is None else ''}"
    # An int may have no decimal text.
    return f"{type_name(value)} {hex(value) if type(value) is int else repr(value)}"


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
        for name in names:
            if not hasattr(value, name):
                raise UnsupportedState(
                    f"{pointer((*path, name))}: a field of {type_name(value)} that has no value cannot be saved. "
                    "Nothing was written. Give it one, such as None"
                )
        if _has_items_besides(value, names):
            raise UnsupportedState(
                f"{pointer(path) or '/'}: {type_name(value)} is a dataclass and a container, and holds "
                "items that are not its fields. Nothing was written. Save its items and fields apart"
            )
        children = walk.children(((name, getattr(value, name)) for name in names), path)
        return Node("dataclass", children, keys=names, type_name=type_name(value))
    raise UnsupportedState(
        f"{pointer(path) or '/'}: a value of type {type_name(value)} cannot be saved. Nothing was written. "
        "Save plain values and arrays, or give the object state_dict() and load_state_dict()"
    )


def _has_items_besides(value: Any, names: list[str]) -> bool:
    if isinstance(value, dict):
        return not value.keys() <= set(names)
    return isinstance(value, list | tuple | set | frozenset | deque) and len(value) > 0
