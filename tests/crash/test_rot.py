"""One flipped bit in every region of every file of a checkpoint is noticed, by ``verify`` and by ``restore``."""

from __future__ import annotations

import os
import struct
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

import midstride as ms
from midstride.limits import BLOCK_BYTES
from midstride.restore.reader import CheckpointReader
from midstride.save import plan
from tests.crash.runs import state_of

LONG = bool(os.environ.get("MIDSTRIDE_LONG"))


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Two checkpoints; the newer one has a file of several blocks and an item in two shards with an index."""
    monkeypatch.setattr(plan.limits, "SPLIT_BYTES", BLOCK_BYTES * 2)
    folder = tmp_path / "run"
    with ms.Checkpointer(folder) as ckpt:
        ckpt.save(1, state_of(1)).result()
        big = np.arange(BLOCK_BYTES // 4 + 1000, dtype=np.float32)
        ckpt.save(2, {**state_of(2), "big": {"one": big, "two": big + 1}}).result()
    return folder


def regions(path: Path) -> Iterator[tuple[str, int]]:
    """A byte in each region of a file."""
    size = path.stat().st_size
    if path.suffix != ".safetensors":
        step = 1 if LONG else max(1, size // 60)
        yield from ((f"byte {at}", at) for at in range(0, size, step))
        return
    header = 8 + struct.unpack("<Q", path.read_bytes()[:8])[0]
    text_end = len(path.read_bytes()[8:header].rstrip()) + 8
    yield from (("length", at) for at in range(8))
    yield from (("header", at) for at in range(8, text_end, 1 if LONG else 23))
    yield from (("padding", at) for at in range(text_end, header, max(1, (header - text_end) // 9)))
    yield from (("data", at) for at in range(header, size, max(1, (size - header) // 9)))
    yield "last byte", size - 1


def flips(folder: Path) -> Iterator[tuple[str, Path, int]]:
    for path in sorted(folder.iterdir()):
        for number, (region, at) in enumerate(regions(path)):
            yield f"{path.name}, {region} ({at})", path, at * 8 + number % 8


def noticed(run: Path, path: Path, bit: int) -> tuple[bool, bool]:
    """Whether ``verify`` and ``restore`` notice one flipped bit."""
    with path.open("r+b") as file:
        file.seek(bit // 8)
        byte = file.read(1)[0]
        file.seek(bit // 8)
        file.write(bytes([byte ^ 1 << bit % 8]))
    try:
        bad = ms.open(run).verify()[path.parent.name]
        restored = ms.Checkpointer(run).restore()
        assert restored is not None
        strict = pytest.raises(ms.CorruptCheckpoint)
        if restored.step == 1:
            assert "step 2 was passed over" in restored.warnings[0]
            with strict:
                ms.Checkpointer(run, fallback=False).restore()
        return bad != [], restored.step == 1
    finally:
        with path.open("r+b") as file:
            file.seek(bit // 8)
            file.write(bytes([byte]))


def test_every_region_of_every_file(run: Path) -> None:
    newest = run / ms.open(run).latest().name  # type: ignore[union-attr]
    names = {path.name for path in newest.iterdir()}
    assert {"manifest.json", "model.safetensors", "optimizer.safetensors", "big.safetensors.index.json"} <= names
    cases = list(flips(newest))
    missed = [where for where, path, bit in cases if noticed(run, path, bit) != (True, True)]
    assert missed == []
    assert len(cases) > 150
    assert ms.open(run).verify()[newest.name] == []  # the flips were all taken back


def test_without_digests_the_sweep_would_notice_nothing(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The broken variant: a reader that compares no digest of the data."""
    monkeypatch.setattr(CheckpointReader, "_check", lambda *_: None)
    newest = run / ms.open(run).latest().name  # type: ignore[union-attr]
    data = [(path, bit) for where, path, bit in flips(newest) if ", data" in where]
    assert [noticed(run, path, bit) for path, bit in data] == [(False, False)] * len(data)


@pytest.mark.parametrize("hurt", ["cut", "empty", "missing", "grown", "swapped"])
def test_a_file_that_is_not_what_it_was(run: Path, hurt: str) -> None:
    newest = run / ms.open(run).latest().name  # type: ignore[union-attr]
    for name in ("model.safetensors", "manifest.json"):
        path = newest / name
        before = path.read_bytes()
        if hurt == "missing":
            path.unlink()
        else:
            other = next((run / ms.open(run).checkpoints()[0].name).glob(name)).read_bytes()
            path.write_bytes({"cut": before[:-1], "empty": b"", "grown": before + b"\0", "swapped": other}[hurt])
        restored = ms.Checkpointer(run).restore()
        assert restored is not None
        assert restored.step == 1
        # A step folder without a manifest is no checkpoint at all; anything else is told as damaged.
        if (hurt, name) != ("missing", "manifest.json"):
            assert ms.open(run).verify()[newest.name]
            assert restored.warnings
        path.write_bytes(before)
