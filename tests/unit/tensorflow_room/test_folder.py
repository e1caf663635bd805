"""Folders of TensorFlow checkpoints, read without TensorFlow: order, digests, damage, the command line."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

import midstride as ms
from midstride.cli import DAMAGED, MISSING, UNCHECKED, USAGE, app
from midstride.tensorflow import CheckpointFolder
from midstride.tensorflow.folder import Digests, FileDigest, is_file_of, record_digests, sweep_digests

ENDS = ("data-00000-of-00001", "index", "meta")


def make(folder: Path, step: int, *, base: str = "model.ckpt") -> str:
    prefix = f"{base}-{step}"
    for end in ENDS:
        (folder / f"{prefix}.{end}").write_bytes(f"{end} of {step}\n".encode() * 1000)
    record_digests(str(folder), prefix, step)
    return prefix


def announce(folder: Path, *prefixes: str) -> None:
    """The state file as TensorFlow writes it: absolute paths, bytes beyond ASCII in octal."""
    paths = [str(folder / prefix) for prefix in prefixes]
    quoted = ['"' + "".join(chr(b) if 32 <= b < 127 else f"\\{b:03o}" for b in path.encode()) + '"' for path in paths]
    lines = [f"model_checkpoint_path: {quoted[-1]}", *(f"all_model_checkpoint_paths: {path}" for path in quoted)]
    (folder / "checkpoint").write_text("\n".join(lines) + "\n")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    path = tmp_path / 'naïve "run"'
    path.mkdir()
    announce(path, *[make(path, step) for step in (500, 1000, 30)])
    return path


def test_order_is_that_of_the_state_file(folder: Path) -> None:
    checkpoints = CheckpointFolder(folder).checkpoints()
    assert [info.step for info in checkpoints] == [500, 1000, 30], "a rollback to 0 went on to 30"
    assert checkpoints[0].name == "model.ckpt-500"
    assert checkpoints[0].nbytes == sum((folder / f"model.ckpt-500.{end}").stat().st_size for end in ENDS)
    assert CheckpointFolder(folder).latest() == "model.ckpt-30"


def test_without_a_state_file_the_time_they_were_made_counts(folder: Path) -> None:
    (folder / "checkpoint").unlink()
    assert [info.step for info in CheckpointFolder(folder).checkpoints()] == [500, 1000, 30]
    announce(folder, "model.ckpt-500")
    assert CheckpointFolder(folder).latest() == "model.ckpt-500", "what is announced is the newest"


def test_a_state_file_that_was_set_back_by_hand(folder: Path) -> None:
    state = folder / "checkpoint"
    newest, *rest = state.read_text().splitlines()
    state.write_text("\n".join([newest.replace("-30", "-1000"), *rest]) + "\n")
    assert CheckpointFolder(folder).latest() == "model.ckpt-1000"


def test_a_moved_folder(folder: Path, tmp_path: Path) -> None:
    moved = folder.rename(tmp_path / "elsewhere")
    assert CheckpointFolder(moved).latest() == "model.ckpt-30"


@pytest.mark.parametrize("end", ENDS)
@pytest.mark.parametrize("damage", ["flip", "truncate", "grow", "remove", "swap"])
def test_every_damage_is_noticed(folder: Path, end: str, damage: str, caplog: pytest.LogCaptureFixture) -> None:
    file = folder / f"model.ckpt-30.{end}"
    data = bytearray(file.read_bytes())
    if damage == "flip":
        data[len(data) // 2] ^= 1
    elif damage == "truncate":
        del data[-1]
    elif damage == "grow":
        data += b"\0"
    elif damage == "swap":
        data[:] = (folder / f"model.ckpt-500.{end}").read_bytes()
    file.unlink()
    if damage != "remove":
        file.write_bytes(data)
    reader = CheckpointFolder(folder)
    problems = reader.verify()
    assert [prefix for prefix, found in problems.items() if found] == ["model.ckpt-30"]
    assert file.name in problems["model.ckpt-30"][0]
    assert reader.latest() == "model.ckpt-1000"
    assert "model.ckpt-30 was passed over" in caplog.text and file.name in caplog.text
    assert [entry.folder for entry in reader.scan().unusable] == ([] if damage == "flip" else ["model.ckpt-30"])


def test_every_bit_of_the_digest_file_counts(folder: Path) -> None:
    file = folder / "model.ckpt-30.midstride.json"
    whole = file.read_bytes()
    for position in range(len(whole)):
        data = bytearray(whole)
        data[position] ^= 4
        file.write_bytes(data)
        assert CheckpointFolder(folder).verify(30)["model.ckpt-30"], position
    file.write_bytes(whole)
    assert CheckpointFolder(folder).verify(30) == {"model.ckpt-30": []}


def test_a_digest_file_of_a_newer_release(folder: Path) -> None:
    (folder / "model.ckpt-30.midstride.json").write_text('{"format": 2, "wonders": 1}\n{}\n')
    (problem,) = CheckpointFolder(folder).verify(30)["model.ckpt-30"]
    assert "upgrade Midstride" in problem


@pytest.mark.parametrize("name", ["../secret", "model.ckpt-500.index", "/etc/passwd", "model.ckpt-30.index/../x"])
def test_a_digest_file_reaches_nothing_but_its_own_checkpoint(folder: Path, name: str) -> None:
    own = CheckpointFolder(folder).digests("model.ckpt-30")
    hostile = Digests(30, own.created, (*own.files, FileDigest(name, 1, "0")))
    (folder / "model.ckpt-30.midstride.json").write_bytes(hostile.encode())
    (problem,) = CheckpointFolder(folder).verify(30)["model.ckpt-30"]
    assert "not its own" in problem


def test_a_checkpoint_that_was_not_written_here(folder: Path) -> None:
    (folder / "model.ckpt-30.midstride.json").unlink()
    reader = CheckpointFolder(folder)
    assert [info.step for info in reader.checkpoints()] == [500, 1000, 30]
    assert reader.verify(30) == {}
    assert reader.unchecked() == reader.unchecked(30) == ["model.ckpt-30"]
    assert reader.latest() == "model.ckpt-1000"
    verified = CliRunner().invoke(app, ["verify", str(folder)])
    assert verified.exit_code == UNCHECKED
    assert verified.output.count("good") == 2 and "model.ckpt-30: not checked" in verified.output
    told = json.loads(CliRunner().invoke(app, ["verify", str(folder), "--json"]).output)
    assert told["unchecked"] == ["model.ckpt-30"] and told["good"]
    (folder / "model.ckpt-500.index").write_bytes(b"")
    assert CliRunner().invoke(app, ["verify", str(folder)]).exit_code == DAMAGED


def test_names_of_one_checkpoint_are_not_those_of_another() -> None:
    own = ["m-1", "m-1.index", "m-1.meta", "m-1.data-00001-of-00002", "m-1-00000-of-00002"]
    others = [
        "m-10",
        "m-10.index",
        "m-1.index.tempstate3",
        "m-1.midstride.json",
        "m-1_temp",
        "m-1.indexes",
        "xm-1",
        "m",
    ]
    assert [name for name in own + others if is_file_of("m-1", name)] == own


def test_digests_go_with_their_checkpoint(folder: Path) -> None:
    for end in ENDS:
        (folder / f"model.ckpt-500.{end}").unlink()
    make(folder, 7, base="other")
    sweep_digests(str(folder), "model.ckpt")
    assert not (folder / "model.ckpt-500.midstride.json").exists()
    assert (folder / "model.ckpt-1000.midstride.json").exists()
    assert (folder / "other-7.midstride.json").exists()


def test_nothing_there(tmp_path: Path) -> None:
    with pytest.raises(ms.NotFound):
        CheckpointFolder(tmp_path / "no")
    assert CheckpointFolder(tmp_path).checkpoints() == []
    assert CheckpointFolder(tmp_path).latest() is None
    with pytest.raises(ms.NotCommitted):
        CheckpointFolder(tmp_path).verify(3)


def test_the_command_line(folder: Path) -> None:
    run = CliRunner()
    listed = run.invoke(app, ["ls", str(folder)])
    assert listed.exit_code == 0
    assert "30 (latest)" in listed.output and "model.ckpt-1000" in listed.output
    data = json.loads(run.invoke(app, ["ls", str(folder), "--json"]).output)
    assert [info["step"] for info in data["checkpoints"]] == [500, 1000, 30]
    verified = run.invoke(app, ["verify", str(folder)])
    assert verified.exit_code == 0 and verified.output.count("good") == 3
    (folder / "model.ckpt-30.index").write_bytes(b"")
    assert run.invoke(app, ["ls", str(folder)]).exit_code == DAMAGED
    damaged = run.invoke(app, ["verify", str(folder), "--step", "30", "--json"])
    assert damaged.exit_code == DAMAGED and not json.loads(damaged.output)["good"]
    assert run.invoke(app, ["show", str(folder)]).exit_code == USAGE
    leftovers = ["model.ckpt-7.index.tempstate123", "checkpoint.midstride-draft", "model.ckpt-7.midstride_temp"]
    for name in leftovers:
        (folder / name).write_bytes(b"")
    output = run.invoke(app, ["ls", str(folder)]).output
    assert all(f"debris: {name}" in output for name in leftovers)


def test_an_empty_folder_is_no_tensorflow_folder(tmp_path: Path) -> None:
    assert CliRunner().invoke(app, ["ls", str(tmp_path)]).exit_code == MISSING
    with ms.Checkpointer(tmp_path / "run") as ckpt:
        ckpt.save(1, {"a": 1}).result()
    (tmp_path / "run" / "checkpoint").write_text("a stranger's")
    assert not CheckpointFolder.is_one(tmp_path / "run")


def test_reading_a_folder_imports_no_tensorflow(folder: Path) -> None:
    code = """
        import sys
        from midstride.tensorflow import CheckpointFolder
        assert CheckpointFolder(sys.argv[1]).latest() == "model.ckpt-30"
        assert not {"tensorflow", "keras"} & set(sys.modules)
    """
    lines = "\n".join(line.strip() for line in code.strip().splitlines())
    subprocess.run([sys.executable, "-c", lines, str(folder)], check=True)
