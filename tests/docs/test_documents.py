"""What the documents say is run."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests import plain_reader

import midstride as ms
from midstride import errors

ROOT = Path(__file__).parents[2]


def code_blocks(page: Path) -> list[str]:
    return re.findall(r"^```python\n(.*?)^```", page.read_text(), re.M | re.S)


def test_readme_runs_as_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All blocks in one namespace, one after the other, as a reader would type them."""
    monkeypatch.chdir(tmp_path)
    model = torch.nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    scheduler = torch.optim.lr_scheduler.ConstantLR(optimizer)

    def train_one(step: int) -> torch.Tensor:
        optimizer.zero_grad()
        loss = model(torch.ones(4, 3)).square().mean()
        loss.backward()
        optimizer.step()
        scheduler.step()
        return loss

    names: dict[str, Any] = {
        "model": model, "optimizer": optimizer, "scheduler": scheduler, "train_one": train_one, "total": 501,
    }  # fmt: skip
    blocks = code_blocks(ROOT / "README.md")
    assert len(blocks) == 3
    for block in blocks:
        exec(compile(block, "README.md", "exec"), names)
    assert [info.step for info in ms.open("runs/gpt").checkpoints()] == [500, 501]
    assert names["restored"] is None
    assert sorted(names["weights"]["model"]) == ["bias", "weight"]


def test_the_guide_runs_as_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    model = torch.nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    names: dict[str, Any] = {"model": model, "optimizer": optimizer, "ema_weights": {"w": torch.arange(3.0)}}
    for block in code_blocks(ROOT / "docs" / "guides" / "pytorch.md"):
        exec(compile(block, "pytorch.md", "exec"), names)
    assert torch.equal(names["late"]["w"], torch.arange(3.0))
    assert names["reader"].latest().step == 10


def test_readme_begins_with_the_two_commands() -> None:
    commands = re.search(r"```\n(.*?)```", (ROOT / "README.md").read_text(), re.S)
    assert commands is not None
    lines = commands[1].split("\n")
    assert lines[0].startswith("make demo ")
    assert lines[1].startswith("make test ")
    targets = re.findall(r"^(\w+):", (ROOT / "Makefile").read_text(), re.M)
    assert {"demo", "test", "check", "bench", "crash", "docs"} <= set(targets)


def test_every_error_class_stands_in_the_tree_and_is_public() -> None:
    tree = errors.__doc__ or ""
    classes = {name for name, value in vars(errors).items() if isinstance(value, type)}
    assert {name for name in classes if name in tree} == classes
    assert classes <= set(ms.__all__)


def test_relative_links_lead_somewhere() -> None:
    for page in [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")]:
        for link in re.findall(r"\]\((?!https?:)([^)#]+)", page.read_text()):
            assert (page.parent / link).exists(), f"{page.name}: {link}"


STATE = {
    "model": {"w": np.arange(12, dtype=np.float32).reshape(3, 4), "n": np.int64(7)},
    "deep": [{"x": np.ones((), np.complex128)}, (1, 2.5, None, True, "text", b"\x00\xff", 2**200, -(2**63))],
    "odd keys": {0: "zero", "0": "text", None: float("inf"), (1, "a"): 1 + 2j},
    "big": np.arange(5 * 2**20, dtype=np.float32),
}


def test_the_plain_reader_reads_what_we_write(tmp_path: Path) -> None:
    with ms.Checkpointer(tmp_path / "run") as ckpt:
        ckpt.save(1, {"model": {"w": np.zeros(3)}}).result()
        ckpt.save(2, STATE).result()
    read = plain_reader.load(tmp_path / "run")
    assert read["model"]["w"] == ("float32", (3, 4), STATE["model"]["w"].tobytes())  # type: ignore[index, union-attr]
    assert read["model"]["n"] == ("int64", (7).to_bytes(8, "little"))
    assert read["deep"][1] == STATE["deep"][1]  # type: ignore[index]
    assert read["odd keys"] == STATE["odd keys"]
    assert read["deep"][0]["x"][:2] == ("complex128", ())
    assert read["big"][2] == STATE["big"].tobytes()  # type: ignore[union-attr]


def test_the_plain_reader_uses_nothing_of_ours_and_is_short(tmp_path: Path) -> None:
    source = Path(plain_reader.__file__).read_text()
    assert "midstride" not in source.lower()
    assert sum(1 for line in source.splitlines() if line.strip()) <= 60
    with ms.Checkpointer(tmp_path / "run") as ckpt:
        ckpt.save(3, STATE).result()
    script = [sys.executable, "-S", plain_reader.__file__, str(tmp_path / "run")]
    site = Path(np.__file__).parents[1]
    done = subprocess.run(
        script, capture_output=True, text=True, env={**os.environ, "PYTHONPATH": str(site)}, check=True
    )
    assert "float32 [3, 4] w" in done.stdout


def test_the_plain_reader_notices_damage(tmp_path: Path) -> None:
    with ms.Checkpointer(tmp_path / "run") as ckpt:
        name = ckpt.save(2, STATE).result().name
    path = tmp_path / "run" / name / "model.safetensors"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    with pytest.raises(ValueError, match="damaged"):
        plain_reader.load(tmp_path / "run")
