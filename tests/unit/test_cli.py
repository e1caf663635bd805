"""``midstride ls|show|verify``: what they print, and exit codes that scripts can use."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import midstride as ms
from midstride import cli


@pytest.fixture
def run(tmp_path: Path) -> Path:
    with ms.Checkpointer(tmp_path / "run") as ckpt:
        for step in (1, 2):
            state = {"model": {"w": np.full((2, 3), step, np.float32)}, "epoch": step}
            ckpt.save(step, state, metrics={"loss": 1 / step, "nan": float("nan")}).result()
    return tmp_path / "run"


def call(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, *arguments: object
) -> tuple[int, str, str]:
    monkeypatch.setattr(sys, "argv", ["midstride", *map(str, arguments)])
    monkeypatch.setenv("COLUMNS", "200")
    with pytest.raises(SystemExit) as ended:
        cli.main()
    out, err = capsys.readouterr()
    return int(ended.value.code or 0), out, err


@pytest.fixture
def midstride(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Any:
    return lambda *arguments: call(capsys, monkeypatch, *arguments)


def damage(run: Path, step: int) -> Path:
    path = next(run.glob(f"step-*{step}-*")) / "model.safetensors"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    return path


def strict(text: str) -> Any:
    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is not JSON")

    return json.loads(text, parse_constant=refuse)


def test_ls(run: Path, midstride: Any) -> None:
    code, out, _ = midstride("ls", run)
    assert code == 0
    assert "2 (latest)" in out
    assert "loss 0.5" in out
    code, out, _ = midstride("ls", run, "--json")
    data = strict(out)
    assert code == 0
    assert [row["step"] for row in data["checkpoints"]] == [1, 2]
    assert data["checkpoints"][1]["metrics"] == {"loss": 0.5, "nan": "nan"}
    assert data["unusable"] == data["debris"] == []


def test_ls_tells_damage_and_debris(run: Path, midstride: Any) -> None:
    (run / "step-000000000009-00000000").mkdir()
    (next(run.glob("step-*1-*")) / "model.safetensors").unlink()
    code, out, _ = midstride("ls", run)
    assert code == cli.DAMAGED
    assert "model.safetensors is missing" in out
    assert "step-000000000009-00000000" in out
    _, out, _ = midstride("ls", run, "--json")
    assert strict(out)["unusable"][0]["step"] == 1


def test_show(run: Path, midstride: Any) -> None:
    code, out, _ = midstride("show", run)
    assert code == 0
    assert "/model/w" in out
    assert "[2, 3]" in out
    code, out, _ = midstride("show", run, "--step", 1, "--json")
    data = strict(out)
    assert data["checkpoint"]["step"] == 1
    assert data["arrays"][0]["name"] == "/model/w"
    assert data["values"]["named"]["epoch"] == 1


def test_verify(run: Path, midstride: Any) -> None:
    code, out, _ = midstride("verify", run)
    assert code == 0
    assert out.count(": good") == 2
    path = damage(run, 2)
    code, out, _ = midstride("verify", run)
    assert code == cli.DAMAGED
    assert f"{path.parent.name}: damaged" in out
    assert "/model/w" in out
    code, out, _ = midstride("verify", run, "--json")
    assert code == cli.DAMAGED
    assert strict(out)["good"] is False
    assert midstride("verify", run, "--step", 1)[0] == 0


@pytest.mark.parametrize("command", ["ls", "show", "verify"])
def test_nothing_there(command: str, tmp_path: Path, midstride: Any) -> None:
    code, _, err = midstride(command, tmp_path / "nowhere")
    assert code == cli.MISSING
    assert "nowhere" in err
    (tmp_path / "empty").mkdir()
    assert midstride(command, tmp_path / "empty")[0] == cli.MISSING
    assert list((tmp_path / "empty").iterdir()) == []


def test_a_step_that_is_not_there(run: Path, midstride: Any) -> None:
    for command in ("show", "verify"):
        code, _, err = midstride(command, run, "--step", 7)
        assert code == cli.MISSING
        assert "7" in err


def test_everything_is_lost(run: Path, midstride: Any) -> None:
    for manifest in run.glob("*/manifest.json"):
        manifest.unlink()
    code, _, err = midstride("show", run)
    assert code == cli.DAMAGED
    assert "none can be restored" in err


def test_a_checkpoint_that_could_not_be_looked_at(run: Path, midstride: Any) -> None:
    (run / "step-000000000009-00000000").symlink_to("not-mounted")
    damage(run, 1)
    for command in ("ls", "show", "verify"):
        code, out, err = midstride(command, run)
        assert code == cli.UNREADABLE, command
        assert "step-000000000009-00000000 is a link that leads nowhere" in out + err


def test_wrong_usage_and_the_installed_command(run: Path) -> None:
    command = Path(sys.executable).with_name("midstride")
    assert subprocess.run([command, "ls"], capture_output=True).returncode == cli.USAGE
    assert subprocess.run([command, "ls", run], capture_output=True).returncode == 0
    assert subprocess.run([command, "verify", run / "nowhere"], capture_output=True).returncode == cli.MISSING
