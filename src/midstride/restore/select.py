"""Parts of a checkpoint: ``only=`` and ``rename=``."""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from midstride.errors import StateMismatch
from midstride.state import Node, Path, Report, Tree, named_leaves, pointer

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
    if own in pointers:
        found.add(own)
        return tree
    if not isinstance(tree, Node) or not any(wanted.startswith(own + "/") for wanted in pointers):
        return None
    if tree.kind == "object":
        child = _prune_child(tree.children[0], path, pointers, found)
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


def _prune_child(tree: Tree, path: Path, pointers: tuple[str, ...], found: set[str]) -> Tree | None:
    # The path of an object's state is the object's own, which was looked at already.
    return _prune(tree, path, pointers, found) if isinstance(tree, Node) else None


def rename_tree(tree: Tree, rename: Mapping[str, str]) -> Tree:
    """The tree with places renamed: pointer in the checkpoint -> pointer in the state, in the same container.

    ``StateMismatch`` names a place that is not there.
    """
    for old, new in rename.items():
        (*parent, last), (*new_parent, new_last) = _parts(old), _parts(new)
        if parent != new_parent:
            raise ValueError(f"rename {old!r} -> {new!r}: only the last part of a pointer can be renamed")
        tree = _rename(tree, parent, last, new_last, old)
    return tree


def _parts(name: str) -> list[str]:
    return _as_pointer(name).split("/")[1:]


def _rename(tree: Tree, parent: list[str], old: str, new: str, whole: str) -> Tree:
    if isinstance(tree, Node) and tree.kind == "object":
        inner = _rename(tree.children[0], parent, old, new, whole)
        return Node("object", [inner], None, tree.type_name, tree.extra)
    if not isinstance(tree, Node):
        raise StateMismatch(f"rename= names {whole}, which is not in the checkpoint")
    keys = tree.keys if tree.keys is not None else list(range(len(tree.children)))
    tokens = [pointer((key,))[1:] for key in keys]
    step = parent[0] if parent else old
    if step not in tokens:
        raise StateMismatch(f"rename= names {whole}, which is not in the checkpoint")
    at = tokens.index(step)
    children, new_keys = list(tree.children), list(keys)
    if parent:
        children[at] = _rename(children[at], parent[1:], old, new, whole)
    else:
        new_keys[at] = new.replace("~1", "/").replace("~0", "~")
    return Node(tree.kind, children, new_keys if tree.keys is not None else None, tree.type_name, tree.extra)
