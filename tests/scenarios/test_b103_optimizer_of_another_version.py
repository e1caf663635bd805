"""Fields of an optimizer that another version of its library has added or dropped are told by name, never
by a KeyError.

A field that the checkpoint lacks: ``StateMismatch``; with ``strict=False`` the live value stays and a warning
says so. A field that the live optimizer does not know: a warning, and it is handed over as saved.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from states import restore, save

import midstride as ms


class _OtherVersion(torch.optim.AdamW):
    """AdamW of a library that lacks ``amsgrad``, has ``turbo``, and counts steps in a float."""

    def state_dict(self) -> dict[str, Any]:
        state = super().state_dict()
        for group in state["param_groups"]:
            del group["amsgrad"]
            group["turbo"] = 11
        state["state"] = {n: {**fields, "step": float(fields["step"])} for n, fields in state["state"].items()}
        return state


def _trained(cls: type[torch.optim.AdamW], lr: float, steps: int) -> tuple[torch.nn.Module, torch.optim.AdamW]:
    model = torch.nn.Linear(2, 2)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(1.0)
    optimizer = cls(model.parameters(), lr=lr)
    for _ in range(steps):
        _step(model, optimizer)
    return model, optimizer


def _step(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> list[float]:
    optimizer.zero_grad()
    model(torch.ones(1, 2)).square().sum().backward()
    optimizer.step()
    return model.weight.flatten().tolist()


@pytest.mark.parametrize("as_object", [True, False])
def test_missing_and_unknown_fields(tmp_path: Path, as_object: bool) -> None:
    model, optimizer = _trained(_OtherVersion, 0.1, 3)
    save(tmp_path, {"model": model, "optimizer": optimizer if as_object else optimizer.state_dict()})
    live_model, live = _trained(torch.optim.AdamW, 0.7, 1)
    template = {"model": live_model, "optimizer": live}
    with pytest.raises(ms.StateMismatch, match=r"param_groups\[0\] lacks 'amsgrad'"):
        restore(tmp_path, template)
    warnings = "\n".join(restore(tmp_path, template, strict=False).warnings)
    assert "param_groups[0] lacks 'amsgrad' in the checkpoint; the live value stays" in warnings
    assert "param_groups[0] has 'turbo' in the checkpoint only" in warnings
    group = live.param_groups[0]
    assert (group["lr"], group["amsgrad"], group["turbo"]) == (0.1, False, 11)
    assert [_step(live_model, live) for _ in range(3)] == [_step(model, optimizer) for _ in range(3)]


def test_an_unknown_field_alone_is_a_warning(tmp_path: Path) -> None:
    model, optimizer = _trained(torch.optim.AdamW, 0.1, 3)
    optimizer.param_groups[0]["turbo"] = 11
    save(tmp_path, {"model": model, "optimizer": optimizer})
    live_model, live = _trained(torch.optim.AdamW, 0.7, 0)
    (warning,) = restore(tmp_path, {"model": live_model, "optimizer": live}).warnings
    assert "'turbo'" in warning and live.param_groups[0]["turbo"] == 11
    assert _step(live_model, live) == _step(model, optimizer)


def test_the_template_does_not_decide_what_is_rebuilt(tmp_path: Path) -> None:
    """State of a kind that a fresh optimizer has no place for is not lost."""
    model, optimizer = _trained(torch.optim.AdamW, 0.1, 1)
    for fields in optimizer.state.values():
        fields["extra"] = {"history": [torch.ones(2), 3]}
    save(tmp_path, {"model": model, "optimizer": optimizer})
    live_model, live = _trained(torch.optim.AdamW, 0.1, 0)
    restore(tmp_path, {"model": live_model, "optimizer": live})
    for fields in live.state.values():
        history = fields["extra"]["history"]
        assert history[0].tolist() == [1, 1] and history[1] == 3


def test_another_number_of_groups_or_parameters_is_told(tmp_path: Path) -> None:
    model, optimizer = _trained(torch.optim.AdamW, 0.1, 1)
    for path, saved in {"object": optimizer, "dict": optimizer.state_dict()}.items():
        save(tmp_path / path, {"model": model, "optimizer": saved})
        two_groups = torch.optim.AdamW([{"params": [p]} for p in model.parameters()])
        with pytest.raises(ms.StateMismatch, match="has 2 parameter groups, the checkpoint 1"):
            restore(tmp_path / path, {"model": model, "optimizer": two_groups})
        with pytest.raises(ms.StateMismatch, match="parameter"):
            restore(tmp_path / path, {"model": model, "optimizer": torch.optim.AdamW([model.weight])})
