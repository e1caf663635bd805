"""Names of Keras's variables: their paths, such as ``dense/kernel``.

A layer that was given no name is named after its class and numbered through the whole process: the
first model in a process has ``dense`` and ``dense_1``, the same model built again has ``dense_2`` and
``dense_3``. So where the names of two models differ, they are compared by what these numbers are
counted from their lowest.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import Any

_NUMBERED = re.compile(r"(.+?)(?:_(\d+))?")

_SEED_GENERATOR = "seed_generator"
_SEEDS = re.compile(rf"(?<={_SEED_GENERATOR})_\d+")


def by_name(variables: Iterable[Any]) -> dict[str, Any]:
    """The variables by their paths, each once. Of several with one path the later are ``path#2`` and so on."""
    named: dict[str, Any] = {}
    known: set[int] = set()
    for variable in variables:
        if id(variable) in known:
            continue
        known.add(id(variable))
        named[unused(path_of(variable), named)] = variable
    return named


def path_of(variable: Any) -> str:
    """The path of a Keras variable, the name of a framework's own one."""
    return str(getattr(variable, "path", None) or variable.name)


def unused(name: str, taken: Iterable[str]) -> str:
    """``name``, or ``name#2`` and so on where it is taken."""
    unique, number = name, 1
    while unique in taken:
        number += 1
        unique = f"{name}#{number}"
    return unique


def automatic_stems(parts: Iterable[Any]) -> list[str]:
    """What Keras puts a number behind, for those of these layers or metrics that have such a name."""
    stems = {_SEED_GENERATOR}
    for part in parts:
        stem = _split(part.name)[0]
        if stem.replace("_", "") == type(part).__name__.lower().replace("_", ""):
            stems.add(stem)
    return sorted(stems)


def match_names(saved: Sequence[str], live: Sequence[str], stems: Iterable[str]) -> dict[str, str]:
    """For each saved name the live one that it stands for. A name that is not in the result has none.

    Equal names match. If not all of them are equal, names may match that differ only in the numbers
    behind ``stems``, if those differ alike for all, and if more of the names match in this way.
    """
    equal = {name: name for name in set(saved) & set(live)}
    if len(equal) == len(saved) == len(live):
        return equal
    stems = set(stems)
    theirs, mine = _counted_from_lowest(saved, stems), _counted_from_lowest(live, stems)
    at = {relative: name for name, relative in mine.items()}
    renumbered = {name: at[relative] for name, relative in theirs.items() if relative in at}
    return renumbered if len(renumbered) > len(equal) else equal


def renumbering_warning(matched: dict[str, str], what: str) -> list[str]:
    """What a caller should know of names that match and are not equal.

    Nothing where the difference is in the numbers of seed generators, to which people give no names.
    """
    moved = next(((old, new) for old, new in matched.items() if _SEEDS.sub("", old) != _SEEDS.sub("", new)), None)
    if moved is None:
        return []
    old, new = moved
    return [f"{what}: Keras has numbered its automatic names anew, so {new!r} was filled from {old!r}, and so on"]


def _counted_from_lowest(names: Sequence[str], stems: set[str]) -> dict[str, str]:
    """Each name with the number of each automatic part counted from the lowest among its neighbours.

    Empty if two names would become equal.
    """
    parts = {name: name.split("/") for name in names}
    for depth in range(max(map(len, parts.values()), default=0)):
        here = [path for path in parts.values() if len(path) > depth]
        lowest: dict[tuple[str, ...], int] = {}
        for path in here:
            stem, number = _split(path[depth])
            group = (*path[:depth], stem)
            lowest[group] = min(number, lowest.get(group, number))
        for path in here:
            stem, number = _split(path[depth])
            if stem in stems:
                path[depth] = f"{stem}_{number - lowest[(*path[:depth], stem)]}"
    relative = {name: "/".join(path) for name, path in parts.items()}
    return relative if len(set(relative.values())) == len(relative) else {}


def _split(name: str) -> tuple[str, int]:
    found = _NUMBERED.fullmatch(name)
    return (found[1], int(found[2] or 0)) if found else (name, 0)
