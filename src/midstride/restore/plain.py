"""States without a template: plain containers.

A named tuple is a tuple, a dataclass and an object with a state are dicts, an enum's member is its
value; a set some members of which are then equal is a tuple of them all. No class is imported by a name from a file.
"""

from __future__ import annotations

from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable
from typing import Any

from midstride.format.values import StoredEnum
from midstride.tree import Node

FACTORIES = {f.__name__: f for f in (int, float, str, list, dict, set, tuple, bool)}
"""The factories of a ``defaultdict`` that come back without a template; no other name is looked up."""


def plain_value(value: Any) -> Any:
    if type(value) is tuple:  # an enum's value may be one, of other enums too
        return tuple(map(plain_value, value))
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
