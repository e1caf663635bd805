"""A run that stops between two updates resumes with its partial gradients, if they are in the state.

The resumed run is bit equal to one that was never stopped. Gradients are part of a state only where
the caller puts them there: a module's own state has none.
"""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import pytest
from children import run_script

import midstride as ms

torch = pytest.importorskip("torch", reason="PyTorch is not installed")

ACCUMULATE = 4
STOPPED_AFTER = 6  # one update, then two micro-batches of the next


def build() -> tuple[Any, Any]:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1))
    return model, torch.optim.Adam(model.parameters(), lr=0.01)


def train(model: Any, optimizer: Any, first: int, last: int) -> None:
    for number in range(first, last):
        x = torch.randn(5, 8, generator=torch.Generator().manual_seed(number))
        (model(x).square().mean() / ACCUMULATE).backward()
        if (number + 1) % ACCUMULATE == 0:
            optimizer.step()
            optimizer.zero_grad()


def state_of(model: Any, optimizer: Any) -> dict[str, Any]:
    grads = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return {"model": model, "optimizer": optimizer, "grads": grads}


KILLED = """
import os, signal, sys
import midstride as ms
from test_b007_parked_gradients import STOPPED_AFTER, build, state_of, train

model, optimizer = build()
ckpt = ms.Checkpointer(sys.argv[1])
train(model, optimizer, 0, STOPPED_AFTER)
ckpt.save(STOPPED_AFTER, state_of(model, optimizer)).result()
train(model, optimizer, STOPPED_AFTER, 7)
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_resumed_inside_the_window(tmp_path: Path) -> None:
    assert run_script(KILLED, tmp_path).returncode == -signal.SIGKILL
    model, optimizer = build()
    torch.nn.init.zeros_(model[0].weight)
    template = state_of(model, optimizer)
    template["grads"] = {name: torch.empty_like(p) for name, p in model.named_parameters()}
    with ms.Checkpointer(tmp_path) as ckpt:
        restored = ckpt.restore(template)
        assert restored is not None and restored.step == STOPPED_AFTER and restored.warnings == ()
    for name, parameter in model.named_parameters():
        parameter.grad = restored.state["grads"][name]
    train(model, optimizer, STOPPED_AFTER, 16)

    whole, whole_optimizer = build()
    train(whole, whole_optimizer, 0, 16)
    for name, parameter in whole.state_dict().items():
        assert torch.equal(parameter, model.state_dict()[name]), name


def test_no_gradients_between_windows(tmp_path: Path) -> None:
    model, optimizer = build()
    train(model, optimizer, 0, ACCUMULATE)
    with ms.Checkpointer(tmp_path) as ckpt:
        ckpt.save(ACCUMULATE, state_of(model, optimizer)).result()
        restored = ckpt.restore(state_of(model, optimizer))
    assert restored is not None and restored.state["grads"] == {}
    # Gradients that the checkpoint lacks are told by name, not taken for zeros.
    train(model, optimizer, ACCUMULATE, STOPPED_AFTER)
    with pytest.raises(ms.StateMismatch, match=r"/grads/0\.weight: is not in the checkpoint"):
        ms.Checkpointer(tmp_path).restore(state_of(model, optimizer))
