"""Learning rates and every other field of every parameter group, the scheduler's own numbers and the plain
values of the state are the saved ones, whatever the objects were built with; the schedule goes on exactly."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from states import restore, save
from tests.exact import assert_same


def _objects(lr: float, kind: str, total: int) -> tuple[torch.nn.Module, torch.optim.Optimizer, Any]:
    model = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.Linear(3, 2))
    groups = [
        {"params": model[0].parameters(), "lr": lr, "weight_decay": lr / 2},
        {"params": [], "lr": lr * 3},
        {"params": model[1].parameters(), "betas": (lr / 2, lr / 4), "note": f"group of {lr}"},
    ]
    optimizer = torch.optim.AdamW(groups, lr=lr * 5)
    if kind == "onecycle":
        rates = [group["lr"] for group in optimizer.param_groups]
        return model, optimizer, torch.optim.lr_scheduler.OneCycleLR(optimizer, rates, total_steps=total)
    return model, optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.9**step)


def _train(model: torch.nn.Module, optimizer: torch.optim.Optimizer, scheduler: Any, count: int) -> list[list[Any]]:
    seen = []
    for _ in range(count):
        optimizer.zero_grad()
        model(torch.ones(1, 3)).square().sum().backward()
        optimizer.step()
        scheduler.step()
        seen.append([(group["lr"], group["betas"]) for group in optimizer.param_groups])
    return seen


@pytest.mark.parametrize("kind", ["onecycle", "lambda"])
def test_every_field_of_every_group(tmp_path: Path, kind: str) -> None:
    saved = _objects(0.1, kind, 20)
    _train(*saved, 7)
    args = {"lr": 0.1, "model": {"width": 3}, "note": "first"}
    names = ("model", "optimizer", "scheduler")
    save(tmp_path, {**dict(zip(names, saved, strict=True)), "epoch": 3, "args": args}, step=7)

    live = _objects(0.7, kind, 99)
    _train(*live, 2)  # and it has been used
    template = {**dict(zip(names, live, strict=True)), "epoch": 0, "args": {"lr": 5, "model": {"width": 0}, "note": ""}}
    restored = restore(tmp_path, template)
    assert restored.warnings == ()
    assert restored.state["epoch"] == 3 and restored.state["args"] == args
    assert restored.state["optimizer"] is live[1]
    assert_same(live[1].state_dict(), saved[1].state_dict())
    assert_same(live[2].state_dict(), saved[2].state_dict())
    for group, other in zip(live[1].param_groups, saved[1].param_groups, strict=True):
        assert_same(
            {k: v for k, v in group.items() if k != "params"}, {k: v for k, v in other.items() if k != "params"}
        )
        assert "initial_lr" in group
    assert _train(*live, 10) == _train(*saved, 10)
    for mine, theirs in zip(live[0].parameters(), saved[0].parameters(), strict=True):
        assert torch.equal(mine, theirs)


def test_groups_in_another_order_are_matched_by_their_parameters(tmp_path: Path) -> None:
    def made(order: list[int], lr: float) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
        model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2))
        return model, torch.optim.SGD([{"params": model[n].parameters(), "lr": lr + n} for n in order], momentum=0.9)

    model, optimizer = made([0, 1], 0.5)
    save(tmp_path, {"model": model, "optimizer": optimizer})
    live_model, live = made([1, 0], 7.0)
    restore(tmp_path, {"model": live_model, "optimizer": live})
    assert [group["lr"] for group in live.param_groups] == [1.5, 0.5]
