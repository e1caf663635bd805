"""A checkpoint larger than the memory: single arrays, parts of arrays and all of them one by one are read within it.

Saving works through a staging budget, without a second copy of the state. What was saved from torch is read
with NumPy alone; nothing in a checkpoint names a device, so what was saved from a GPU comes back where asked.
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from children import run_well
from helpers import short_or_long

import midstride as ms

_COUNT, _ROWS, _COLUMNS = short_or_long(short=(48, 1024, 1024), long=(100, 2560, 1024))
"""Arrays of 4 MiB, 192 MiB together; in the long form of 10 MiB, 1 GB together."""

_NBYTES = _COUNT * _ROWS * _COLUMNS * 4

_READING_BYTES = short_or_long(short=150 * 2**20, long=300 * 10**6)
"""What the reading process may take, beside its own code: less than the state."""

_LIMIT = """
    import resource, sys
    sys.modules["torch"] = None  # not installed
    import numpy as np
    import midstride as ms
    from midstride import checkpointer, reader

    COUNT, ROWS, COLUMNS, LIMIT = map(int, sys.argv[2:6])

    def limit():
        with open("/proc/self/statm") as file:
            now = int(file.read().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (now + LIMIT,) * 2)
"""


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = tmp_path_factory.mktemp("large") / "run"
    # Expanded views: large on disk, nothing in memory.
    rows = [torch.arange(n, n + _COLUMNS, dtype=torch.float32) for n in range(_COUNT)]
    state = {f"w{n}": row.expand(_ROWS, _COLUMNS) for n, row in enumerate(rows)}
    with ms.Checkpointer(run, staging_bytes=2**24) as ckpt:
        info = ckpt.save(1, {"model": state}).result()
        assert info.nbytes > _NBYTES
    return run


_READ = (
    _LIMIT
    + """
    limit()
    run = ms.open(sys.argv[1])
    names = [f"w{n}" for n in range(COUNT)]
    def right(array, n, rows):
        return array.shape == (rows, COLUMNS) and (array == np.arange(n, n + COLUMNS, dtype=np.float32)).all()

    assert right(run.load(only="/model/w7")["model"]["w7"], 7, ROWS), "one array"
    for n, name in enumerate(names):
        assert right(run.load(only=f"/model/{name}")["model"][name], n, ROWS), "one by one"
    quarter = run.load(only={f"/model/{name}": slice(ROWS // 4, ROWS // 2) for name in names})["model"]
    assert all(right(quarter[name], n, ROWS // 4) for n, name in enumerate(names)), "a quarter of each"
    assert run.verify() == {run.latest().name: []}, "checked whole"
    try:
        run.load()
    except MemoryError:
        print("all at once does not fit")
"""
)


def test_reading(large: Path) -> None:
    assert run_well(_READ, large, _COUNT, _ROWS, _COLUMNS, _READING_BYTES) == "all at once does not fit\n"


_SAVE = (
    _LIMIT
    + """
    with ms.Checkpointer(sys.argv[1], staging_bytes=8 * 2**20) as ckpt:
        rows = [np.arange(n, n + COLUMNS, dtype=np.float32) for n in range(COUNT)]
        state = {f"w{n}": np.broadcast_to(row, (ROWS, COLUMNS)) for n, row in enumerate(rows)}
        if sys.argv[6] == "arrays":
            state = {name: view.copy() for name, view in state.items()}
        limit()
        assert ckpt.save(1, {"model": state}).result().nbytes > COUNT * ROWS * COLUMNS * 4
        assert ckpt.statistics().staging_bytes <= 8 * 2**20
"""
)


@pytest.mark.parametrize("kind", short_or_long(short=["views"], long=["views", "arrays"]))
def test_saving_through_a_budget(tmp_path: Path, kind: str) -> None:
    run_well(_SAVE, tmp_path / "run", _COUNT, _ROWS, _COLUMNS, 60 * 2**20, kind)
    run = ms.open(tmp_path / "run")
    assert run.verify() == {run.checkpoints()[0].name: []}
    part = run.load(only={"/model/w47": (slice(1000, 1001), slice(0, 4))})
    assert part["model"]["w47"].tolist() == [[47.0, 48.0, 49.0, 50.0]]


_WITHOUT_TORCH = """
    import sys
    sys.modules["torch"] = None  # not installed
    import numpy as np
    import midstride as ms
    state = ms.open(sys.argv[1]).load()
    assert type(state["model"]["weight"]) is np.ndarray and state["model"]["weight"].dtype == np.float32
    assert (state["model"]["weight"] == 3).all()
    assert state["half"].dtype.name == "bfloat16" and (state["half"] == 1.5).all()
    with ms.Checkpointer(sys.argv[1]) as ckpt:
        assert (ckpt.restore().state["model"]["bias"] == 0).all()
    try:
        ms.Checkpointer(sys.argv[1]).restore({"model": {"weight": [0], "bias": np.zeros(2)}, "half": np.zeros(4)})
    except ms.StateMismatch as error:
        assert "/model/weight" in str(error) and "/half" in str(error)
"""


def test_without_torch(tmp_path: Path) -> None:
    model = torch.nn.Linear(3, 2)
    torch.nn.init.constant_(model.weight, 3)
    torch.nn.init.zeros_(model.bias)
    with ms.Checkpointer(tmp_path / "run") as ckpt:
        info = ckpt.save(1, {"model": model, "half": torch.full((4,), 1.5, dtype=torch.bfloat16)}).result()
    run_well(_WITHOUT_TORCH, tmp_path / "run")
    manifest = json.loads((tmp_path / "run" / info.name / "manifest.json").read_text())
    del manifest["versions"]
    assert not any(word in json.dumps(manifest) for word in ('"device', '"cpu', '"cuda'))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="saving from a GPU needs one")
def test_saved_from_a_gpu(tmp_path: Path) -> None:
    with ms.Checkpointer(tmp_path / "run") as ckpt:
        ckpt.save(1, {"w": torch.arange(1000, device="cuda")}).result()
        restored = ckpt.restore({"w": torch.zeros(1000, dtype=torch.int64)})
        assert restored is not None and restored.state["w"].device.type == "cpu"
        assert restored.state["w"].tolist() == list(range(1000))
    assert (ms.open(tmp_path / "run").load()["w"] == np.arange(1000)).all()
