"""The tree that a state becomes: what of it is written into the manifest."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

Path = tuple[Any, ...]
"""Keys from the root of the state down to a place in it."""

MAX_DEPTH = 128
"""Nesting that a state may have. Far above real states, below Python's own recursion limit."""


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


def pointer(path: Path) -> str:
    """A path as an RFC 6901 JSON pointer: ``("a", "b/c", 0)`` is ``/a/b~1c/0``."""
    return "".join("/" + str(key).replace("~", "~0").replace("/", "~1") for key in path)


def type_name(value: Any) -> str:
    """The class of a value, as ``package.module:Class``."""
    return f"{type(value).__module__}:{type(value).__qualname__}"


def is_hashable(tree: Tree) -> bool:
    """Whether the plain form of a place can be a member of a set."""
    if isinstance(tree, Node):
        return tree.kind in ("tuple", "namedtuple", "frozenset") and all(map(is_hashable, tree.children))
    return isinstance(tree, Value)


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
