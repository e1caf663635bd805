"""Optimizers: their state is numbered by position, and matched here by the parameters' names.

PyTorch's ``Optimizer.state_dict()`` knows parameters only as 0, 1, 2... in the order in which they
were given. The names are kept beside it, found through the modules in the same state (or from an
optimizer that was given named parameters), so that a restore can map positions that have moved.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any

import torch

from midstride.adapters import LiveObject, Report
from midstride.errors import StateMismatch
from midstride.torch.modules import canonical_keys
from midstride.tree import Node, Value, pointer


@dataclass(frozen=True, slots=True)
class _Parameter:
    name: str | None
    shape: tuple[int, ...] | None
    """None where it was not saved."""


def notes(optimizer: torch.optim.Optimizer, objects: list[LiveObject]) -> dict[str, Any]:
    """Names and shapes of the parameters, group by group, to be kept in the manifest."""
    return {
        "parameters": [
            [{"name": p.name, "shape": list(p.shape or ())} for p in group] for group in _parameters(optimizer, objects)
        ]
    }


def _parameters(optimizer: torch.optim.Optimizer, objects: list[LiveObject]) -> list[list[_Parameter]]:
    names = _names(objects)
    groups = []
    for group in optimizer.param_groups:
        given = group.get("param_names") or [None] * len(group["params"])
        groups.append(
            [
                # A name given by the user is kept apart from those that modules give.
                _Parameter(names.get(id(parameter), own and f"given:{own}"), tuple(parameter.shape))
                for parameter, own in zip(group["params"], given, strict=True)
            ]
        )
    return groups


def _names(objects: list[LiveObject]) -> dict[int, str]:
    """Parameter -> name, over all modules in the state; the first module that has it names it."""
    modules = [live for live in objects if isinstance(live.value, torch.nn.Module)]
    found: dict[int, tuple[str, str]] = {}
    for live in modules:
        own = dict(live.value.named_parameters(remove_duplicate=False))
        for name, parameter in zip(canonical_keys(live.value, list(own)), own.values(), strict=True):
            found.setdefault(id(parameter), (pointer(live.path), name))
    counts = Counter(name for _, name in found.values())
    # A name that two modules use says too little: the module's place in the state is put before it.
    return {key: name if counts[name] == 1 else f"{path}:{name}" for key, (path, name) in found.items()}


def fit(optimizer: torch.optim.Optimizer, saved: Node, objects: list[LiveObject], report: Report) -> Any:
    """The saved state with the live optimizer's positions; differences go to the report."""
    tree = saved.children[0]
    parts = _parts(tree)
    if parts is None:  # a state of its own shape: the optimizer knows best
        return tree
    whole, states, groups = parts
    stored = _stored_parameters(saved, report.renamed) or [_unnamed(group) for group in groups]
    live = _parameters(optimizer, objects)
    order = _match_groups(stored, live, report)
    if order is None:
        return tree
    live_groups = optimizer.state_dict()["param_groups"]
    numbers: dict[int, int] = {}
    new_groups: list[Any] = []
    for mine, (group, theirs) in enumerate(zip(live, order, strict=True)):
        saved_ids = [child.value for child in _child(groups[theirs], "params").children]
        positions = _match_parameters(stored[theirs], group, report)
        if positions is None:
            return tree
        ids = live_groups[mine]["params"]
        numbers.update({saved_ids[theirs_at]: ids[mine_at] for mine_at, theirs_at in enumerate(positions)})
        new_groups.append(_group(groups[theirs], live_groups[mine], mine, report))
    keys = [numbers.get(key, key) for key in states.keys or []]
    fields = dict(zip(whole.keys or [], whole.children, strict=True))
    fields["state"] = Node("dict", states.children, keys)
    fields["param_groups"] = Node("list", new_groups)
    return Node("dict", list(fields.values()), list(fields))


def _stored_parameters(saved: Node, renamed: dict[str, str]) -> list[list[_Parameter]] | None:
    groups = (saved.extra or {}).get("parameters")
    if not isinstance(groups, list):
        return None
    return [[_Parameter(renamed.get(p["name"], p["name"]), tuple(p["shape"])) for p in group] for group in groups]


def _unnamed(group: Node) -> list[_Parameter]:
    """Of an optimizer that was saved as its ``state_dict()``, which names nothing."""
    return [_Parameter(None, None) for _ in _child(group, "params").children]


def _parts(tree: Any) -> tuple[Node, Node, list[Node]] | None:
    """The tree, and its nodes of "state" and of each group, if it has the shape of PyTorch's own optimizers."""
    if not isinstance(tree, Node) or tree.keys is None or not {"state", "param_groups"} <= set(tree.keys):
        return None
    states, groups = _child(tree, "state"), _child(tree, "param_groups")
    if not isinstance(states, Node) or not isinstance(groups, Node):
        return None
    nodes = [group for group in groups.children if isinstance(group, Node) and "params" in (group.keys or ())]
    return (tree, states, nodes) if len(nodes) == len(groups.children) else None


def _child(node: Node, key: str) -> Any:
    return node.children[(node.keys or []).index(key)]


def _match_groups(stored: list[list[_Parameter]], live: list[list[_Parameter]], report: Report) -> list[int] | None:
    """For each live group the number of the saved group with the same parameters."""
    if len(stored) != len(live):
        report.problems.append(f"the optimizer has {len(live)} parameter groups, the checkpoint {len(stored)}")
        return None
    if any(p.name is None for group in (*stored, *live) for p in group):
        report.warnings.append(
            "optimizer state of parameters that no module in the state names was matched by their position"
        )
    if not (_any_named(stored) and _any_named(live)):
        return list(range(len(live)))
    free = list(range(len(stored)))
    order = []
    for group in live:
        match = next((n for n in free if _names_of(stored[n]) == _names_of(group)), None)
        if match is None:
            _report_names(stored, live, report)
            return None
        free.remove(match)
        order.append(match)
    return order


def _any_named(groups: list[list[_Parameter]]) -> bool:
    return any(p.name is not None for group in groups for p in group)


def _names_of(group: list[_Parameter]) -> tuple[list[str], int]:
    """The names in a group, and how many parameters have none."""
    names = sorted(p.name for p in group if p.name is not None)
    return names, len(group) - len(names)


def _report_names(stored: list[list[_Parameter]], live: list[list[_Parameter]], report: Report) -> None:
    theirs = {p.name for group in stored for p in group if p.name is not None}
    mine = {p.name for group in live for p in group if p.name is not None}
    if theirs == mine:
        report.problems.append("the optimizer's parameters are divided into groups in another way than when saved")
    for name in sorted(theirs - mine):
        report.problems.append(f"the checkpoint's optimizer has the parameter {name!r}, the live one has not")
    for name in sorted(mine - theirs):
        report.problems.append(f"the live optimizer has the parameter {name!r}, the checkpoint's has not")


def _match_parameters(stored: list[_Parameter], live: list[_Parameter], report: Report) -> list[int] | None:
    """For each live parameter of a group the position of the saved one."""
    if len(stored) != len(live):
        report.problems.append(f"a parameter group has {len(live)} parameters, in the checkpoint {len(stored)}")
        return None
    at = {p.name: position for position, p in enumerate(stored) if p.name is not None}
    if at and any(p.name is not None for p in live):
        unnamed = iter([position for position, p in enumerate(stored) if p.name is None])
        positions = [at[p.name] if p.name is not None else next(unnamed) for p in live]
    else:
        positions = list(range(len(live)))
    for parameter, position in zip(live, positions, strict=True):
        if stored[position].shape not in (None, parameter.shape):
            report.problems.append(
                f"the optimizer's parameter {parameter.name or position} has shape {parameter.shape}, "
                f"in the checkpoint {stored[position].shape}"
            )
            return None
    return positions


def _group(saved: Node, live: dict[str, Any], number: int, report: Report) -> Node:
    """A saved group's fields with the live positions. Fields that only one side has are told by name."""
    fields = dict(zip(saved.keys or [], saved.children, strict=True))
    own = {"params", "param_names"}
    for name in sorted(set(fields) - set(live) - own):
        report.warnings.append(
            f"param_groups[{number}] has {name!r} in the checkpoint only: it is given to the optimizer as saved"
        )
    for name in sorted(set(live) - set(fields) - own):
        report.unmatched(f"param_groups[{number}] lacks {name!r} in the checkpoint; the live value stays")
    fields["params"] = Node("list", [Value(n) for n in live["params"]])
    fields.pop("param_names", None)
    if "param_names" in live:
        fields["param_names"] = Node("list", [Value(name) for name in live["param_names"]])
    if not report.strict:
        for name in set(live) - set(fields):
            fields[name] = Value(live[name])
    return Node("dict", list(fields.values()), list(fields))


def load(optimizer: torch.optim.Optimizer, state: Any) -> None:
    """Run the optimizer's own ``load_state_dict``; then undo the casts that it makes on the way.

    PyTorch casts floating-point state to the dtype of its parameter, so float32 moments of a
    bfloat16 parameter would come back rounded.
    """
    try:
        optimizer.load_state_dict(state)
    except (ValueError, KeyError, RuntimeError) as error:
        raise StateMismatch(f"{type(optimizer).__name__}.load_state_dict() refused the state: {error}") from error
    if not isinstance(state, dict) or not isinstance(state.get("state"), dict):
        return
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    for position, saved in state["state"].items():
        if not (isinstance(position, int) and 0 <= position < len(parameters) and isinstance(saved, dict)):
            continue
        live = optimizer.state[parameters[position]]
        for key, value in saved.items():
            now = live.get(key)
            if isinstance(value, torch.Tensor) and isinstance(now, torch.Tensor) and now.dtype != value.dtype:
                live[key] = value.to(now.device)
