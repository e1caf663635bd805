"""States without a template: plain containers, and a record of the classes that they stand for.

A named tuple is a tuple, a dataclass and an object with a state are dicts, an enum's member is its
value. No class is imported by a name from a file.
"""

from __future__ import annotations

from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable
from typing import Any

from midstride.format.values import StoredEnum
from midstride.tree import Node, Path, Tree, Value, pointer

FACTORIES = {f.__name__: f for f in (int, float, str, list, dict, set, tuple, bool)}
"""The factories of a ``defaultdict`` that come back without a template; no other name is looked up."""


def plain_value(value: Any) -> Any:
    return plain_value(value.value) if isinstance(value, StoredEnum) else value


def plain_container(tree: Node, children: list[Any]) -> Any:
    """Plain forms: a named tuple is a tuple, a dataclass and an object are dicts."""
    extra = tree.extra or {}
    if tree.keys is not None and tree.kind != "namedtuple":
        content = dict(zip(tree.keys, children, strict=True))
        if tree.kind == "ordereddict":
            return OrderedDict(content)
        if tree.kind == "counter":
            return Counter(content)
        if tree.kind == "defaultdict":
            return defaultdict(FACTORIES.get(str(extra.get("factory"))), content)
        return content
    if tree.kind == "deque":
        return deque(children, extra.get("maxlen"))
    makers: dict[str, Callable[[list[Any]], Any]] = {"list": list, "set": set, "frozenset": frozenset}
    return makers.get(tree.kind, tuple)(children)


def original_types(tree: Tree) -> dict[str, str]:
    """For each place whose class is not kept without a template: its path and the class it had."""
    found: dict[str, str] = {}
    stack: list[tuple[Path, Tree]] = [((), tree)]
    while stack:
        path, node = stack.pop()
        if isinstance(node, Value) and isinstance(node.value, StoredEnum):
            found[pointer(path)] = f"{node.value.type_name}.{node.value.name}"
        if not isinstance(node, Node):
            continue
        if node.type_name is not None:
            found[pointer(path)] = node.type_name
        keys = node.keys if node.keys is not None else range(len(node.children))
        prefixed = [path] if node.kind == "object" else [(*path, key) for key in keys]
        stack.extend(zip(prefixed, node.children, strict=True))
    return found
