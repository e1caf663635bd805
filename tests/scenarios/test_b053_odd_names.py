"""Odd characters in folders, item names and tensor names: all work, or are refused by name before anything is written.

File names never come from keys as they are; no folder's name is taken for a pattern.
"""

from __future__ import annotations

import os
import unicodedata
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from children import run_well

import midstride as ms
from midstride.errors import UnsupportedState

_ROOTS = {
    "pattern": "run [a-b]*?{x}!",
    "nfc": unicodedata.normalize("NFC", "проба é й"),
    "nfd": unicodedata.normalize("NFD", "проба é й"),
    "percent": "%20 #&;'\"$HOME",
    "blank ends": " run ",
    "dash": "-rf",
    "newline": "a\nb",
    "backslash": "a\\b",
    "like a step": "step-000000000001-0123abcd",
    "bytes": os.fsdecode(b"run-\xff\xfe"),
    "long": "x" * 240,
    "emoji": "\N{ROCKET}",
}


def _use(run: Path) -> None:
    with ms.Checkpointer(run, keep=2) as ckpt:
        for step in (1, 2, 3):
            ckpt.save(step, {"model": {"w": np.full(100, step)}})
        ckpt.wait()
        assert [info.step for info in ckpt.checkpoints()] == [2, 3]
    assert sorted(ms.open(run).verify().values()) == [[], []]
    with ms.Checkpointer(run) as ckpt:
        restored = ckpt.restore()
        assert restored is not None and restored.step == 3 and (restored.state["model"]["w"] == 3).all()
        ckpt.save(4, restored.state)
    ms.open(run).description.encode()  # it can be printed


@pytest.mark.parametrize("kind", _ROOTS)
def test_folders(tmp_path: Path, kind: str) -> None:
    run = tmp_path / "parent [1]" / _ROOTS[kind]
    _use(run)
    assert os.listdir(tmp_path / "parent [1]") == [_ROOTS[kind]], "the very name, in its own form"
    assert len(os.listdir(run)) == 3 + 2, "three checkpoints, the mark and the lock"


@pytest.mark.parametrize("kind", ["nfc", "nfd", "bytes", "emoji", "pattern"])
def test_folders_in_the_c_locale(tmp_path: Path, kind: str) -> None:
    run = tmp_path / _ROOTS[kind]
    script = "import sys; from pathlib import Path; from test_b053_odd_names import _use; _use(Path(sys.argv[1]))"
    run_well(script, run, env={"LC_ALL": "C", "LANG": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"})
    assert [info.step for info in ms.open(run).checkpoints()] == [2, 3, 4]


def test_a_folder_that_cannot_be(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="NUL"):
        ms.Checkpointer(str(tmp_path / "a\0b"))
    with ms.Checkpointer(tmp_path / ("x" * 300)) as ckpt, pytest.raises(ms.StorageError, match="xxx"):
        ckpt.save(1, {"w": np.zeros(1)})


_ITEMS = [
    "ppo_v2_1",
    "step-",
    "",
    "3d_",
    "3d",
    "con",
    "CON",
    "..",
    ".",
    "a/b",
    "a\\b",
    "*",
    "\0",
    "\n",
    "é",
    "e\u0301",
    "\N{ROCKET}",
    "x" * 300,
    "X" * 300,
    "manifest.json",
    " ",
    "step-000000000001-0123abcd",
    "__metadata__",
]


def test_item_and_tensor_names(tmp_path: Path) -> None:
    run = tmp_path / "run"
    state: dict[str, Any] = {
        name: {key: np.array([n, m]) for m, key in enumerate(_ITEMS)} for n, name in enumerate(_ITEMS)
    }
    with ms.Checkpointer(run, keep=1) as ckpt:
        ckpt.save(1, {}).result()
        info = ckpt.save(2, state).result()
        files = os.listdir(run / info.name)
        assert all(name.isascii() and name.isprintable() and len(name) < 128 for name in files)
        assert len({name.lower() for name in files}) == len(files) == len(_ITEMS) + 1, "no two alike, even case-blind"
        restored = ckpt.restore()
        assert restored is not None
    _compare(restored.state, state)
    _compare(ms.open(run).load(), state)
    assert ms.open(run).verify() == {info.name: []}
    part = ms.open(run).load(only=["/a~1b/\N{ROCKET}"])
    assert part["a/b"]["\N{ROCKET}"].tolist() == [_ITEMS.index("a/b"), _ITEMS.index("\N{ROCKET}")]


def _compare(found: Any, state: dict[str, Any]) -> None:
    assert list(found) == list(state)
    for name, item in state.items():
        assert list(found[name]) == list(item)
        assert all((found[name][key] == item[key]).all() for key in item)


@pytest.mark.parametrize(
    "state", [{"m": {"a\ud800b": np.zeros(1)}}, {"\udcff": np.zeros(1)}, {"m": {("a", "\ud800"): 1}}, {"m": "\ud800"}]
)
def test_lone_surrogates(tmp_path: Path, state: dict[str, Any]) -> None:
    """Not text that JSON or safetensors can hold: refused as keys; as values they come back as they were."""
    with ms.Checkpointer(tmp_path / "run") as ckpt:
        if state == {"m": "\ud800"}:
            try:
                ckpt.save(1, state).result()
            except UnsupportedState as error:
                assert "/m" in str(error)
            else:
                restored = ckpt.restore()
                assert restored is not None and restored.state == state
        else:
            with pytest.raises(UnsupportedState, match="not valid Unicode"):
                ckpt.save(1, state)
            assert ckpt.latest() is None and not list((tmp_path / "run").glob("step-*"))
