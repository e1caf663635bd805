"""Names of modules without their wrappers, and a module's own ``load_state_dict``."""

from __future__ import annotations

import enum
from collections import OrderedDict
from typing import Any

import pytest
import torch

import midstride as ms
from midstride.errors import StateMismatch
from midstride.storage import MemoryStorage
from midstride.torch.modules import canonical_keys, canonical_names, load, state_of
from midstride.tree import Node


class _Block(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.module = torch.nn.Linear(2, 2)  # a user's own name that looks like a wrapper's
        self._orig_mod = torch.nn.Linear(2, 2, bias=False)


def test_only_real_wrappers_lose_their_prefix() -> None:
    names = list(_Block().state_dict())
    assert canonical_keys(_Block(), names) == names
    wrapped = torch.nn.DataParallel(torch.compile(_Block(), backend="eager"))
    assert canonical_keys(wrapped, list(wrapped.state_dict())) == names
    assert canonical_names(wrapped)["module._orig_mod.module"] == "module"


def test_a_class_that_only_shares_a_wrappers_name_is_none() -> None:
    class DataParallel(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.module = torch.nn.Linear(1, 1)

    assert list(state_of(DataParallel())[0]) == ["module.weight", "module.bias"]


def test_names_that_would_clash_stay_as_they_are() -> None:
    class Clash(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = torch.nn.DataParallel(torch.nn.Linear(1, 1))
            self.a.register_buffer("weight", torch.zeros(1))

    keys = list(Clash().state_dict())
    assert canonical_keys(Clash(), keys) == keys and len(set(keys)) == 3


def test_shared_modules_and_extra_state_keep_all_their_names() -> None:
    class Extra(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = torch.nn.Linear(1, 1)
            self.again = self.inner
            self.extra = 5

        def get_extra_state(self) -> Any:
            return {"extra": self.extra}

        def set_extra_state(self, state: Any) -> None:
            self.extra = state["extra"]

    module = torch.nn.DataParallel(Extra())
    state, notes = state_of(module)
    assert list(state) == ["_extra_state", "inner.weight", "inner.bias", "again.weight", "again.bias"]
    assert notes == {}
    live = Extra()
    live.extra = 0
    load(live, OrderedDict(state), Node("object", []), strict=True)
    assert live.extra == 5 and live.again.weight is live.inner.weight


def test_versions_reach_the_modules_own_hook() -> None:
    seen: dict[str, Any] = {}

    class Versioned(torch.nn.Module):
        _version = 7

        def __init__(self) -> None:
            super().__init__()
            self.w = torch.nn.Parameter(torch.ones(1))

        def _load_from_state_dict(self, state: Any, prefix: str, local: Any, *rest: Any) -> None:
            seen[prefix] = local.get("version")
            super()._load_from_state_dict(state, prefix, local, *rest)

    saved = torch.compile(torch.nn.Sequential(Versioned(), torch.nn.BatchNorm1d(2)), backend="eager")
    state, notes = state_of(saved)
    assert notes == {"versions": {"0": {"version": 7}, "1": {"version": 2}}}
    live = torch.nn.Sequential(Versioned(), torch.nn.BatchNorm1d(2))
    load(live, OrderedDict(state), Node("object", [], extra=notes), strict=True)
    assert seen == {"0.": 7}


def test_a_refusal_by_the_module_is_named() -> None:
    with pytest.raises(StateMismatch, match=r"Linear\.load_state_dict\(\) refused"):
        load(torch.nn.Linear(1, 1), OrderedDict(weight=torch.ones(5, 5)), Node("object", []), strict=True)


def test_a_state_of_its_own_shape_is_left_alone() -> None:
    class Own(torch.nn.Linear):
        def state_dict(self, *args: Any, **kwargs: Any) -> Any:
            return {"own": [1, 2]}

    assert state_of(Own(1, 1)) == ({"own": [1, 2]}, {})


def test_extra_state_keeps_the_classes_that_the_live_one_tells() -> None:
    class Mode(enum.Enum):
        ON = 1
        OFF = 2

    class Extra(torch.nn.Module):
        def __init__(self, extra: Any) -> None:
            super().__init__()
            self.extra = extra

        def get_extra_state(self) -> Any:
            return self.extra

        def set_extra_state(self, state: Any) -> None:
            self.extra = state

    storage = MemoryStorage()
    with ms.Checkpointer(storage) as ckpt:
        ckpt.save(1, {"model": Extra({"mode": Mode.ON, "n": 1, "more": [2.5]})}).result(60)
        live = Extra({"mode": Mode.OFF, "n": 0.5})
        ckpt.restore({"model": live})
    assert live.extra == {"mode": Mode.ON, "n": 1, "more": [2.5]}
