"""Whatever the order of an array in memory, its values come back: files hold C order, little-endian.
Without a template arrays come back in C order and native byte order; memory that an object already has
keeps its layout."""

from __future__ import annotations

import tracemalloc
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file
from states import restore, save

import midstride as ms

_SMALL_BUDGET = 256 * 1024
"""Less than one of the arrays: then they are copied in parts, which begin and end anywhere."""


def _arrays() -> dict[str, np.ndarray]:
    x = np.arange(120_000, dtype=np.float32).reshape(300, 400)
    cube = np.arange(2 * 3 * 5 * 7, dtype=np.int16).reshape(2, 3, 5, 7)
    unaligned = np.frombuffer(bytearray(x.nbytes + 1), np.uint8)[1:].view(np.float32).reshape(x.shape)
    unaligned[:] = x
    read_only = x.copy()
    read_only.flags.writeable = False
    return {
        "transposed": x.T,
        "fortran": np.asfortranarray(x),
        "reversed": x[::-1],
        "strided": x[:, ::2],
        "all ways": x[::-2, 5:-5:3].T,
        "broadcast": np.broadcast_to(np.float64(1.5), (3, 4)),
        "broadcast rows": np.broadcast_to(x[7], (50, 400)),
        "big-endian": x.astype(">f4"),
        "big-endian view": x.astype(">f4")[3:, ::3].T,
        "big-endian complex": (x[:2] + 1j).astype(">c16"),
        "read-only": read_only,
        "unaligned": unaligned,
        "cube": cube.transpose(2, 0, 3, 1)[:, ::-1],
        "one element": x[5:6, 7:8].T,
        "0-d view": x[3, 4, ...],
        "empty view": x[5:5, ::2],
    }


@pytest.mark.parametrize("staging_bytes", [None, _SMALL_BUDGET])
def test_numpy(tmp_path: Path, staging_bytes: int | None) -> None:
    arrays = _arrays()
    info = save(tmp_path, {"x": arrays}, staging_bytes=staging_bytes)
    stock = load_file(tmp_path / info.name / "x.safetensors")
    back = restore(tmp_path).state["x"]
    templated = restore(tmp_path, {"x": dict(arrays)}).state["x"]
    for name, array in arrays.items():
        for found in (back[name], templated[name]):
            assert found.dtype == array.dtype.newbyteorder("=") and found.dtype.isnative, name
            assert found.flags.c_contiguous and found.flags.writeable, name
            assert found.shape == array.shape and np.array_equal(found, array), name
        if array.dtype.kind != "c":
            assert np.array_equal(stock[name], array), name


def _tensors() -> dict[str, torch.Tensor]:
    x = torch.arange(120_000, dtype=torch.float32).reshape(300, 400)
    images = torch.arange(2 * 3 * 200 * 100, dtype=torch.float32).reshape(2, 3, 200, 100)
    z = torch.complex(x[:50], -x[50:100])
    return {
        "transposed": x.T,
        "channels last": images.contiguous(memory_format=torch.channels_last),
        "channels last 3d": images[:, None].contiguous(memory_format=torch.channels_last_3d),
        "strided": x[::3, 1::2],
        "expanded": x[0].expand(50, 400),
        "expanded scalar": torch.tensor(2.5).expand(3, 4),
        "conj": z.conj(),
        "conj of a slice": z[::2, 3:].T.conj(),
        "neg": z.conj().imag,
        "permuted": images.permute(3, 0, 2, 1)[1:-1],
        "narrowed": x.narrow(0, 3, 10).t(),
        "bfloat16": x.T.to(torch.bfloat16)[::2],
        "0-d view": x[3, 4],
        "empty view": x[5:5],
    }


@pytest.mark.parametrize("staging_bytes", [None, _SMALL_BUDGET])
def test_torch(tmp_path: Path, staging_bytes: int | None) -> None:
    tensors = _tensors()
    assert tensors["conj"].is_conj() and tensors["neg"].is_neg()
    save(tmp_path, {"x": tensors}, staging_bytes=staging_bytes)
    back = restore(tmp_path, {"x": dict(tensors)}).state["x"]
    for name, tensor in tensors.items():
        found = back[name]
        assert found.dtype == tensor.dtype and found.shape == tensor.shape and torch.equal(found, tensor), name
        assert found.is_contiguous() and not found.is_conj() and not found.is_neg(), name


def test_a_module_keeps_its_layout(tmp_path: Path) -> None:
    def made(seed: int) -> torch.nn.Module:
        torch.manual_seed(seed)
        model = torch.nn.Conv2d(3, 4, 5).to(memory_format=torch.channels_last)
        model.register_buffer("flipped", torch.rand(6, 4).T)
        model.register_buffer("turned", torch.rand(5, dtype=torch.complex64).conj())
        return model

    saved, live = made(1), made(2)
    memory = {name: (tensor.data_ptr(), tensor.stride()) for name, tensor in live.state_dict().items()}
    save(tmp_path, {"model": saved})
    restore(tmp_path, {"model": live})
    for name, tensor in live.state_dict().items():
        assert torch.equal(tensor, saved.state_dict()[name]), name
        assert (tensor.data_ptr(), tensor.stride()) == memory[name]


def test_a_broadcast_is_never_blown_up_in_memory(tmp_path: Path) -> None:
    wide = np.broadcast_to(np.float32(3), (4096, 4096))  # 64 MiB of one number
    tall = torch.tensor(4.0).expand(2048, 4096)
    tracemalloc.start()
    try:
        with ms.Checkpointer(tmp_path, staging_bytes=4 * 2**20) as ckpt:
            ckpt.save(1, {"wide": wide, "tall": tall}).result()
            assert ckpt.statistics().staging_bytes <= 4 * 2**20
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 4 * 2**20, f"{peak} bytes beside the staging memory"
    with ms.Checkpointer(tmp_path) as ckpt:
        part = ckpt.restore(only={"/wide": slice(4000, 4001), "/tall": slice(0, 1)})
    assert part is not None
    assert np.unique(part.state["wide"]).tolist() == [3] and np.unique(part.state["tall"]).tolist() == [4]
