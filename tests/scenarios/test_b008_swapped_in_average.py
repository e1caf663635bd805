"""Training weights, their moving average and its counter are entries of their own and all come back.

There is no helper that guesses which weights are meant: the state holds what the objects hold at
``save()``. An average that is swapped into the model keeps the training weights in its own state,
so a checkpoint from inside that window brings both back.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import midstride as ms

torch = pytest.importorskip("torch", reason="PyTorch is not installed")


class Average:
    """A moving average in the usual shape: store, copy to, restore, and a counter for the decay."""

    def __init__(self, model: Any) -> None:
        self.model = model
        self.updates = 0
        self.shadow = {name: p.detach().clone() for name, p in model.named_parameters()}
        self.stored: dict[str, Any] | None = None

    def update(self) -> None:
        self.updates += 1
        decay = min(0.99, (1 + self.updates) / (10 + self.updates))
        for name, p in self.model.named_parameters():
            self.shadow[name].lerp_(p.detach(), 1 - decay)

    def apply(self) -> None:
        self.stored = {name: p.detach().clone() for name, p in self.model.named_parameters()}
        with torch.no_grad():
            for name, p in self.model.named_parameters():
                p.copy_(self.shadow[name])

    def restore(self) -> None:
        assert self.stored is not None
        with torch.no_grad():
            for name, p in self.model.named_parameters():
                p.copy_(self.stored[name])
        self.stored = None

    def state_dict(self) -> dict[str, Any]:
        return {"updates": self.updates, "shadow": self.shadow, "stored": self.stored}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.updates, self.shadow, self.stored = state["updates"], state["shadow"], state["stored"]


def _build(seed: int) -> tuple[Any, Any, Average]:
    torch.manual_seed(seed)
    model = torch.nn.Linear(6, 3)
    return model, torch.optim.Adam(model.parameters(), lr=0.1), Average(model)


def _train(model: Any, optimizer: Any, average: Average, first: int, last: int) -> None:
    for number in range(first, last):
        x = torch.randn(4, 6, generator=torch.Generator().manual_seed(number))
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()
        average.update()


@pytest.mark.parametrize("inside", [True, False])
def test_resumed_from_inside_and_outside_the_window(tmp_path: Path, inside: bool) -> None:
    model, optimizer, average = _build(0)
    state = {"model": model, "optimizer": optimizer, "ema": average}
    with ms.Checkpointer(tmp_path) as ckpt:
        _train(model, optimizer, average, 0, 5)
        raw = model.weight.detach().clone()
        shadow = average.shadow["weight"].clone()
        if inside:
            average.apply()
        ckpt.save(5, state)
        if inside:
            average.restore()
        _train(model, optimizer, average, 5, 9)

    saved = ms.open(tmp_path).load(5)
    assert set(saved) == {"model", "optimizer", "ema"}
    assert torch.equal(torch.from_numpy(saved["model"]["weight"]), shadow if inside else raw)
    assert torch.equal(torch.from_numpy(saved["ema"]["shadow"]["weight"]), shadow)
    assert saved["ema"]["updates"] == 5
    if inside:
        assert torch.equal(torch.from_numpy(saved["ema"]["stored"]["weight"]), raw)
    else:
        assert saved["ema"]["stored"] is None

    again, again_optimizer, again_average = _build(1)
    restored = ms.Checkpointer(tmp_path).restore({"model": again, "optimizer": again_optimizer, "ema": again_average})
    assert restored is not None and again_average.updates == 5
    if inside:
        again_average.restore()
    assert torch.equal(again.weight, raw)
    _train(again, again_optimizer, again_average, 5, 9)
    assert torch.equal(again.weight, model.weight)
    assert torch.equal(again_average.shadow["weight"], average.shadow["weight"])
    assert again_average.updates == average.updates == 9
