"""The classes that a template has, given to what a checkpoint knows by name alone.

A checkpoint tells that a value was a member of ``train:Color``, or a named tuple ``train:Point``;
the class itself is taken from a value that the caller has. None is imported, none is made, and what
no value of the caller's tells is left to its plain form.
"""

from __future__ import annotations

import contextlib
import dataclasses
import enum
import functools
import pathlib
import types
from collections import defaultdict, deque
from collections.abc import Callable, Hashable
from typing import Any

import numpy as np

from midstride.errors import UnsupportedState
from midstride.format.values import StoredEnum
from midstride.restore.plain import FACTORIES, plain_container
from midstride.state import is_named_tuple, is_stateful, walk
from midstride.tree import MAPPING_KINDS, Node, Tree, Value, is_hashable, type_name


def needs_classes(tree: Tree) -> bool:
    """Whether there is something in a tree whose class the file alone does not give."""
    stack = [tree]
    while stack:
        node = stack.pop()
        if isinstance(node, Value):
            if isinstance(node.value, (StoredEnum, bytes, pathlib.PurePath)):
                return True
        elif isinstance(node, Node):
            if node.kind in ("namedtuple", "dataclass"):
                return True
            factory = (node.extra or {}).get("factory")
            if node.kind == "defaultdict" and factory is not None and factory not in FACTORIES:
                return True
            stack.extend(node.children)
    return False


class Classes:
    """The classes of all the values in a template, by the names that a checkpoint has for them.

    A class is given where its name is the recorded one; under another name (it may have moved to
    another module) only by the value that is *like* the saved one: at the same place, or of equal content.
    """

    def __init__(self, template: Any = None, *, required: bool = False) -> None:
        """``required``: what the template does not tell is a difference, and no reason for a plain form."""
        self.required = required
        self._template = template

    def value(self, saved: Any, like: Any) -> Any:
        """A saved value in its class; a ``StoredEnum`` is returned as it is where nothing tells its class."""
        if isinstance(saved, StoredEnum):
            example = self._example(saved.type_name, like, lambda value: enum_member(type(value), saved) is not None)
            return saved if example is None else enum_member(type(example), saved)
        if isinstance(saved, pathlib.PurePath):
            cls = type(like) if isinstance(like, pathlib.PurePath) else self._path_class
            return saved if cls is None else cls(saved)
        return bytearray(saved) if type(saved) is bytes and isinstance(like, bytearray) else saved

    def container(self, saved: Node, like: Any) -> Callable[[list[Any]], Any] | None:
        """What puts a saved container together in its class; None where nothing tells it."""
        if saved.kind == "namedtuple":
            example = self._example(saved.type_name, like, lambda value: _fits_tuple(value, saved.keys))
            return None if example is None else lambda children: tuple.__new__(type(example), children)
        if saved.kind == "dataclass":
            example = self._example(saved.type_name, like, lambda value: _fits_dataclass(value, saved.keys, like))
            return None if example is None else lambda children: with_fields(example, saved.keys or [], children)
        if saved.kind == "defaultdict" and isinstance(like, defaultdict):
            return lambda children: defaultdict(like.default_factory, zip(saved.keys or [], children, strict=True))
        return lambda children: plain_container(saved, children)

    def _example(self, name: str | None, like: Any, fits: Callable[[Any], bool]) -> Any:
        named = self._by_name.get(name or "", {})
        candidates = [like] if type_name(like) == name else []
        candidates += [*named.values()] if len(named) == 1 else []  # two classes of one name: no telling which
        return next((value for value in (*candidates, like) if fits(value)), None)

    @functools.cached_property
    def _by_name(self) -> dict[str, dict[type, Any]]:
        """Name -> the classes that have it, each with a value of it."""
        found: dict[str, dict[type, Any]] = {}
        stack, seen = [self._template], set()
        while stack:
            value = stack.pop()
            if is_stateful(value) or id(value) in seen:
                continue
            if isinstance(value, (enum.Enum, pathlib.PurePath)) or _field_names(value) is not None:
                found.setdefault(type_name(value), {}).setdefault(type(value), value)
            parts = _parts(value)
            if parts:
                seen.add(id(value))
                stack.extend(parts)
        return found

    @functools.cached_property
    def _path_class(self) -> type | None:
        classes = [cls for named in self._by_name.values() for cls in named if issubclass(cls, pathlib.PurePath)]
        return classes[0] if len(classes) == 1 else None


def enum_member(cls: type, saved: Any) -> enum.Enum | None:
    """The member of a class that was saved, or None: it is no enum, or has no such member.

    In a class of the recorded name, the member is known by its name (its value may have been changed since); in
    one of another name, which is perhaps the same after a move, by its name and value together.
    """
    if not isinstance(saved, StoredEnum) or not issubclass(cls, enum.Enum):
        return None
    member = cls.__members__.get(saved.name or "")
    if member is None and issubclass(cls, enum.Flag) and isinstance(saved.value, int):
        with contextlib.suppress(ValueError):  # several flags together, or none, are no members
            together = cls(saved.value)
            member = together if type_name(together) == saved.type_name or together.name == saved.name else None
    if member is None or type_name(member) == saved.type_name:
        return member
    return member if _content_of(member.value) == _content_of(saved.value) else None


def with_fields(example: Any, names: list[Any], values: list[Any]) -> Any:
    """A copy of a dataclass's instance with other content; neither its ``__new__`` nor its ``__copy__`` runs."""
    cls = type(example)
    builtin = next(base for base in cls.__mro__ if isinstance(vars(base).get("__new__"), types.BuiltinMethodType))
    result = builtin.__new__(cls)  # type: ignore[call-overload]
    # What it holds beside its fields: in its dict, and in slots; not what was computed from them and kept.
    besides = {name: value for name, value in getattr(example, "__dict__", {}).items() if not _is_cached(cls, name)}
    getattr(result, "__dict__", {}).update(besides)
    for slot in (s for base in cls.__mro__ for s in vars(base).values() if isinstance(s, types.MemberDescriptorType)):
        with contextlib.suppress(AttributeError):  # it is not set
            slot.__set__(result, slot.__get__(example, cls))
    for name, value in zip(names, values, strict=True):
        object.__setattr__(result, name, value)
    return result


def _is_cached(cls: type, name: str) -> bool:
    return any(isinstance(vars(base).get(name), functools.cached_property) for base in cls.__mro__)


def likenesses(saved: Node, like: Any) -> list[Any]:
    """For each child of a saved container the value that is at its place in ``like``, or None.

    The place of a set's member is its content.
    """
    if isinstance(like, (set, frozenset)) and saved.kind in ("set", "frozenset"):
        members = _by_content(like) if needs_classes(saved) else {}
        return [members.get(_content(child)) if members else None for child in saved.children]
    if isinstance(like, dict) and saved.kind in MAPPING_KINDS:
        values = {typed_key(key): value for key, value in like.items()}
        return [values.get(typed_key(key)) for key in saved.keys or []]
    if saved.keys is not None:
        fields = _field_names(like) or ()
        return [getattr(like, key, None) if key in fields else None for key in saved.keys]
    parts = list(like) if isinstance(like, (list, tuple, deque)) else []
    return [*parts, *[None] * len(saved.children)][: len(saved.children)]


def typed_key(key: Any) -> tuple[Any, ...]:
    """Keys that Python holds for equal (1, 1.0, True) are different keys here."""
    return (tuple(map(typed_key, key)),) if isinstance(key, tuple) else (type(key).__name__, repr(key))


def _field_names(value: Any) -> list[str] | None:
    """The fields of a named tuple or of a dataclass's instance; None for anything else."""
    if is_named_tuple(value):
        return list(value._fields)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return [field.name for field in dataclasses.fields(value)]
    return None


def _fits_tuple(value: Any, names: list[Any] | None) -> bool:
    return is_named_tuple(value) and _field_names(value) == names


def _fits_dataclass(value: Any, names: list[Any] | None, like: Any) -> bool:
    fields = None if is_named_tuple(value) else _field_names(value)
    # What another instance holds beside its fields belongs to that instance.
    return fields == names and (value is like or set(getattr(value, "__dict__", ())) <= set(fields or ()))


def _parts(value: Any) -> list[Any]:
    if isinstance(value, dict):
        return list(value.values())
    if isinstance(value, (list, tuple, deque, set, frozenset)):
        return list(value)
    return [getattr(value, name, None) for name in _field_names(value) or ()]


def _by_content(members: set[Any] | frozenset[Any]) -> dict[Hashable, Any]:
    found = {}
    for member in members:
        with contextlib.suppress(UnsupportedState):  # what cannot be saved was not
            tree = walk(member).tree
            if is_hashable(tree):
                found[_content(tree)] = member
    return found


def _content(tree: Tree) -> Hashable:
    """Equal for members of sets that are the same but for the names of their classes."""
    if isinstance(tree, Node):
        children = map(_content, tree.children)
        fields = tuple(tree.keys) if tree.keys is not None else None
        return (tree.kind, fields, frozenset(children) if tree.kind == "frozenset" else tuple(children))
    return _content_of(tree.value) if isinstance(tree, Value) else None


def _content_of(value: Any) -> Hashable:
    if isinstance(value, (enum.Enum, StoredEnum)):
        return ("enum", value.name, _content_of(value.value))
    if isinstance(value, tuple):
        return ("tuple", tuple(map(_content_of, value)))
    if isinstance(value, pathlib.PurePath):
        return ("path", str(value))
    if isinstance(value, np.generic):
        return (value.dtype.name, value.tobytes())
    return (type(value).__name__, value if type(value) is int else repr(value))
