"""The names in a checkpoint are the module's own, whether it is compiled, distributed or checkpointed in
its activations; so a state saved from one form is restored into any other. A restore that matches nothing
is an error, with ``strict=False`` too."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from states import restore, save
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

import midstride as ms

_NAMES = ["0.bias", "0.weight", "1.inner.bias", "1.inner.weight", "1.running_mean"]


class _Block(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = torch.nn.Linear(3, 2)
        self.register_buffer("running_mean", torch.rand(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x) + self.running_mean


@pytest.fixture(scope="module", autouse=True)
def world() -> Iterator[None]:
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


def _plain() -> torch.nn.Module:
    return torch.nn.Sequential(torch.nn.Linear(3, 3), _Block())


def _inner_compiled() -> torch.nn.Module:
    return torch.nn.Sequential(torch.nn.Linear(3, 3), torch.compile(_Block(), backend="eager"))


_FORMS: dict[str, Callable[[], torch.nn.Module]] = {
    "plain": _plain,
    "compiled": lambda: torch.compile(_plain(), backend="eager"),
    "compiled inside": _inner_compiled,
    "ddp": lambda: torch.nn.parallel.DistributedDataParallel(_plain()),
    "compiled ddp": lambda: torch.compile(torch.nn.parallel.DistributedDataParallel(_plain()), backend="eager"),
    "ddp of compiled": lambda: torch.nn.parallel.DistributedDataParallel(torch.compile(_plain(), backend="eager")),
    "data parallel": lambda: torch.nn.DataParallel(_plain()),
    "activation checkpoint": lambda: torch.nn.Sequential(torch.nn.Linear(3, 3), checkpoint_wrapper(_Block())),
    "checkpoint of all": lambda: checkpoint_wrapper(_inner_compiled()),
}


def _trained(form: str, steps: int = 2) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    module = _FORMS[form]()
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.1)
    for _ in range(steps):
        for parameter in module.parameters():
            parameter.grad = torch.rand_like(parameter)
        optimizer.step()
    return module, optimizer


def _values(module: torch.nn.Module) -> list[list[float]]:
    return [tensor.flatten().tolist() for tensor in module.state_dict().values()]


def _moments(optimizer: torch.optim.Optimizer) -> Any:
    return [optimizer.state[p]["exp_avg"].tolist() for group in optimizer.param_groups for p in group["params"]]


@pytest.mark.parametrize("form", _FORMS)
def test_names_are_the_modules_own_and_every_form_takes_them(tmp_path: Path, form: str) -> None:
    module, optimizer = _trained(form)
    info = save(tmp_path, {"model": module, "optimizer": optimizer})
    with safe_open(tmp_path / info.name / "model.safetensors", "np") as file:
        assert sorted(file.keys()) == _NAMES
    for other in ("plain", form, "compiled", "ddp"):
        for strict in (True, False):
            live, live_optimizer = _trained(other, steps=1)
            restored = restore(tmp_path, {"model": live, "optimizer": live_optimizer}, strict=strict)
            assert restored.warnings == ()
            assert _values(live) == _values(module)
            assert _moments(live_optimizer) == _moments(optimizer)


@pytest.mark.parametrize("form", _FORMS)
def test_every_form_takes_what_a_plain_module_saved(tmp_path: Path, form: str) -> None:
    module, optimizer = _trained("plain")
    save(tmp_path, {"model": module, "optimizer": optimizer})
    live, live_optimizer = _trained(form, steps=0)
    restore(tmp_path, {"model": live, "optimizer": live_optimizer})
    assert _values(live) == _values(module)
    assert _moments(live_optimizer) == _moments(optimizer)


@pytest.mark.parametrize("strict", [True, False])
def test_matching_nothing_is_an_error(tmp_path: Path, strict: bool) -> None:
    save(tmp_path, {"model": _plain()})
    other = torch.nn.ModuleDict({"encoder": torch.nn.Linear(3, 3)})
    before = _values(other)
    with pytest.raises(
        ms.StateMismatch, match="/model: nothing in the checkpoint matches" if not strict else r"0\.weight"
    ):
        restore(tmp_path, {"model": other}, strict=strict)
    assert _values(other) == before


def test_lenient_returns_the_lists(tmp_path: Path) -> None:
    saved = _plain()
    save(tmp_path, {"model": saved})
    live = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.ModuleDict({"head": torch.nn.Linear(2, 2)}))
    head = live[1]["head"].weight.clone()
    restored = restore(tmp_path, {"model": live}, strict=False)
    missing = [w for w in restored.warnings if "is not in the checkpoint" in w]
    left_over = [w for w in restored.warnings if "is in the checkpoint, not in the state" in w]
    assert [w.split(":")[0] for w in missing] == ["/model/1.head.weight", "/model/1.head.bias"]
    assert sorted(w.split(":")[0] for w in left_over) == [f"/model/{name}" for name in _NAMES[2:]]
    assert torch.equal(live[0].weight, saved[0].weight) and torch.equal(live[1]["head"].weight, head)
    with pytest.raises(ms.StateMismatch) as caught:
        restore(tmp_path, {"model": live})
    assert all(w in str(caught.value) for w in restored.warnings)
