"""A fresh optimizer in a new process gets all its moments and step counts back, although it has no place
for them yet; a parameter that one side lacks is an error."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from children import run_well
from states import restore, save

import midstride as ms

_TRAINING = """
    import torch
    torch.set_num_threads(1)

    def made(seed):
        torch.manual_seed(seed)
        model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))
        return model, torch.optim.AdamW(model.parameters(), lr=0.01, amsgrad=True)

    def train(model, optimizer, first, count):
        losses = []
        for step in range(first, first + count):
            x = torch.randn(16, 4, generator=torch.Generator().manual_seed(step))
            optimizer.zero_grad()
            loss = (model(x) - x.sum(1, keepdim=True)).square().mean()
            loss.backward()          # the gradients stay when the state is saved
            optimizer.step()
            losses.append(loss.item().hex())
        return losses

    def digest(optimizer):
        return {f"{number}.{name}": value.tolist() for number, fields in optimizer.state_dict()["state"].items()
                for name, value in fields.items()}
"""

_RESUME = """
    import json, sys
    import midstride as ms
    exec(sys.argv[2])
    model, optimizer = made(99)
    assert not optimizer.state
    with ms.Checkpointer(sys.argv[1]) as ckpt:
        restored = ckpt.restore({"model": model, "optimizer": optimizer})
    print(json.dumps([restored.step, restored.warnings, digest(optimizer), train(model, optimizer, 5, 5)]))
"""


def test_in_a_new_process(tmp_path: Path) -> None:
    import textwrap

    names: dict[str, object] = {}
    training = textwrap.dedent(_TRAINING)
    threads = torch.get_num_threads()
    try:
        exec(training, names)
        model, optimizer = names["made"](1)  # type: ignore[operator]
        names["train"](model, optimizer, 0, 5)  # type: ignore[operator]
        assert all(parameter.grad is not None for parameter in model.parameters())
        save(tmp_path, {"model": model, "optimizer": optimizer}, step=5)
        moments = names["digest"](optimizer)  # type: ignore[operator]
        losses = names["train"](model, optimizer, 5, 5)  # type: ignore[operator]
    finally:
        torch.set_num_threads(threads)
    assert len(moments) == 4 * 4
    assert json.loads(run_well(_RESUME, tmp_path, training)) == [5, [], moments, losses]


def test_a_parameter_that_one_side_lacks(tmp_path: Path) -> None:
    def made(names: list[str]) -> tuple[torch.nn.ParameterDict, torch.optim.Optimizer]:
        model = torch.nn.ParameterDict({name: torch.nn.Parameter(torch.ones(2)) for name in ("a", "b", "c")})
        optimizer = torch.optim.AdamW([model[name] for name in names])
        sum(model[name].sum() for name in names).backward()
        optimizer.step()
        return model, optimizer

    model, optimizer = made(["a", "b"])
    save(tmp_path, {"model": model, "optimizer": optimizer})
    for names, match in (
        (["a", "b", "c"], "the live optimizer has the parameter 'c'"),
        (["a"], "the checkpoint's optimizer has the parameter 'b'"),
        (["a", "c"], "'b'"),
    ):
        live_model, live = made(names)
        for strict in (True, False):
            with pytest.raises(ms.StateMismatch, match=match):
                restore(tmp_path, {"model": live_model, "optimizer": live}, strict=strict)
    live_model, live = made(["b", "a"])  # moved, and mapped by name
    live.param_groups[0]["params"][0].data.fill_(5)
    model["b"].grad = torch.full((2,), 3.0)
    optimizer.step()
    save(tmp_path, {"model": model, "optimizer": optimizer}, 2)
    restore(tmp_path, {"model": live_model, "optimizer": live})
    for name in ("a", "b"):
        assert torch.equal(live.state[live_model[name]]["exp_avg"], optimizer.state[model[name]]["exp_avg"])
