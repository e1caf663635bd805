"""Fit a saved tree to the state that it should fill.

Matching reads nothing and changes nothing: it collects every difference at once, and where the
bytes of each array should go. What it returns is a function that puts the state together when the
bytes are there.
"""

from __future__ import annotations

import contextlib
import dataclasses
import difflib
import enum
import functools
import pathlib
from collections import Counter, defaultdict, deque
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import numpy as np

from midstride.adapters import ArrayAdapter, LiveObject, Report, adapter_for
from midstride.errors import UnsupportedState
from midstride.format.manifest import Manifest
from midstride.format.values import StoredEnum
from midstride.restore.classes import Classes, enum_member, likenesses, needs_classes, typed_key, with_fields
from midstride.restore.fill import ArrayFiller, Build, Fill, report_difference
from midstride.restore.plain import plain_container, plain_value
from midstride.restore.select import Index
from midstride.state import Like, is_named_tuple, is_stateful
from midstride.tree import MAPPING_KINDS, ArrayRef, Node, Path, Tree, Value, pointer, type_name

__all__ = ["ANYTHING", "Fill", "Matcher"]

ANYTHING = Like(None)
"""The template of a place that takes whatever was saved, in its plain form."""


class Matcher:
    """Matches one checkpoint's tree with one template."""

    def __init__(self, manifest: Manifest, report: Report, *, cast: bool, parts: Mapping[int, Index]) -> None:
        """``parts``: arrays of which only a part is wanted."""
        self._report = report
        # Below an object, arrays without a template come back in the library they were saved from.
        self._native = False
        # In the state of an object, what no value tells the class of comes in its plain form, with a warning.
        self._in_object = False
        self._plain_in_objects: list[str] = []
        self._fill = Fill()
        self._arrays = ArrayFiller(manifest.arrays, self._fill, report, cast=cast, parts=parts)
        self._objects: list[LiveObject] = []
        self._alive: list[Any] = []

    def match(self, template: Any, tree: Tree, whole: Any = None) -> Fill:
        """Differences go to the report; the fill is of use only if there are no problems.

        ``whole`` is the state that the template is a part of: its modules name parameters.

        What is compared: names, the kinds of containers, the shapes and dtypes of arrays, the classes
        of values. A number comes back as it was saved, whatever number the template has: nothing is
        converted, and a rate that began as 1 is 0.1 after a while.

        Not compared: a place where the template has None; a number, text or bytes where the checkpoint
        has None; the content of an empty container; members of a list of values that has another
        length; new keys of a ``defaultdict`` or ``Counter``.
        """
        self._collect_objects(template if whole is None else whole, ())
        self._fill.build = self._visit(template, tree, (), in_place=False)
        if lost := self._plain_in_objects:
            self._report.warnings.append(
                f"nothing in the state tells the classes of {len(lost)} values in the states of objects, which get "
                f"their plain forms: {', '.join(lost[:3])}{', ...' if lost[3:] else ''} (all are in types)"
            )
        return self._fill

    def _collect_objects(self, template: Any, path: Path) -> None:
        if isinstance(template, dict):
            for key, value in template.items():
                self._collect_objects(value, (*path, key))
        elif isinstance(template, (list, tuple, deque)):
            for number, value in enumerate(template):
                self._collect_objects(value, (*path, number))
        elif is_stateful(template) or _is_special(adapter_for(type(template)), template):
            self._objects.append(LiveObject(path, template, {}))
        elif dataclasses.is_dataclass(template) and not isinstance(template, type):
            for f in dataclasses.fields(template):
                self._collect_objects(getattr(template, f.name, None), (*path, f.name))

    # One place.

    def _visit(self, template: Any, tree: Tree, path: Path, *, in_place: bool) -> Build:
        if template is None:
            template = ANYTHING
        if isinstance(template, Like):
            return self._anything(tree, path, template.value, Classes(template.value))
        adapter = adapter_for(type(template))
        if adapter is not None:
            try:
                leaf = adapter.leaf(template, path)
            except UnsupportedState as error:
                self._report.problems.append(str(error))
                return lambda: None
            if leaf is not None:
                if isinstance(tree, ArrayRef):
                    return self._arrays.like(adapter, template, leaf, tree.index, path, in_place=in_place)
                return self._wrong(path, f"holds {_what(tree)}", f"an array {leaf.dtype}{list(leaf.shape)}")
        if is_stateful(template) or _is_special(adapter, template):
            return self._object(adapter, template, tree, path)
        if isinstance(template, (dict, list, tuple, deque, set, frozenset)):
            return self._container(template, tree, path, in_place=in_place)
        if dataclasses.is_dataclass(template) and not isinstance(template, type):
            return self._dataclass(template, tree, path)
        return self._value(template, tree, path)

    def _value(self, template: Any, tree: Tree, path: Path) -> Build:
        if not isinstance(tree, Value):
            return self._wrong(path, f"holds {_what(tree)}", type_name(template))
        value = tree.value
        if type(value) is type(template):
            return lambda: value
        if isinstance(template, enum.Enum):
            member = enum_member(type(template), value)
            if member is None:
                return self._wrong(path, f"holds {_what(tree)}", f"a member of {type_name(template)}")
            return lambda: member
        if value is None:
            return lambda: None
        if _is_number(template):
            return (
                (lambda: value) if _is_number(value) else self._wrong(path, f"holds {_what(tree)}", type_name(template))
            )
        if isinstance(template, bytearray) and type(value) is bytes:
            return lambda: bytearray(value)
        if isinstance(template, pathlib.PurePath) and isinstance(value, pathlib.PurePath):
            return lambda: type(template)(value)
        if _is_number(template) or isinstance(template, (str, bytes, bytearray, pathlib.PurePath)):
            return self._wrong(path, f"holds {_what(tree)}", type_name(template))
        return lambda: plain_value(value)

    def _object(self, adapter: ArrayAdapter | None, template: Any, tree: Tree, path: Path) -> Build:
        if isinstance(tree, Node) and tree.kind == "object":
            saved = tree
        elif isinstance(tree, Node):  # saved as the object's state_dict() rather than the object
            saved = Node("object", [tree])
        else:
            return self._wrong(path, f"holds {_what(tree)}", f"the state of a {type_name(template)}")
        special = _is_special(adapter, template)
        inner, expected = saved.children[0], None
        if special and adapter is not None:
            inner, expected = adapter.fit(template, saved, self._objects, self._report)
            self._alive.append(expected)
        if expected is None:
            expected = Like(self._present_state(template, inner, path))
        with self._state_of_object(native=True):
            state = self._visit(expected, inner, path, in_place=True)
        strict = self._report.strict

        def load() -> None:
            if special and adapter is not None:
                adapter.load(template, state(), saved, strict)
            else:
                template.load_state_dict(state())

        (self._fill.last_loads if getattr(template, "restore_last", False) else self._fill.loads).append(load)
        return lambda: template

    @contextlib.contextmanager
    def _state_of_object(self, *, native: bool) -> Iterator[None]:
        before = self._native, self._in_object
        self._native, self._in_object = native or self._native, True
        try:
            yield
        finally:
            self._native, self._in_object = before

    def _present_state(self, template: Any, saved: Tree, path: Path) -> Any:
        """An object's state as it is now, for the classes in it; None where nothing saved has need of them.

        Not asked for without need: to answer, a loader may start its workers.
        """
        if not needs_classes(saved):
            return None
        try:
            return template.state_dict()
        except Exception as error:  # it may have none before it is loaded
            self._report.warnings.append(
                f"{pointer(path) or '/'}: the object could not tell the classes in its state ({error!r})"
            )
            return None

    # Containers.

    def _container(self, template: Any, tree: Tree, path: Path, *, in_place: bool) -> Build:
        if isinstance(template, dict) and isinstance(tree, Node) and tree.kind == "object":
            with self._state_of_object(native=False):  # saved as an object, wanted as its state_dict()
                return self._container(template, tree.children[0], path, in_place=in_place)
        kind = _kind(template)
        if not isinstance(tree, Node) or not _same_family(tree.kind, kind):
            return self._wrong(path, f"holds {_what(tree)}", f"a {type(template).__name__}")
        if isinstance(template, dict):
            return self._mapping(template, tree, path, in_place=in_place)
        if is_named_tuple(template) and tree.keys != list(template._fields):
            return self._wrong(path, f"has the fields {tree.keys}", f"{list(template._fields)}")
        other_length = len(template) != len(tree.children)
        if kind in ("set", "frozenset") or not template or (other_length and _no_arrays(template)):
            return self._members(template, tree, path)
        if other_length:
            return self._wrong(path, f"has {len(tree.children)} items", str(len(template)))
        keys: Iterable[Any] = template._fields if kind == "namedtuple" else range(len(template))
        builds = [
            self._visit(part, child, (*path, key), in_place=in_place)
            for key, part, child in zip(keys, template, tree.children, strict=True)
        ]
        return lambda: _rebuild(template, [build() for build in builds])

    def _members(self, template: Any, tree: Node, path: Path) -> Build:
        """The saved members, whatever they are, in the classes of the template's; of an empty one in plain forms."""
        classes = Classes(template, required=bool(template) and not self._in_object)
        builds = self._children(tree, path, template, classes)
        if _members_lost(tree, builds):
            self._report.problems.append(
                f"{pointer(path) or '/'}: members of the saved {tree.kind} are equal in their plain forms, and one "
                "would be lost. Restore into a state that has members of their classes, or leave it out with only="
            )
        return lambda: _rebuild(template, [build() for build in builds])

    def _mapping(self, template: dict[Any, Any], tree: Node, path: Path, *, in_place: bool) -> Build:
        saved = {typed_key(key): child for key, child in zip(tree.keys or [], tree.children, strict=True)}
        free = not template or isinstance(template, (Counter, defaultdict))
        builds: dict[Any, Build] = {}
        wanted = {typed_key(key) for key in template}
        missing = [key for key in template if typed_key(key) not in saved]
        unexpected = [key for key in tree.keys or [] if typed_key(key) not in wanted]
        if not free:
            self._report_keys(path, missing, unexpected, template)
        classes = Classes(template)
        for key in tree.keys or [] if free else template:
            child = saved.get(typed_key(key))
            if child is None:
                continue
            if typed_key(key) in wanted:
                builds[key] = self._visit(template[key], child, (*path, key), in_place=in_place)
            else:
                builds[key] = self._anything(child, (*path, key), None, classes)
        if not free and not builds and template and saved:
            self._report.problems.append(f"{pointer(path) or '/'}: nothing in the checkpoint matches the state")
        kept = {} if free or in_place else {key: template[key] for key in missing}
        return lambda: _rebuild(template, {**{key: build() for key, build in builds.items()}, **kept})

    def _report_keys(self, path: Path, missing: list[Any], unexpected: list[Any], template: dict[Any, Any]) -> None:
        for key in missing:
            near = difflib.get_close_matches(str(key), [str(k) for k in unexpected], 2)
            hint = f" (the checkpoint has {', '.join(near)})" if near else ""
            self._report.unmatched(f"{pointer((*path, key))}: is not in the checkpoint{hint}")
        for key in unexpected:
            near = difflib.get_close_matches(str(key), [str(k) for k in template], 2)
            hint = f" (it has {', '.join(near)})" if near else ""
            self._report.unmatched(f"{pointer((*path, key))}: is in the checkpoint, not in the state{hint}")

    def _dataclass(self, template: Any, tree: Tree, path: Path) -> Build:
        names = [f.name for f in dataclasses.fields(template)]
        if not isinstance(tree, Node) or tree.kind != "dataclass":
            return self._wrong(path, f"holds {_what(tree)}", type_name(template))
        if not names and tree.keys:
            return self._wrong(path, f"has the fields {tree.keys}", "none")
        content = {name: getattr(template, name, None) for name in names}
        fields = self._mapping(content, tree, path, in_place=False)

        def build() -> Any:
            content = fields()
            return with_fields(template, list(content), list(content.values()))

        return build

    # Places that take whatever was saved.

    def _anything(self, tree: Tree, path: Path, like: Any, classes: Classes) -> Build:
        """As it was saved; in the classes that ``like``, the value now at this place, or ``classes`` tell."""
        if isinstance(tree, ArrayRef):
            return self._arrays.free(tree.index, path, native=self._native)
        if isinstance(tree, Value):
            value = classes.value(tree.value, like)
            if isinstance(value, StoredEnum):
                self._plain_form(path, tree, f"{value.type_name}.{value.name}", classes)
            return lambda: plain_value(value)
        if tree.kind == "object":
            self._note_class(path, tree.type_name)
            inner = tree.children[0]
            present = self._present_state(like, inner, path) if is_stateful(like) else like
            return self._anything(inner, path, present, classes)
        builds = self._children(tree, path, like, classes)
        make = classes.container(tree, like)
        if make is None:
            self._plain_form(path, tree, tree.type_name, classes)
            make = functools.partial(plain_container, tree)
        elif _members_lost(tree, builds):
            self._note_class(path, f"builtins:{tree.kind}")
            make = tuple
        return lambda: make([build() for build in builds])

    def _children(self, tree: Node, path: Path, like: Any, classes: Classes) -> list[Build]:
        keys = tree.keys if tree.keys is not None else range(len(tree.children))
        return [
            self._anything(child, (*path, key), part, classes)
            for key, child, part in zip(keys, tree.children, likenesses(tree, like), strict=True)
        ]

    def _plain_form(self, path: Path, tree: Tree, name: str | None, classes: Classes) -> None:
        if classes.required:
            self._report.problems.append(
                f"{pointer(path) or '/'}: the checkpoint has {_what(tree)}, and the state's container has no member of "
                "that class to tell it by (left empty, it takes plain values)"
            )
        self._note_class(path, name)

    def _note_class(self, path: Path, name: str | None) -> None:
        if name is not None:
            self._fill.types[pointer(path)] = name
            if self._in_object:
                self._plain_in_objects.append(f"{pointer(path)} ({name})")

    def _wrong(self, path: Path, has: str, wanted: str) -> Build:
        report_difference(self._report, path, has, wanted)
        return lambda: None


def _is_special(adapter: ArrayAdapter | None, value: Any) -> bool:
    """Whether an object's state is its adapter's business; it need not have ``load_state_dict``."""
    return adapter is not None and adapter.is_object(value)


def _what(tree: Tree) -> str:
    if isinstance(tree, ArrayRef):
        return "an array"
    if isinstance(tree, Value):
        if isinstance(tree.value, StoredEnum):
            return f"the member {tree.value.type_name}.{tree.value.name}"
        return f"a {type(tree.value).__name__}"
    return f"a {tree.kind}" + (f" ({tree.type_name})" if tree.type_name else "")


def _kind(template: Any) -> str:
    if is_named_tuple(template):
        return "namedtuple"
    return type(template).__name__.lower()


def _same_family(saved: str, wanted: str) -> bool:
    return saved == wanted or (saved in MAPPING_KINDS and wanted in MAPPING_KINDS)


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float, complex, np.generic))


def _no_arrays(template: Iterable[Any]) -> bool:
    return all(type(item) in (int, float, str, bool, bytes, complex, type(None)) for item in template)


def _members_lost(tree: Node, builds: list[Build]) -> bool:
    """Whether a set would have fewer members than were saved: without their classes, some are equal."""
    if tree.kind not in ("set", "frozenset"):
        return False
    return len({build() for build in builds}) < len(builds)  # no arrays are among them: nothing to wait for


def _rebuild(template: Any, content: Any) -> Any:
    if is_named_tuple(template):
        return tuple.__new__(type(template), content)
    if isinstance(template, defaultdict):
        return defaultdict(template.default_factory, content)
    if isinstance(template, deque):
        return deque(content, template.maxlen)
    return type(template)(content)
