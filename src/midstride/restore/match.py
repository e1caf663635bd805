"""Fit a saved tree to the state that it should fill.

Matching reads nothing and changes nothing: it collects every difference at once, and where the
bytes of each array should go. What it returns is a function that puts the state together when the
bytes are there.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import difflib
import enum
import pathlib
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from midstride.adapters import ArrayAdapter, ArrayLeaf, Destination, LiveObject, Report, adapter_for, adapter_of_lib
from midstride.dtypes import DTYPES, array_nbytes
from midstride.errors import StateMismatch, UnsupportedState
from midstride.format.manifest import Manifest
from midstride.format.values import StoredEnum
from midstride.restore.plain import plain_container, plain_value
from midstride.restore.select import Index
from midstride.state import is_named_tuple, is_stateful
from midstride.tree import MAPPING_KINDS, ArrayRef, Node, Path, Tree, Value, pointer, type_name

Build = Callable[[], Any]
"""Called when all bytes are there: gives the value of one place of the state."""


class _Anything:
    """The template of a place that takes whatever was saved."""


ANYTHING = _Anything()


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

    @property
    def in_place(self) -> bool:
        return any(destination.in_place for _, destination, _ in self.destinations)


class Matcher:
    """Matches one checkpoint's tree with one template."""

    def __init__(self, manifest: Manifest, report: Report, *, cast: bool, parts: Mapping[int, Index]) -> None:
        """``parts``: arrays of which only a part is wanted."""
        self._arrays = manifest.arrays
        self._report = report
        self._cast = cast
        self._parts = parts
        # Below an object, arrays without a template come back in the library they were saved from.
        self._native = False
        self._fill = Fill()
        self._objects: list[LiveObject] = []
        self._whole: dict[tuple[int, bool], Build] = {}
        self._tied: dict[tuple[int, tuple[Any, ...]], Build] = {}
        self._by_memory: dict[tuple[Any, ...], int] = {}
        self._alive: list[Any] = []

    def match(self, template: Any, tree: Tree, whole: Any = None) -> Fill:
        """Differences go to the report; the fill is of use only if there are no problems.

        ``whole`` is the state that the template is a part of: its modules name parameters.
        """
        self._collect_objects(template if whole is None else whole, ())
        self._fill.build = self._visit(template, tree, (), in_place=False)
        return self._fill

    def _collect_objects(self, template: Any, path: Path) -> None:
        if isinstance(template, dict):
            for key, value in template.items():
                self._collect_objects(value, (*path, key))
        elif isinstance(template, (list, tuple, deque)):
            for number, value in enumerate(template):
                self._collect_objects(value, (*path, number))
        elif is_stateful(template):
            self._objects.append(LiveObject(path, template, {}))
        elif dataclasses.is_dataclass(template) and not isinstance(template, type):
            for f in dataclasses.fields(template):
                self._collect_objects(getattr(template, f.name), (*path, f.name))

    # One place.

    def _visit(self, template: Any, tree: Tree, path: Path, *, in_place: bool) -> Build:
        if template is ANYTHING or template is None:
            return self._plain(tree, path)
        adapter = adapter_for(type(template))
        if adapter is not None:
            try:
                leaf = adapter.leaf(template, path)
            except UnsupportedState as error:
                self._report.problems.append(str(error))
                return lambda: None
            if leaf is not None:
                return self._array(adapter, template, leaf, tree, path, in_place=in_place)
        if is_stateful(template):
            return self._object(adapter, template, tree, path)
        if isinstance(template, (dict, list, tuple, deque, set, frozenset)):
            return self._container(template, tree, path, in_place=in_place)
        if dataclasses.is_dataclass(template) and not isinstance(template, type):
            return self._dataclass(template, tree, path)
        return self._value(template, tree, path)

    def _value(self, template: Any, tree: Tree, path: Path) -> Build:
        if not isinstance(tree, Value):
            self._wrong(path, f"holds {_what(tree)}", type_name(template))
            return lambda: None
        value = tree.value
        if isinstance(template, enum.Enum):
            return self._enum(type(template), value, path)
        numbers = (int, float, complex, bool)
        if (isinstance(template, numbers) and not isinstance(value, (*numbers, np.generic)) and value is not None) or (
            isinstance(template, (str, bytes)) and type(value) is not type(template) and value is not None
        ):
            self._wrong(path, f"holds {_what(tree)}", type_name(template))
        elif isinstance(template, np.generic) and isinstance(value, np.generic) and template.dtype != value.dtype:
            self._wrong(path, f"has dtype {value.dtype}", str(template.dtype))
        if isinstance(template, pathlib.PurePath) and isinstance(value, pathlib.PurePath):
            return lambda: type(template)(value)
        return lambda: plain_value(value)

    def _enum(self, cls: type[enum.Enum], value: Any, path: Path) -> Build:
        if isinstance(value, StoredEnum) and value.name in cls.__members__:
            return lambda: cls[str(value.name)]
        if isinstance(value, StoredEnum) and issubclass(cls, enum.Flag) and isinstance(value.value, int):
            with contextlib.suppress(ValueError):  # several flags together, or none, have a value and no name
                flags = cls(value.value)
                return lambda: flags
        self._wrong(path, f"holds {getattr(value, 'name', value)!r}", f"a member of {cls.__qualname__}")
        return lambda: None

    def _array(
        self, adapter: ArrayAdapter, template: Any, leaf: ArrayLeaf, tree: Tree, path: Path, *, in_place: bool
    ) -> Build:
        if not isinstance(tree, ArrayRef):
            self._wrong(path, f"holds {_what(tree)}", f"an array {leaf.dtype}{list(leaf.shape)}")
            return lambda: None
        saved = self._arrays[tree.index]
        if saved.shape != leaf.shape:
            self._wrong(path, f"has shape {list(saved.shape)}", f"{list(leaf.shape)}")
            return lambda: None
        if saved.dtype != leaf.dtype:
            return self._cast_array(adapter, template, leaf, tree.index, path, in_place=in_place)
        if not in_place:
            return self._new_like(adapter, template, leaf, tree.index)
        return self._in_place(adapter, template, leaf, tree.index, path)

    def _new_like(self, adapter: ArrayAdapter, template: Any, leaf: ArrayLeaf, index: int) -> Build:
        """A new array; one for all places of the template that are one memory and were one array."""
        if leaf.address is None:
            return self._destination(index, adapter.new_array(leaf.dtype, leaf.shape, template))
        key = (index, adapter.memory_key(template))
        if key not in self._tied:
            self._tied[key] = _once(self._destination(index, adapter.new_array(leaf.dtype, leaf.shape, template)))
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
        if not self._cast or _number_kind(saved) != _number_kind(leaf.dtype):
            hint = " (cast=True converts it)" if _number_kind(saved) == _number_kind(leaf.dtype) else ""
            self._wrong(path, f"has dtype {saved}", leaf.dtype + hint)
            return lambda: None
        destination = adapter.new_array(saved, leaf.shape)
        build = self._destination(index, destination)

        def convert() -> Any:
            array = build()
            if "int" in saved and not _ints_fit(destination.buffer, saved, leaf.dtype):
                raise StateMismatch(f"{pointer(path)}: {saved} values of the checkpoint do not fit {leaf.dtype}")
            return adapter.convert(array, template, in_place=in_place)

        return convert

    def _object(self, adapter: ArrayAdapter | None, template: Any, tree: Tree, path: Path) -> Build:
        if isinstance(tree, Node) and tree.kind == "object":
            saved = tree
        elif isinstance(tree, Node):  # saved as the object's state_dict() rather than the object
            saved = Node("object", [tree])
        else:
            self._wrong(path, f"holds {_what(tree)}", f"the state of a {type_name(template)}")
            return lambda: None
        special = adapter is not None and adapter.is_object(template)
        if special and adapter is not None:
            inner, expected = adapter.fit(template, saved, self._objects, self._report)
            self._alive.append(expected)
        else:
            inner, expected = saved.children[0], None
        native, self._native = self._native, True
        state = self._visit(ANYTHING if expected is None else expected, inner, path, in_place=expected is not None)
        self._native = native
        strict = self._report.strict

        def load() -> None:
            if special and adapter is not None:
                adapter.load(template, state(), saved, strict)
            else:
                template.load_state_dict(state())

        (self._fill.last_loads if getattr(template, "restore_last", False) else self._fill.loads).append(load)
        return lambda: template

    def _container(self, template: Any, tree: Tree, path: Path, *, in_place: bool) -> Build:
        if isinstance(tree, Node) and tree.kind == "object" and isinstance(template, dict):
            tree = tree.children[0]  # saved as an object, wanted as its state_dict()
        kind = _kind(template)
        if not isinstance(tree, Node) or not _same_family(tree.kind, kind):
            self._wrong(path, f"holds {_what(tree)}", f"a {type(template).__name__}")
            return lambda: None
        if isinstance(template, dict):
            return self._mapping(template, tree, path, in_place=in_place)
        if is_named_tuple(template) and tree.keys != list(template._fields):
            self._wrong(path, f"has the fields {tree.keys}", f"{list(template._fields)}")
            return lambda: None
        if (
            kind in ("set", "frozenset")
            or not template
            or (len(template) != len(tree.children) and _no_arrays(template))
        ):
            plain = [self._plain(child, (*path, n)) for n, child in enumerate(tree.children)]
            return lambda: _rebuild(template, [build() for build in plain])
        if len(template) != len(tree.children):
            self._wrong(path, f"has {len(tree.children)} items", str(len(template)))
            return lambda: None
        keys: Iterable[Any] = template._fields if kind == "namedtuple" else range(len(template))
        builds = [
            self._visit(part, child, (*path, key), in_place=in_place)
            for key, part, child in zip(keys, template, tree.children, strict=True)
        ]
        return lambda: _rebuild(template, [build() for build in builds])

    def _mapping(self, template: dict[Any, Any], tree: Node, path: Path, *, in_place: bool) -> Build:
        saved = {_typed(key): child for key, child in zip(tree.keys or [], tree.children, strict=True)}
        free = not template or isinstance(template, (Counter, defaultdict))
        builds: dict[Any, Build] = {}
        wanted = {_typed(key) for key in template}
        missing = [key for key in template if _typed(key) not in saved]
        unexpected = [key for key in tree.keys or [] if _typed(key) not in wanted]
        if not free:
            self._report_keys(path, missing, unexpected, template)
        order = tree.keys or [] if free else template
        for key in order:
            if _typed(key) not in saved:
                continue
            part = template.get(key, ANYTHING)
            builds[key] = self._visit(part, saved[_typed(key)], (*path, key), in_place=in_place)
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
            self._wrong(path, f"holds {_what(tree)}", type_name(template))
            return lambda: None
        fields = self._mapping({name: getattr(template, name) for name in names}, tree, path, in_place=False)

        def build() -> Any:
            result = copy.copy(template)
            for name, value in fields().items():
                object.__setattr__(result, name, value)
            return result

        return build

    # Without a template.

    def _plain(self, tree: Tree, path: Path) -> Build:
        if isinstance(tree, Value):
            value = tree.value
            return lambda: plain_value(value)
        if isinstance(tree, ArrayRef):
            return self._plain_array(tree.index)
        if tree.kind == "object":
            return self._plain(tree.children[0], path)
        keys = tree.keys if tree.keys is not None else range(len(tree.children))
        builds = [self._plain(child, (*path, key)) for key, child in zip(keys, tree.children, strict=True)]
        return lambda: plain_container(tree, [build() for build in builds])

    def _plain_array(self, index: int) -> Build:
        saved = self._arrays[index]
        key = (index, self._native)
        if key not in self._whole:
            adapter = adapter_of_lib(saved.lib if self._native else "numpy")
            if adapter is None:
                raise UnsupportedState(f"arrays of {saved.lib} are not known to this Midstride")
            # Places that were one array are one array again.
            self._whole[key] = _once(self._part(adapter, index) if index in self._parts else self._all(adapter, index))
        return self._whole[key]

    def _all(self, adapter: ArrayAdapter, index: int) -> Build:
        saved = self._arrays[index]
        return self._destination(index, adapter.new_array(saved.dtype, saved.shape))

    def _part(self, adapter: ArrayAdapter, index: int) -> Build:
        """Rows are read alone; of the other dimensions everything is read and then cut."""
        saved, part = self._arrays[index], self._parts[index]
        if len(part) > len(saved.shape):
            raise TypeError(f"only= has {len(part)} slices for an array of {len(saved.shape)} dimensions")
        start, stop, step = part[0].indices(saved.shape[0])
        rows = max(0, stop - start)
        row_bytes = array_nbytes(saved.dtype, saved.shape[1:])
        destination = adapter.new_array(saved.dtype, (rows, *saved.shape[1:]))
        finish = self._destination(index, destination, start * row_bytes)
        cut = (slice(None, None, step), *part[1:])
        return lambda: finish()[cut].copy() if part[1:] or step > 1 else finish()

    def _wrong(self, path: Path, has: str, wanted: str) -> None:
        self._report.problems.append(f"{pointer(path) or '/'}: the checkpoint {has}, the state wants {wanted}")


def _once(build: Build) -> Build:
    made: list[Any] = []

    def once() -> Any:
        if not made:
            made.append(build())
        return made[0]

    return once


def _typed(key: Any) -> tuple[Any, ...]:
    """Keys that Python holds for equal (1, 1.0, True) are different keys here."""
    return (tuple(map(_typed, key)),) if isinstance(key, tuple) else (type(key).__name__, repr(key))


def _digests(array: Any) -> list[str]:
    return [part.digest for part in array.slices]


def _number_kind(dtype: str) -> str:
    for kind in ("float", "complex", "uint", "int", "bool"):
        if dtype.removeprefix("b").startswith(kind) and dtype in DTYPES:
            return "float" if kind == "float" else kind
    return dtype


def _ints_fit(packed: np.ndarray, saved: str, wanted: str) -> bool:
    values = packed.view(np.dtype(saved).newbyteorder("<"))
    return bool((values.astype(wanted).astype(saved) == values).all())


def _what(tree: Tree) -> str:
    if isinstance(tree, ArrayRef):
        return "an array"
    if isinstance(tree, Value):
        return f"a {type(tree.value).__name__}"
    return f"a {tree.kind}" + (f" ({tree.type_name})" if tree.type_name else "")


def _kind(template: Any) -> str:
    if is_named_tuple(template):
        return "namedtuple"
    return type(template).__name__.lower()


def _same_family(saved: str, wanted: str) -> bool:
    return saved == wanted or (saved in MAPPING_KINDS and wanted in MAPPING_KINDS)


def _no_arrays(template: Iterable[Any]) -> bool:
    return all(type(item) in (int, float, str, bool, bytes, complex, type(None)) for item in template)


def _rebuild(template: Any, content: Any) -> Any:
    if is_named_tuple(template):
        return type(template)(*content)
    if isinstance(template, defaultdict):
        return defaultdict(template.default_factory, content)
    if isinstance(template, deque):
        return deque(content, template.maxlen)
    return type(template)(content)
