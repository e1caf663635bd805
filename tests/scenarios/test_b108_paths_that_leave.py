"""Names in a manifest never lead out of the folder, and nothing but a regular file is ever read.

A manifest with such a name is refused before anything is opened; links, pipes and devices in the place of
files are refused without blocking; retention deletes nothing outside, whatever a manifest says.
"""

from __future__ import annotations

import json
import os
import shutil
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import xxhash
from hooked import HookedStorage

import midstride as ms
from midstride.errors import CorruptCheckpoint, MidstrideError
from midstride.storage import open_storage

pytestmark = pytest.mark.timeout(30)  # a reader that blocks on a pipe

_NAMES = [
    "../../secret.safetensors",
    "../secret.safetensors",
    "/etc/passwd",
    "C:\\x",
    "C:/x.safetensors",
    "a/../../x",
    "a/b.safetensors",
    "shard\0.safetensors",
    "shard\0",
    "..",
    ".",
    "",
    "..safetensors/../x",
    "model.safetensors/",
    "\\\\host\\share\\x.safetensors",
    "manifest.json",
    "x" * 300 + ".safetensors",
    "\N{FULLWIDTH LATIN SMALL LETTER M}odel.safetensors",
]


def _edit(manifest: Path, change: Callable[[dict[str, Any]], None]) -> None:
    """Change a manifest the way an attacker would: with a right digest."""
    document = json.loads(manifest.read_text())
    del document["digest"]
    change(document)
    body = (json.dumps(document)[:-1] + ',"digest":"' + "0" * 32 + '"}\n').encode()
    manifest.write_bytes(body.replace(b"0" * 32 + b'"}\n', xxhash.xxh3_128_hexdigest(body).encode() + b'"}\n'))


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """Two checkpoints, two levels down; the second will be spoiled."""
    run = tmp_path / "runs" / "run"
    with ms.Checkpointer(run) as ckpt:
        for step in (1, 2):
            ckpt.save(step, {"model": {"w": np.full(1000, step)}, "optimizer": {"m": np.full(1000, step)}})
    second = _folder(run, 2)
    for place in (tmp_path, tmp_path / "runs", run):
        shutil.copy(second / "model.safetensors", place / "secret.safetensors")
    return run


def _folder(run: Path, step: int) -> Path:
    (found,) = run.glob(f"step-*{step}-*")
    return found


def _check_refused(run: Path, outside: dict[Path, bytes]) -> None:
    opened: list[str] = []

    def hook(operation: str, name: str) -> None:
        if operation in ("open_file", "list_folder"):
            opened.append(name)

    reader = ms.open(HookedStorage(open_storage(run), hook))
    latest = reader.latest()
    assert latest is not None and latest.step == 1
    assert (reader.load()["model"]["w"] == 1).all()
    with pytest.raises(CorruptCheckpoint):
        reader.load(2)
    (problems,) = reader.verify(2).values()
    assert len(problems) == 1
    inside = {"", "midstride.json", *(f"{_folder(run, s).name}{part}" for s in (1, 2) for part in _PARTS)}
    assert set(opened) <= inside, "a name out of the manifest was used before it was checked"
    # Rotation in the hands of a run that goes on from the good one.
    with ms.Checkpointer(run, keep=1) as ckpt:
        restored = ckpt.restore()
        assert restored is not None and restored.step == 1 and "step 2 was passed over" in restored.warnings[0]
        for step in (3, 4):
            ckpt.save(step, restored.state).result()
        ckpt.wait()
        assert [info.step for info in ckpt.checkpoints()] == [4]
    for path, content in outside.items():
        assert path.read_bytes() == content


_PARTS = ("", "/manifest.json", "/model.safetensors", "/optimizer.safetensors")


def _outside(run: Path) -> dict[Path, bytes]:
    places = (run, run.parent, run.parent.parent)
    return {place / "secret.safetensors": (place / "secret.safetensors").read_bytes() for place in places}


@pytest.mark.parametrize("name", _NAMES)
def test_names_in_a_manifest(run: Path, name: str) -> None:
    second = _folder(run, 2)
    size = (second / "model.safetensors").stat().st_size
    assert size == (run.parent / "secret.safetensors").stat().st_size, "all else would fit"

    def change(document: dict[str, Any]) -> None:
        (record,) = [file for file in document["files"] if file["name"] == "model.safetensors"]
        record["name"] = name

    _edit(second / "manifest.json", change)
    _check_refused(run, _outside(run))
    assert second.exists(), "nothing is deleted because it could not be read"


def test_a_name_that_stands_twice(run: Path) -> None:
    def change(document: dict[str, Any]) -> None:
        for record in document["files"]:
            record["name"] = "model.safetensors"

    _edit(_folder(run, 2) / "manifest.json", change)
    _check_refused(run, _outside(run))


@pytest.mark.parametrize("key", ["attempt", "step"])
def test_a_manifest_that_tells_of_another_folder(run: Path, key: str) -> None:
    """What would be deleted is what was listed, never what a manifest says of itself."""

    def change(document: dict[str, Any]) -> None:
        document[key] = "../../x" if key == "attempt" else 1

    _edit(_folder(run, 2) / "manifest.json", change)
    _check_refused(run, _outside(run))


def _replace(path: Path, how: str, outside: Path) -> None:
    path.unlink()
    if how == "link out":
        path.symlink_to(outside)
    elif how == "link inside":
        path.symlink_to("optimizer.safetensors")
    elif how == "pipe":
        os.mkfifo(path)
    elif how == "link to /dev/zero":
        path.symlink_to("/dev/zero")
    elif how == "folder":
        path.mkdir()
    elif how == "socket":
        with socket.socket(socket.AF_UNIX) as server:
            here = os.getcwd()
            os.chdir(path.parent)  # addresses are short
            try:
                server.bind(path.name)
            finally:
                os.chdir(here)


_KINDS = ["link out", "link inside", "pipe", "link to /dev/zero", "folder", "socket"]


@pytest.mark.parametrize("how", _KINDS)
def test_what_is_no_regular_file(run: Path, how: str) -> None:
    outside = run.parent / "secret.safetensors"
    _replace(_folder(run, 2) / "model.safetensors", how, outside)
    _check_refused(run, _outside(run))


@pytest.mark.parametrize("how", [kind for kind in _KINDS if kind != "link inside"])
def test_a_manifest_that_is_no_regular_file(run: Path, how: str, tmp_path: Path) -> None:
    manifest = _folder(run, 2) / "manifest.json"
    shutil.copy(manifest, tmp_path / "manifest.json")
    _replace(manifest, how, tmp_path / "manifest.json")
    _check_refused(run, _outside(run))


@pytest.mark.parametrize("how", _KINDS)
@pytest.mark.parametrize("name", ["midstride.json", ".lock"])
def test_the_runs_own_files(run: Path, how: str, name: str, tmp_path: Path) -> None:
    precious = tmp_path / "precious"
    precious.write_text('{"run": "somebody else\'s"}')
    _replace(run / name, how, precious)
    assert (ms.open(run).load()["model"]["w"] == 2).all(), "readers need neither"
    with ms.Checkpointer(run) as ckpt:
        restored = ckpt.restore()
        assert restored is not None
        try:
            ckpt.save(3, restored.state).result()
        except MidstrideError as error:
            assert name == ".lock" and ".lock" in str(error)
        else:
            assert name == "midstride.json" or how in ("pipe", "link inside")
    assert precious.read_text() == '{"run": "somebody else\'s"}'
    assert len(ms.open(run).checkpoints()) >= 2


def test_a_step_folder_that_leads_out(run: Path, tmp_path: Path) -> None:
    """Retired by a run that keeps one: the link is left, and what it leads to is whole."""
    second = _folder(run, 2)
    away = tmp_path / "away"
    second.rename(away)
    second.symlink_to(away)
    before = {path.name: path.read_bytes() for path in away.iterdir()}
    with ms.Checkpointer(run, keep=1) as ckpt:
        restored = ckpt.restore()
        assert restored is not None
        for step in (3, 4):
            ckpt.save(step, restored.state).result()
    assert {path.name: path.read_bytes() for path in away.iterdir()} == before


@pytest.mark.parametrize("name", ["../x", "a/../../x", "/etc/passwd", "a//b", "a/./b", "a\0b", "a\\b", "..", "."])
def test_the_storage_refuses_them_too(tmp_path: Path, name: str) -> None:
    """A second wall: whatever asks, names stay inside."""
    storage = open_storage(tmp_path / "run")
    storage.make_root()
    calls: list[Callable[[], object]] = [
        lambda: storage.open_file(name), lambda: storage.create_file(name, 10), lambda: storage.remove_file(name),
        lambda: storage.remove_folder(name), lambda: storage.make_folder(name), lambda: storage.list_folder(name),
        lambda: storage.rename(name, "b"), lambda: storage.rename("b", name), lambda: storage.sync_folder(name),
    ]  # fmt: skip
    for call in calls:
        with pytest.raises(ms.StorageError, match="is not a name inside"):
            call()
