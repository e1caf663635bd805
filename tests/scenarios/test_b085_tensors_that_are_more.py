"""Meta, sparse, quantized and nested tensors, and subclasses of ``Tensor``, are refused in ``save()`` with
their path: there is no file with a part of what they are. So they are as templates of a restore."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from states import nothing_written, restore, save

import midstride as ms


class _Sub(torch.Tensor):
    """Its class says more than its elements do."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return super().__torch_function__(func, types, args, kwargs or {})


class _SubParameter(torch.nn.Parameter):
    pass


@pytest.fixture(scope="module", autouse=True)
def world() -> Iterator[None]:
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


def _fake() -> torch.Tensor:
    from torch._subclasses.fake_tensor import FakeTensorMode

    return FakeTensorMode().from_tensor(torch.ones(3))


def _dtensor() -> torch.Tensor:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, distribute_tensor

    return distribute_tensor(torch.ones(3), init_device_mesh("cpu", (1,)), [Replicate()])


_MAKERS: dict[str, Callable[[], torch.Tensor]] = {
    "meta": lambda: torch.empty(3, device="meta"),
    "sparse_coo": lambda: torch.eye(3).to_sparse(),
    "sparse_csr": lambda: torch.eye(3).to_sparse_csr(),
    "quantized": lambda: torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8),
    "nested": lambda: torch.nested.nested_tensor([torch.ones(1), torch.ones(2)]),
    "jagged": lambda: torch.nested.nested_tensor([torch.ones(1), torch.ones(2)], layout=torch.jagged),
    "subclass": lambda: torch.ones(3).as_subclass(_Sub),
    "fake": _fake,
    "DTensor": _dtensor,
}


@pytest.mark.filterwarnings("ignore::UserWarning")  # PyTorch's own, about betas and deprecations
@pytest.mark.parametrize("kind", _MAKERS)
def test_refused_by_path(tmp_path: Path, kind: str) -> None:
    tensor = _MAKERS[kind]()
    module = torch.nn.Module()
    module.register_buffer("inner", tensor)
    with ms.Checkpointer(tmp_path / "run") as ckpt:
        for state in ({"a": {"inner": tensor, "fine": torch.ones(1)}}, {"a": module}):
            with pytest.raises(ms.UnsupportedState, match="/a/inner: .*Nothing was written"):
                ckpt.save(1, state)
        assert nothing_written(tmp_path / "run")
    save(tmp_path / "run", {"a": {"inner": torch.ones(3)}})
    with pytest.raises(ms.StateMismatch, match="/a/inner"):
        restore(tmp_path / "run", {"a": {"inner": tensor}})


def test_odd_parameters(tmp_path: Path) -> None:
    refused = {"sub": _SubParameter(torch.ones(3))}, {"sub": torch.nn.LazyLinear(3)}
    with ms.Checkpointer(tmp_path) as ckpt:
        for state in refused:
            with pytest.raises(ms.UnsupportedState, match="/a/sub"):
                ckpt.save(1, {"a": state})


def test_a_module_on_meta_is_refused_and_restored_once_it_has_memory(tmp_path: Path) -> None:
    saved = torch.nn.Linear(2, 3)
    save(tmp_path, {"model": saved})
    with torch.device("meta"):
        live = torch.nn.Linear(2, 3)
    with ms.Checkpointer(tmp_path / "other") as ckpt, pytest.raises(ms.UnsupportedState, match="/model/weight"):
        ckpt.save(1, {"model": live})
    with pytest.raises(ms.StateMismatch, match="/model/weight"):
        restore(tmp_path, {"model": live})
    live.to_empty(device="cpu")
    restore(tmp_path, {"model": live})
    assert torch.equal(live.weight, saved.weight)


def test_plain_tensors_of_every_kind_are_kept(tmp_path: Path) -> None:
    class Net(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(torch.ones(2))
            self.running = torch.nn.Buffer(torch.ones(3))

    save(tmp_path, {"p": torch.nn.Parameter(torch.ones(2)), "g": torch.ones(2, requires_grad=True) * 2, "net": Net()})
    state = restore(tmp_path).state
    assert state["g"].tolist() == [2, 2] and list(state["net"]) == ["weight", "running"]
