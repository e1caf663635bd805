"""Optimizers: each of their variables belongs to one of the model's, and is matched by that one's name.

A momentum is saved as ``dense/kernel/momentum``: the path of the variable it belongs to, and what it is
to it. Which it belongs to is told by its place in the optimizer's lists, which are in the order of the
variables that it was built with. What belongs to none is saved by its own name: ``iteration``,
``learning_rate``. Optimizers inside of another (loss scaling) have a prefix.
"""

from __future__ import annotations

import contextlib
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import keras

from midstride.adapters import LiveObject, Report
from midstride.keras.names import by_name, match_names, path_of, renumbering_warning, unused
from midstride.keras.objects import renamed_keys, stems_of, variables_of, where
from midstride.tree import Node, Tree, pointer


@dataclass(frozen=True, slots=True)
class _Parts:
    """An optimizer, taken apart."""

    parameters: dict[str, Any]
    """The model's variables that it was built with, by their paths."""
    own: dict[str, Any]
    """Variables that belong to none of these."""
    slots: dict[str, tuple[_Slot, Any]]
    """The others, by name."""

    def variables(self) -> dict[str, Any]:
        return self.own | {key: variable for key, (_, variable) in self.slots.items()}


_Slot = tuple[str, str, str]
"""Prefix of the optimizer, path of the parameter, and what a variable is to it."""


def _key(slot: _Slot) -> str:
    prefix, path, name = slot
    return f"{prefix}{path}/{name}"


def state_of(optimizer: Any) -> dict[str, Any]:
    """All its variables by name."""
    return _take_apart(optimizer).variables()


def notes(optimizer: Any, objects: list[LiveObject]) -> dict[str, Any]:
    """The parameters' names and the paths that they have in the names of the state."""
    return {"built": bool(optimizer.built), "parameters": _named_parameters(_parameters(optimizer), objects)}


def fit(optimizer: Any, saved: Node, objects: list[LiveObject], report: Report) -> tuple[Tree, Any]:
    """The saved variables under the live optimizer's names, and the live variables."""
    tree, place = saved.children[0], where(optimizer, objects)
    kept = saved.extra or {}
    stored = kept.get("parameters")
    if not isinstance(tree, Node) or tree.keys is None or not isinstance(stored, dict):
        return tree, state_of(optimizer)
    stored = {report.renamed.get(name, name): path for name, path in stored.items()}
    stems = sorted({stem for model in _models(objects) for stem in stems_of(model.value)})
    if kept.get("built") and not optimizer.built and not _build(optimizer, list(stored), objects):
        report.problems.append(
            f"{place}: the {type(optimizer).__name__} is not built, and no one model in the state has the variables "
            "that the saved one was built with. Call optimizer.build(model.trainable_variables) before restore()"
        )
        return tree, None
    if kept.get("built") is False and optimizer.built and report.strict:
        report.problems.append(
            f"{place}: the checkpoint's {type(optimizer).__name__} was saved before its first step, the live one is "
            "built. Restore into a new optimizer, or leave it out with only="
        )
        return tree, None
    parts = _take_apart(optimizer)
    live = _named_parameters(parts.parameters, objects)
    matched = match_names(list(stored), list(live), stems)
    if _report_parameters(stored, live, matched, place, report):
        return tree, None
    report.warnings.extend(renumbering_warning(matched, place))
    paths = {live[mine]: stored[theirs] for theirs, mine in matched.items()}
    keys = {name: name for name in parts.own}
    for key, ((prefix, path, slot), _) in parts.slots.items():
        if path in paths:
            keys[_key((prefix, paths[path], slot))] = key
    return Node(tree.kind, tree.children, renamed_keys(tree.keys, keys)), parts.variables()


def _report_parameters(
    stored: dict[str, str], live: dict[str, str], matched: dict[str, str], place: str, report: Report
) -> bool:
    """Tell the parameters that one side lacks; True if that ends the matching."""
    for name in sorted(set(stored) - set(matched)):
        report.unmatched(f"{place}: the checkpoint's optimizer has the parameter {name!r}, the live one has not")
    for name in sorted(set(live) - set(matched.values())):
        report.unmatched(f"{place}: the live optimizer has the parameter {name!r}, the checkpoint's has not")
    return report.strict and not len(stored) == len(live) == len(matched)


def _named_parameters(parameters: dict[str, Any], objects: list[LiveObject]) -> dict[str, str]:
    """Name -> path in the names of the state. They differ where two parameters have one path:
    then the place of the model, and the name in it, are a better name than the position here."""
    paths = Counter(path_of(parameter) for parameter in parameters.values())
    if len(paths) == len(parameters):
        return {path: path for path in parameters}
    owners: dict[int, str] = {}
    for model in _models(objects):
        for name, variable in variables_of(model.value).items():
            owners.setdefault(id(variable), f"{pointer(model.path)}:{name}")
    named: dict[str, str] = {}
    for path, parameter in parameters.items():
        name = owners.get(id(parameter), path) if paths[path_of(parameter)] > 1 else path
        named[unused(name, named)] = path
    return named


def _models(objects: list[LiveObject]) -> list[LiveObject]:
    return [live for live in objects if isinstance(live.value, keras.Layer)]


def _build(optimizer: Any, names: list[str], objects: list[LiveObject]) -> bool:
    """Build an optimizer as its first step would, if exactly one model has the variables of these names.

    Of several, the one that it was compiled into.
    """
    candidates = []
    for live in _models(objects):
        variables = live.value.trainable_variables
        mine = by_name(variables)
        if variables and len(match_names(names, list(mine), stems_of(live.value))) == len(names) == len(mine):
            candidates.append(live.value)
    if len(candidates) > 1:
        candidates = [model for model in candidates if getattr(model, "optimizer", None) is optimizer]
    if len(candidates) != 1:
        return False
    strategy = getattr(optimizer, "_distribution_strategy", None)  # TensorFlow's, that it was made under
    with strategy.scope() if strategy is not None else contextlib.nullcontext():
        optimizer.build(candidates[0].trainable_variables)
    return True


def _parameters(optimizer: Any) -> dict[str, Any]:
    """What it and the optimizers inside of it were built with, by path."""
    return by_name(p for _, each in _nested(optimizer, "") for p in getattr(each, "_trainable_variables", ()))


def _take_apart(optimizer: Any) -> _Parts:
    parts = _Parts(_parameters(optimizer), {}, {})
    paths = {id(parameter): path for path, parameter in parts.parameters.items()}
    known: set[int] = set()
    for prefix, each in reversed(list(_nested(optimizer, ""))):  # an outer one lists the inner ones' variables too
        variables = [variable for variable in each.variables if id(variable) not in known]
        known.update(map(id, variables))
        slots = dict(_slots(each, set(map(id, variables)), paths))
        for variable in variables:
            if id(variable) not in slots:
                parts.own[unused(prefix + _own_name(each, variable), parts.own)] = variable
                continue
            path, slot, attribute = slots[id(variable)]
            if _key((prefix, path, slot)) in parts.slots:
                slot = attribute
            parts.slots[unused(_key((prefix, path, slot)), parts.slots)] = (prefix, path, slot), variable
    return parts


def _nested(optimizer: Any, prefix: str) -> Iterator[tuple[str, Any]]:
    yield prefix, optimizer
    inner = getattr(optimizer, "inner_optimizer", None)
    if inner is not None:
        yield from _nested(inner, f"{prefix}inner_optimizer/")
    for number, each in enumerate(getattr(optimizer, "optimizers", ())):
        yield from _nested(each, f"{prefix}optimizers/{number}/")


_LISTS_OF_KERAS = ("_variables", "_trainable_variables")


def _slots(optimizer: Any, own: set[int], paths: dict[int, str]) -> Iterator[tuple[int, tuple[str, str, str]]]:
    """For each variable that stands in a list beside the parameters: the parameter's path, what it is to it by
    its own name, and by the list's."""
    parameters = list(getattr(optimizer, "_trainable_variables", ()))
    for attribute, held in vars(optimizer).items():
        if attribute in _LISTS_OF_KERAS or not isinstance(held, (list, tuple)) or len(held) != len(parameters):
            continue
        for parameter, variable in zip(parameters, held, strict=True):
            if id(variable) in own:
                begin = re.sub("[/:]", "_", path_of(parameter)) + "_"
                label = attribute.strip("_")
                slot = variable.name.removeprefix(begin) if variable.name.startswith(begin) else label
                yield id(variable), (paths[id(parameter)], slot, label)


def _own_name(optimizer: Any, variable: Any) -> str:
    name = str(variable.name)
    if re.fullmatch(r"variable(_\d+)?", name):  # one that Keras has numbered through the process
        name = next((key.strip("_") for key, held in vars(optimizer).items() if held is variable), "variable")
    return name
