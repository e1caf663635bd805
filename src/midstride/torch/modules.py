"""``nn.Module``: its state under canonical names, and back.

Wrappers (``torch.compile``, DistributedDataParallel, activation checkpointing) put a prefix before
every name below them. The prefix says how the model is run, not what it is, so it is taken away in
the checkpoint and put back for the module that is restored.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

import torch

from midstride.errors import StateMismatch
from midstride.state import Like
from midstride.tree import Node, Tree

_WRAPPERS = {
    "OptimizedModule": "_orig_mod",
    "DistributedDataParallel": "module",
    "DataParallel": "module",
    "CheckpointWrapper": "_checkpoint_wrapped_module",
    "FullyShardedDataParallel": "_fsdp_wrapped_module",
}
"""The class of each wrapper, by name so that none needs importing, and its attribute for what it wraps."""

_SELF_STRIPPING = ("_checkpoint_wrapped_module", "_fsdp_wrapped_module")

_USUAL_VERSION = {"version": 1}


def canonical_names(module: torch.nn.Module) -> dict[str, str]:
    """For each module below (by its own dotted name): its name without wrappers."""
    names = {"": ""}
    for name, child in module.named_modules(remove_duplicate=False):
        attribute = _wrapped_attribute(child)
        for part in child._modules:
            own = f"{name}.{part}" if name else part
            if part == attribute:
                names[own] = names[name]
            else:
                names[own] = f"{names[name]}.{part}" if names[name] else part
    return names


def _wrapped_attribute(module: torch.nn.Module) -> str | None:
    for cls in type(module).__mro__:
        if cls.__name__ in _WRAPPERS and cls.__module__.startswith("torch."):
            return _WRAPPERS[cls.__name__]
    return None


def canonical_keys(module: torch.nn.Module, keys: list[str]) -> list[str]:
    """The canonical name of each key of the module's ``state_dict``. Keys stay distinct."""
    modules = canonical_names(module)
    if all(own == canonical for own, canonical in modules.items()):
        return keys
    # Some wrappers take their own prefix off the keys, and leave what is below as it is.
    for own, canonical in list(modules.items()):
        modules.setdefault(".".join(part for part in own.split(".") if part not in _SELF_STRIPPING), canonical)
    result = []
    for key in keys:
        owner = key
        while owner not in modules:
            owner = owner.rpartition(".")[0]
        rest = key[len(owner) :].lstrip(".")
        result.append(".".join(part for part in (modules[owner], rest) if part))
    return result if len(set(result)) == len(result) else keys


def state_of(module: torch.nn.Module) -> tuple[Any, dict[str, Any]]:
    """The module's state under canonical names, and the versions of modules that have an unusual one."""
    state = module.state_dict()
    if type(state) is not OrderedDict:
        return state, {}
    renamed = OrderedDict(zip(canonical_keys(module, list(state)), state.values(), strict=True))
    modules = canonical_names(module)
    versions = {
        modules.get(name, name): dict(entry)
        for name, entry in getattr(state, "_metadata", {}).items()
        if entry and entry != _USUAL_VERSION
    }
    return renamed, {"versions": versions} if versions else {}


def fit(module: torch.nn.Module, saved: Node) -> tuple[Tree, Any]:
    """The saved state under the live module's own names, and the live state that it must match."""
    live = module.state_dict()
    tree = saved.children[0]
    if type(live) is not OrderedDict or not isinstance(tree, Node) or tree.keys is None:
        return tree, live
    # Extra state is the module's own business: it may have another size or other keys each time.
    live = OrderedDict((key, Like(v) if key.rpartition(".")[2] == "_extra_state" else v) for key, v in live.items())
    own = dict(zip(canonical_keys(module, list(live)), live, strict=True))
    keys = [own.get(key, key) for key in tree.keys]
    return Node("ordereddict", tree.children, keys), live


def load(module: torch.nn.Module, state: Any, saved: Node, strict: bool) -> None:
    """Run the module's own ``load_state_dict``, so that its hooks and extra state have their say."""
    versions = (saved.extra or {}).get("versions", {})
    if type(state) is OrderedDict:
        metadata = OrderedDict(
            (own, dict(versions.get(canonical, _USUAL_VERSION))) for own, canonical in canonical_names(module).items()
        )
        state._metadata = metadata  # type: ignore[attr-defined]
    try:
        module.load_state_dict(state, strict=strict)
    except RuntimeError as error:
        raise StateMismatch(f"{type(module).__name__}.load_state_dict() refused the state: {error}") from error
