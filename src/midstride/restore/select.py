"""Parts of a checkpoint: ``only=`` and ``rename=``."""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from midstride.adapters import Report
from midstride.errors import StateMismatch
from midstride.tree import Node, Path, Tree, named_leaves, pointer

Index = tuple[slice, ...]


@dataclass(frozen=True, slots=True)
class Selection:
    """The places that are wanted, as JSON pointers; nothing at all means everything."""

    pointers: tuple[str, ...] = ()
    parts: Mapping[str, Index] = field(default_factory=dict)
    """Pointer of an array -> the part of it that is wanted."""

    @classmethod
    def of(cls, only: str | Sequence[str] | Mapping[str, Any] | None) -> Selection:
        """From ``only``: a name at the top or a pointer (``/model/fc.weight``), several, or pointers with slices."""
        if only is None:
            return cls()
        if isinstance(only, str):
            return cls((_as_pointer(only),))
        if isinstance(only, Mapping):
            parts = {_as_pointer(name): _as_index(name, part) for name, part in only.items()}
            return cls(tuple(parts), {name: index for name, index in parts.items() if index})
        return cls(tuple(_as_pointer(name) for name in only))

    def prune(self, tree: Tree, report: Report) -> Tree:
        """The tree without what is not wanted. Wanted places that are not there are problems."""
        if not self.pointers:
            return tree
        found: set[str] = set()
        pruned = _prune(tree, (), self.pointers, found)
        for missing in sorted(set(self.pointers) - found):
            report.problems.append(f"{missing}: is not in the checkpoint")
        return pruned if pruned is not None else Node("dict", [], [])

    def pick(self, template: Any) -> Any:
        """The part of a template that is wanted: items at its top."""
        if not self.pointers or template is None:
            return template
        if not isinstance(template, dict) or self.parts:
            raise ValueError("with a state, only= takes names of its top-level items, and the state is a dict")
        names = {pointer((key,)): key for key in template}
        unknown = [name for name in self.pointers if name not in names]
        if unknown:
            raise ValueError(f"only={unknown} names no top-level item of the state; it has {sorted(names)}")
        return {names[name]: template[names[name]] for name in self.pointers}

    def array_parts(self, tree: Tree) -> dict[int, Index]:
        """Array number -> the part of it that is wanted, for arrays that are not wanted whole."""
        if not self.parts:
            return {}
        places = {pointer(path): index for path, index in named_leaves(tree)}
        unknown = [name for name in self.parts if name not in places]
        if unknown:
            raise StateMismatch(f"only= wants a part of {unknown}, which is not an array of the checkpoint")
        return {places[name]: part for name, part in self.parts.items()}


def _as_pointer(name: str) -> str:
    if not isinstance(name, str):
        raise TypeError(f"only= takes names and pointers, not {name!r}")
    return name if name.startswith("/") else pointer((name,))


def _as_index(name: str, part: Any) -> Index:
    index = part if isinstance(part, tuple) else (part,)
    if part is None or part is Ellipsis:
        return ()
    if not all(isinstance(p, slice) and (p.step is None or operator.index(p.step) > 0) for p in index):
        raise TypeError(f"only={{{name!r}: ...}} takes a slice for each dimension, with a positive step, not {part!r}")
    return index


def _prune(tree: Tree, path: Path, pointers: tuple[str, ...], found: set[str]) -> Tree | None:
    own = pointer(path)
    part = None
    if isinstance(tree, Node) and any(wanted.startswith(own + "/") for wanted in pointers):
        part = _prune_children(tree, path, pointers, found)
    if own in pointers:
        found.add(own)
        return tree
    return part


def _prune_children(tree: Node, path: Path, pointers: tuple[str, ...], found: set[str]) -> Tree | None:
    if tree.kind == "object":  # the path of its state is its own
        child = _prune(tree.children[0], path, pointers, found)
        return None if child is None else Node("object", [child], None, tree.type_name, tree.extra)
    keys = tree.keys if tree.keys is not None else list(range(len(tree.children)))
    kept = [
        (key, child)
        for key, whole in zip(keys, tree.children, strict=True)
        if (child := _prune(whole, (*path, key), pointers, found)) is not None
    ]
    if not kept:
        return None
    new_keys = [key for key, _ in kept] if tree.keys is not None else None
    return Node(tree.kind, [child for _, child in kept], new_keys, tree.type_name, tree.extra)


def rename_tree(tree: Tree, rename: Mapping[str, str]) -> Tree:
    """The tree with places renamed: pointer in the checkpoint -> pointer in the state, in the same container.

    All are renamed at once, so names can be swapped. ``StateMismatch`` names a place that is not there,
    or a name that is taken.
    """
    names: dict[tuple[str, ...], str] = {}
    for old, new in rename.items():
        (*parent, last), (*new_parent, new_last) = _parts(old), _parts(new)
        if parent != new_parent:
            raise ValueError(f"rename {old!r} -> {new!r}: only the last part of a pointer can be renamed")
        names[(*parent, last)] = new_last.replace("~1", "/").replace("~0", "~")
    done: set[tuple[str, ...]] = set()
    renamed = _rename(tree, (), names, done) if names else tree
    for missing in names.keys() - done:
        raise StateMismatch(f"rename= names /{'/'.join(missing)}, which is not a named place in the checkpoint")
    return renamed


def last_parts(rename: Mapping[str, str]) -> dict[str, str]:
    """The last parts of renamed places: what an optimizer's parameters are named by."""
    return {_plain(_parts(old)[-1]): _plain(_parts(new)[-1]) for old, new in rename.items()}


def _plain(token: str) -> str:
    return token.replace("~1", "/").replace("~0", "~")


def _parts(name: str) -> list[str]:
    return _as_pointer(name).split("/")[1:]


def _rename(tree: Tree, at: tuple[str, ...], names: Mapping[tuple[str, ...], str], done: set[tuple[str, ...]]) -> Tree:
    if not isinstance(tree, Node) or not any(old[: len(at)] == at for old in names):
        return tree
    if tree.kind == "object":
        inner = _rename(tree.children[0], at, names, done)
        return Node("object", [inner], None, tree.type_name, tree.extra)
    keys = tree.keys if tree.keys is not None else list(range(len(tree.children)))
    places = [(*at, pointer((key,))[1:]) for key in keys]
    children = [_rename(child, place, names, done) for place, child in zip(places, tree.children, strict=True)]
    if tree.keys is None:
        return Node(tree.kind, children, None, tree.type_name, tree.extra)
    new_keys = [names.get(place, key) for place, key in zip(places, keys, strict=True)]
    for place in places:
        if place in names:
            done.add(place)
            if sum(type(key) is str and key == names[place] for key in new_keys) > 1:
                raise StateMismatch(f"rename= names two places {pointer((names[place],))} in /{'/'.join(at)}")
    return Node(tree.kind, children, new_keys, tree.type_name, tree.extra)
