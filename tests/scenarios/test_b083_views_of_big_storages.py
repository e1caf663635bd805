"""A view costs its own elements, on disk and in staging memory, never those of the storage behind it. What
shares memory in part is stored as separate arrays; only two places that are the very same elements are
stored once."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from states import manifest_of, restore

import midstride as ms

_COUNT = 5_000_000
_SLACK_BYTES = 64 * 1024
"""Headers and page alignment."""


def _state(kind: str) -> tuple[Any, dict[str, Any]]:
    if kind == "torch":
        big: Any = torch.arange(_COUNT, dtype=torch.float32)
        chunks = list(big.chunk(10))
    else:
        big = np.arange(_COUNT, dtype=np.float32)
        chunks = np.split(big, 10)
    return big, {f"c{n}": chunk for n, chunk in enumerate(chunks)}


@pytest.mark.parametrize("kind", ["torch", "numpy"])
def test_ten_elements_of_a_big_tensor(tmp_path: Path, kind: str) -> None:
    big, _ = _state(kind)
    with ms.Checkpointer(tmp_path) as ckpt:
        info = ckpt.save(1, {"s": big[:10], "t": {"tail": big[-10:]}, "column": big.reshape(-1, 10)[:20, 3]}).result()
        assert info.nbytes <= 160 + 2 * 4096
        assert ckpt.statistics().staging_bytes <= _SLACK_BYTES
    state = restore(tmp_path).state
    assert state["s"].tolist() == list(range(10))
    assert state["t"]["tail"].tolist() == list(range(_COUNT - 10, _COUNT))
    assert state["column"].tolist() == list(range(3, 200, 10))
    assert state["s"].base is None or state["s"].base.nbytes == 40


@pytest.mark.parametrize("kind", ["torch", "numpy"])
def test_ten_chunks_cost_one_copy(tmp_path: Path, kind: str) -> None:
    big, chunks = _state(kind)
    with ms.Checkpointer(tmp_path) as ckpt:
        info = ckpt.save(1, {"s": big[:10], "chunks": chunks, "again": chunks}).result()
        assert info.nbytes <= 4 * _COUNT + _SLACK_BYTES
        assert ckpt.statistics().staging_bytes <= 4 * _COUNT + _SLACK_BYTES
    manifest = manifest_of(tmp_path, info)
    assert len(manifest["arrays"]) == 11
    first, *rest = manifest["tree"]["named"]["chunks"]["named"].values()
    assert [first, *rest] == list(manifest["tree"]["named"]["again"]["named"].values())
    state = restore(tmp_path).state
    assert np.array_equal(np.concatenate(list(state["chunks"].values())), np.asarray(big))
    state["s"][:] = -1
    assert state["chunks"]["c0"][0] == 0  # sharing in part is not kept
    assert state["again"]["c0"] is state["chunks"]["c0"]
