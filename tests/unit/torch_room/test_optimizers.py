"""Optimizer state by the names of parameters: positions that moved, names that differ, fields that changed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import midstride as ms
from midstride.adapters import LiveObject
from midstride.torch.optimizers import notes


def _net(seed: int = 0) -> torch.nn.Module:
    torch.manual_seed(seed)
    return torch.nn.ModuleDict({name: torch.nn.Linear(2, 2) for name in "abc"})


def _stepped(params: Any, cls: Any = torch.optim.AdamW, **options: Any) -> torch.optim.Optimizer:
    optimizer = cls(params, **options)
    for number, parameter in enumerate(p for group in optimizer.param_groups for p in group["params"]):
        parameter.grad = torch.full_like(parameter, number + 1.0)
    optimizer.step()
    return optimizer


def _reordered(model: torch.nn.Module) -> list[torch.nn.Parameter]:
    return list(model.parameters())[::-1]


def _through(path: Path, saved: Any, live: Any, **options: Any) -> ms.Restored:
    with ms.Checkpointer(path) as ckpt:
        ckpt.save(1, saved).result()
        restored = ckpt.restore(live, **options)
    assert restored is not None
    return restored


def _by_name(model: torch.nn.Module, optimizer: torch.optim.Optimizer, slot: str = "exp_avg") -> dict[str, Any]:
    return {name: optimizer.state[p][slot].tolist() for name, p in model.named_parameters()}


def test_notes_have_names_and_shapes() -> None:
    model = _net()
    optimizer = torch.optim.SGD([{"params": model["b"].parameters()}, {"params": [model["a"].weight]}])
    objects = [LiveObject(("model",), model, {}), LiveObject(("optimizer",), optimizer, {})]
    assert notes(optimizer, objects) == {
        "parameters": [
            [{"name": "b.weight", "shape": [2, 2]}, {"name": "b.bias", "shape": [2]}],
            [{"name": "a.weight", "shape": [2, 2]}],
        ]
    }
    two = [LiveObject(("x",), model, {}), LiveObject(("y",), _net(), {})]
    optimizer = torch.optim.SGD([*model["a"].parameters(), *two[1].value["a"].parameters()])
    (group,) = notes(optimizer, two)["parameters"]
    assert [entry["name"] for entry in group] == ["/x:a.weight", "/x:a.bias", "/y:a.weight", "/y:a.bias"]
    assert notes(optimizer, [])["parameters"][0][0]["name"] is None


def test_positions_that_moved_are_mapped(tmp_path: Path) -> None:
    model, live_model = _net(), _net(1)
    optimizer = _stepped(_reordered(model))
    live = torch.optim.AdamW(live_model.parameters())
    restored = _through(tmp_path, {"model": model, "optimizer": optimizer}, {"model": live_model, "optimizer": live})
    assert restored.warnings == ()
    assert _by_name(live_model, live) == _by_name(model, optimizer)


def test_names_given_to_the_optimizer_serve_where_there_is_no_model(tmp_path: Path) -> None:
    model, live_model = _net(), _net(1)
    optimizer = _stepped(list(model.named_parameters())[::-1])
    live = torch.optim.AdamW(live_model.named_parameters())
    assert _through(tmp_path, {"optimizer": optimizer}, {"optimizer": live}).warnings == ()
    assert _by_name(live_model, live) == _by_name(model, optimizer)
    assert live.param_groups[0]["param_names"] == [name for name, _ in live_model.named_parameters()]


def test_without_names_positions_count_and_it_is_said(tmp_path: Path) -> None:
    model, live_model = _net(), _net(1)
    optimizer, live = _stepped(model.parameters()), torch.optim.AdamW(live_model.parameters())
    restored = _through(tmp_path, {"optimizer": optimizer}, {"optimizer": live})
    assert len(restored.warnings) == 1 and "by their position" in restored.warnings[0]
    assert _by_name(live_model, live) == _by_name(model, optimizer)
    other = torch.optim.AdamW(torch.nn.Linear(3, 2).parameters())
    with pytest.raises(ms.StateMismatch, match="2 parameters, in the checkpoint 6"):
        _through(tmp_path / "2", {"optimizer": optimizer}, {"optimizer": other})
    with pytest.raises(ms.StateMismatch, match=r"has shape \(2,\), in the checkpoint \(2, 2\)"):
        reordered = torch.optim.AdamW(_reordered(live_model))
        _through(tmp_path / "3", {"optimizer": optimizer}, {"optimizer": reordered})


def test_groups_divided_in_another_way_are_told(tmp_path: Path) -> None:
    model, live_model = _net(), _net(1)
    halves = [[*model["a"].parameters()], [*model["b"].parameters(), *model["c"].parameters()]]
    optimizer = _stepped([{"params": half} for half in halves])
    live = torch.optim.AdamW(
        [
            {"params": [*live_model["a"].parameters(), *live_model["b"].parameters()]},
            {"params": live_model["c"].parameters()},
        ]
    )
    with pytest.raises(ms.StateMismatch, match="divided into groups in another way"):
        _through(tmp_path, {"model": model, "optimizer": optimizer}, {"model": live_model, "optimizer": live})


@pytest.mark.parametrize(
    "cls, options, slots",
    [
        (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9}, ["momentum_buffer"]),
        (torch.optim.Adam, {"amsgrad": True}, ["exp_avg", "exp_avg_sq", "max_exp_avg_sq"]),
        (torch.optim.Adagrad, {}, ["sum"]),
        (torch.optim.RMSprop, {"momentum": 0.1, "centered": True}, ["square_avg", "grad_avg", "momentum_buffer"]),
        (torch.optim.Adadelta, {}, ["square_avg", "acc_delta"]),
        (torch.optim.Rprop, {}, ["prev", "step_size"]),
    ],
)
def test_kinds_of_optimizers(tmp_path: Path, cls: Any, options: Any, slots: list[str]) -> None:
    model, live_model = _net(), _net(1)
    optimizer, live = _stepped(_reordered(model), cls, **options), cls(live_model.parameters(), **options)
    _through(tmp_path, {"model": model, "optimizer": optimizer}, {"model": live_model, "optimizer": live})
    for slot in slots:
        assert _by_name(live_model, live, slot) == _by_name(model, optimizer, slot)
    for name, parameter in live_model.named_parameters():
        parameter.grad = torch.ones_like(parameter)
        model.get_parameter(name).grad = torch.ones_like(parameter)
    live.step()
    optimizer.step()
    for name, parameter in live_model.named_parameters():
        assert torch.equal(parameter, model.get_parameter(name))


def test_an_optimizer_with_a_closure(tmp_path: Path) -> None:
    def made(seed: int) -> tuple[torch.nn.Module, torch.optim.LBFGS, Any]:
        torch.manual_seed(seed)
        model = torch.nn.Linear(3, 1)
        optimizer = torch.optim.LBFGS(model.parameters(), history_size=3, max_iter=4)

        def closure() -> torch.Tensor:
            optimizer.zero_grad()
            loss = (model(torch.eye(3)) - 1).square().sum()
            loss.backward()
            return loss

        return model, optimizer, closure

    model, optimizer, closure = made(0)
    optimizer.step(closure)
    live_model, live, live_closure = made(1)
    _through(tmp_path, {"model": model, "optimizer": optimizer}, {"model": live_model, "optimizer": live})
    for _ in range(3):
        assert torch.equal(optimizer.step(closure), live.step(live_closure))


def test_what_load_state_dict_refuses_is_named(tmp_path: Path) -> None:
    class Fussy(torch.optim.SGD):
        def load_state_dict(self, state: Any) -> None:
            raise ValueError("not today")

    model = _net()
    with pytest.raises(ms.StateMismatch, match=r"Fussy\.load_state_dict\(\) refused the state: not today"):
        _through(tmp_path, {"o": _stepped(model.parameters(), torch.optim.SGD)}, {"o": Fussy(model.parameters())})
