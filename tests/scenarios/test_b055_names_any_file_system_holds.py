"""File names are made from a small alphabet, never from raw keys: every file system can hold them, and no
two differ by case alone. Arrays whose keys differ only by case are two arrays."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
from states import restore, save

_KEYS = [
    "Block",
    "block",
    "BLOCK",
    "CON",
    "con",
    "aux",
    "lpt1",
    "a:b",
    "a|b",
    "a?b",
    "dot.",
    "dot",
    " ",
    "",
    ".",
    "..",
    "é",
]
_RESERVED = re.compile(r"(con|prn|aux|nul|com[0-9]|lpt[0-9])(\..*)?")


def test_items_whose_names_clash_on_other_systems(tmp_path: Path) -> None:
    state = {key: {"Block.w": np.full(3, 2 * n), "block.w": np.full(3, 2 * n + 1)} for n, key in enumerate(_KEYS)}
    info = save(tmp_path, state)
    names = [entry.name for entry in (tmp_path / info.name).iterdir()]
    assert len(names) == len(_KEYS) + 1
    assert len({name.casefold() for name in names}) == len(names)
    for name in [*names, info.name, *(entry.name for entry in tmp_path.iterdir() if entry.name != ".lock")]:
        assert re.fullmatch(r"[a-z0-9_][a-z0-9_.-]*[a-z0-9]", name), name
        assert not _RESERVED.fullmatch(name), name
    back = restore(tmp_path).state
    assert list(back) == _KEYS
    for n, key in enumerate(_KEYS):
        assert {name: array.tolist() for name, array in back[key].items()} == {
            "Block.w": [2 * n] * 3,
            "block.w": [2 * n + 1] * 3,
        }


def test_metrics_are_in_no_name(tmp_path: Path) -> None:
    import midstride as ms

    with ms.Checkpointer(tmp_path) as ckpt:
        info = ckpt.save(7, {"w": np.zeros(2)}, metrics={"val:loss|x": 0.5, "CON": 1e-300}).result()
    assert re.fullmatch(r"step-000000000007-[0-9a-f]{8}", info.name)
    assert info.metrics == {"val:loss|x": 0.5, "CON": 1e-300}
