"""PyTorch: stock tools read our files; modules, optimizers and random state come back as they were."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, load_model

import midstride as ms


def network() -> torch.nn.Sequential:
    return torch.nn.Sequential(
        torch.nn.Linear(5, 7), torch.nn.BatchNorm1d(7), torch.nn.Dropout(0.3), torch.nn.Linear(7, 2)
    )


def trained() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    model = network()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for _ in range(3):
        train(model, optimizer)
    return model, optimizer


def train(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> float:
    loss = model(torch.randn(16, 5)).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss.item()


def same(one: Any, other: Any) -> bool:
    return all(torch.equal(a, b) and a.dtype == b.dtype for a, b in zip(one.values(), other.values(), strict=True))


def test_stock_safetensors_reads_a_module_with_batch_norm(tmp_path: Path) -> None:
    model, optimizer = trained()
    with ms.Checkpointer(tmp_path / "run") as ckpt:
        name = ckpt.save(3, {"model": model, "optimizer": optimizer}).result().name
    file = tmp_path / "run" / name / "model.safetensors"
    fresh = network()
    fresh.load_state_dict(load_file(file))
    assert same(fresh.state_dict(), model.state_dict())
    other = network()
    assert load_model(other, file) == (set(), [])
    assert same(other.state_dict(), model.state_dict())


def test_a_whole_training_state_comes_back_and_goes_on_alike(tmp_path: Path) -> None:
    torch.manual_seed(3)
    model, optimizer = trained()
    state = {"model": model, "optimizer": optimizer, "rng": ms.RNG(), "step": 3}
    with ms.Checkpointer(tmp_path / "run") as ckpt:
        ckpt.save(3, state)
    reference = [train(model, optimizer) for _ in range(4)]
    model, optimizer = trained()
    pointers = [parameter.data_ptr() for parameter in model.parameters()]
    restored = ms.Checkpointer(tmp_path / "run").restore(
        {"model": model, "optimizer": optimizer, "rng": ms.RNG(), "step": 0}
    )
    assert restored is not None
    assert restored.state["step"] == 3
    assert restored.state["model"] is model
    assert [parameter.data_ptr() for parameter in model.parameters()] == pointers  # read into its own memory
    assert [train(model, optimizer) for _ in range(4)] == reference


def test_random_state_of_all_libraries(tmp_path: Path) -> None:
    def draw() -> list[Any]:
        return [
            random.random(), random.gauss(0, 1), np.random.random(), np.random.standard_normal(), torch.rand(3).tolist(),
        ]  # fmt: skip

    draw()
    with ms.Checkpointer(tmp_path / "run") as ckpt:
        ckpt.save(1, {"rng": ms.RNG()})
    expected = [draw() for _ in range(5)]
    ms.Checkpointer(tmp_path / "run").restore({"rng": ms.RNG()})
    assert [draw() for _ in range(5)] == expected


def test_random_state_is_put_back_last(tmp_path: Path) -> None:
    class Greedy:
        """Draws random numbers while it is loaded."""

        def state_dict(self) -> dict[str, int]:
            return {}

        def load_state_dict(self, state: dict[str, int]) -> None:
            torch.rand(10)
            np.random.random(10)

    with ms.Checkpointer(tmp_path / "run") as ckpt:
        ckpt.save(1, {"rng": ms.RNG(), "greedy": Greedy()})
    expected = torch.rand(3), np.random.random(3)
    ms.Checkpointer(tmp_path / "run").restore({"rng": ms.RNG(), "greedy": Greedy()})
    assert torch.equal(torch.rand(3), expected[0])
    assert np.array_equal(np.random.random(3), expected[1])


def test_low_precision_parameters_keep_full_precision_moments(tmp_path: Path) -> None:
    """PyTorch's own ``load_state_dict`` casts the state to the parameter's dtype."""
    parameter = torch.nn.Parameter(torch.randn(50).to(torch.bfloat16))
    optimizer = torch.optim.SGD([parameter], lr=0.1, momentum=0.9)
    moment = torch.randn(50)
    optimizer.state[parameter]["momentum_buffer"] = moment.clone()
    with ms.Checkpointer(tmp_path / "run") as ckpt:
        ckpt.save(1, {"optimizer": optimizer})
    optimizer.state[parameter]["momentum_buffer"].zero_()
    ms.Checkpointer(tmp_path / "run").restore({"optimizer": optimizer})
    assert optimizer.state[parameter]["momentum_buffer"].dtype == torch.float32
    assert torch.equal(optimizer.state[parameter]["momentum_buffer"], moment)


def test_a_mismatch_is_told_whole_and_changes_nothing(tmp_path: Path) -> None:
    model, optimizer = trained()
    with ms.Checkpointer(tmp_path / "run") as ckpt:
        ckpt.save(1, {"model": model, "optimizer": optimizer, "epoch": 1})
    other = torch.nn.Sequential(torch.nn.Linear(5, 8), torch.nn.Linear(8, 2).double())
    before = {key: value.clone() for key, value in other.state_dict().items()}
    with pytest.raises(ms.StateMismatch) as caught:
        ms.Checkpointer(tmp_path / "run").restore({"model": other, "scaler": 1})
    message = str(caught.value)
    for part in ("/model/0.weight: the checkpoint has shape [7, 5], the state wants [8, 5]", "/model/3.weight: is in the",
                 "/scaler: is not in the checkpoint", "/epoch: is in the checkpoint, not in the state"):  # fmt: skip
        assert part in message
    assert same(other.state_dict(), before)


def test_rename_only_cast_and_lenient(tmp_path: Path) -> None:
    model = network()
    with ms.Checkpointer(tmp_path / "run") as ckpt:
        ckpt.save(1, {"net": model, "extra": torch.arange(4.0), "epoch": 3})
    fresh = network().double()
    restored = ms.Checkpointer(tmp_path / "run").restore(
        {"model": fresh, "epoch": 0}, rename={"/net": "/model"}, cast=True, strict=False
    )
    assert restored is not None
    assert any("/extra" in warning for warning in restored.warnings)
    assert all(torch.equal(a.double(), b) for a, b in zip(model.parameters(), fresh.parameters(), strict=True))
    tensor = torch.zeros(4)
    restored = ms.Checkpointer(tmp_path / "run").restore({"extra": tensor, "other": 1}, only="extra")
    assert restored is not None
    assert torch.equal(restored.state["extra"], torch.arange(4.0))
    assert restored.state["other"] == 1
    with pytest.raises(ms.StateMismatch, match="dtype"):
        ms.Checkpointer(tmp_path / "run").restore({"extra": torch.zeros(4, dtype=torch.int32)}, only="extra", cast=True)


def test_a_damaged_block_found_late_marks_the_objects(tmp_path: Path) -> None:
    """Reading goes straight into the module, so a bad block leaves it half overwritten: said, and not saved."""
    model = network()
    ckpt = ms.Checkpointer(tmp_path / "run")
    name = ckpt.save(1, {"model": model}).result().name
    path = tmp_path / "run" / name / "model.safetensors"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    with pytest.raises(ms.RestoreError, match="partly overwritten"):
        ckpt.restore({"model": model})
    with pytest.raises(ms.StagingError, match="not whole"):
        ckpt.save(2, {"model": model})
    data[-1] ^= 1
    path.write_bytes(data)
    ckpt.restore({"model": model})
    ckpt.save(2, {"model": model}).result()
    ckpt.close()
