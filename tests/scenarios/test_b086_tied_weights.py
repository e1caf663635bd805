"""Whether two weights are one is decided by memory, never by name or by value. One memory is stored once
and stays one; equal values in two memories are two arrays; overlapping views are separate arrays with
their own values.

Restoring two different arrays into weights that are tied here is an error, not a choice of one.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from states import manifest_of, restore, save

import midstride as ms


class _Tied(torch.nn.Module):
    def __init__(self, fill: float, *, tie: bool = True) -> None:
        super().__init__()
        self.tie_word_embeddings = True  # what the configuration says, whatever is true
        self.embed = torch.nn.Embedding(5, 3)
        self.head = torch.nn.Linear(3, 5, bias=False)
        with torch.no_grad():
            self.embed.weight.fill_(fill)
            self.head.weight.fill_(fill)
        if tie:
            self.head.weight = self.embed.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.embed(tokens))


def _arrays(path: Path, info: ms.CheckpointInfo, item: str) -> list[int]:
    """The numbers of the arrays that an item's places refer to."""
    named = manifest_of(path, info)["tree"]["named"][item]["items"][0]["named"]
    return [place["i"] for place in named.values() if isinstance(place, dict) and place["$"] == "array"]


def _trained(fill: float) -> tuple[_Tied, torch.optim.Optimizer, torch.optim.swa_utils.AveragedModel]:
    model = _Tied(fill)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    average = torch.optim.swa_utils.AveragedModel(model)
    for _ in range(2):
        model(torch.tensor([1, 2])).sum().backward()
        optimizer.step()
        average.update_parameters(model)
    return model, optimizer, average


def test_a_real_alias(tmp_path: Path) -> None:
    model, optimizer, average = _trained(1.0)
    info = save(tmp_path, {"model": model, "optimizer": optimizer, "average": average})
    assert len(set(_arrays(tmp_path, info, "model"))) == 1
    embed, head = _arrays(tmp_path, info, "average")[-2:]
    assert embed == head != _arrays(tmp_path, info, "model")[0]
    assert info.nbytes < 3 * 4096 + (5 * 3 * 4) * 4 + 16  # model, average, two moments

    live, live_optimizer, live_average = _trained(2.0)
    memory = live.embed.weight.data_ptr()
    weight = live.embed.weight
    restore(tmp_path, {"model": live, "optimizer": live_optimizer, "average": live_average})
    assert live.head.weight is live.embed.weight is weight and weight.data_ptr() == memory
    assert live_average.module.head.weight is live_average.module.embed.weight
    assert torch.equal(live.head.weight, model.head.weight)
    assert torch.equal(live_average.module.head.weight, average.module.head.weight)
    assert len(live_optimizer.state) == 1

    restored = restore(tmp_path).state["model"]
    assert restored["embed.weight"] is restored["head.weight"]


def test_an_alias_into_untied_weights_fills_both(tmp_path: Path) -> None:
    save(tmp_path, {"model": _Tied(7.0)})
    live = _Tied(1.0, tie=False)
    restore(tmp_path, {"model": live})
    assert live.embed.weight.unique().tolist() == live.head.weight.unique().tolist() == [7]
    assert live.embed.weight.data_ptr() != live.head.weight.data_ptr()


@pytest.mark.parametrize("diverged", [False, True])
def test_two_memories_are_two_arrays(tmp_path: Path, diverged: bool) -> None:
    model = _Tied(3.0, tie=False)
    if diverged:
        model.head.weight.data.fill_(4.0)
    info = save(tmp_path, {"model": model})
    assert len(set(_arrays(tmp_path, info, "model"))) == 2

    live = _Tied(1.0, tie=False)
    restore(tmp_path, {"model": live})
    assert live.embed.weight.unique().tolist() == [3]
    assert live.head.weight.unique().tolist() == [4 if diverged else 3]
    assert live.embed.weight.data_ptr() != live.head.weight.data_ptr()

    tied = _Tied(1.0)
    if diverged:
        with pytest.raises(ms.StateMismatch, match=r"/model/head\.weight: .*tied"):
            restore(tmp_path, {"model": tied})
        assert tied.embed.weight.unique().tolist() == [1]
    else:
        restore(tmp_path, {"model": tied})
        assert tied.head.weight is tied.embed.weight and tied.embed.weight.unique().tolist() == [3]


class _Overlapping(torch.nn.Module):
    def __init__(self, start: int) -> None:
        super().__init__()
        whole = torch.arange(start, start + 10.0)
        self.register_buffer("left", whole[:6])
        self.register_buffer("right", whole[3:])
        self.register_buffer("same_start", whole[:4])


def test_a_partial_overlap(tmp_path: Path) -> None:
    info = save(tmp_path, {"model": _Overlapping(0)})
    assert len(set(_arrays(tmp_path, info, "model"))) == 3
    plain = restore(tmp_path).state["model"]
    assert [array.tolist() for array in plain.values()] == [[*range(6)], [*range(3, 10)], [*range(4)]]
    plain["left"][:] = -1
    assert plain["right"][0] == 3 and plain["same_start"][0] == 0
    live = _Overlapping(100)
    restore(tmp_path, {"model": live})
    assert [buffer.tolist() for buffer in live.buffers()] == [[*range(6)], [*range(3, 10)], [*range(4)]]
