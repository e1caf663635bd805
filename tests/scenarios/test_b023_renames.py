"""No folder is ever renamed, so nothing depends on that being atomic: a mounted bucket copies files one by one.

Only two files are renamed, each within its folder. Even where that is a copy and a deletion and the
process is killed in the middle, a half copied manifest is never taken for a checkpoint.
"""

from __future__ import annotations

import os
import signal
from pathlib import Path

import numpy as np
import pytest
from children import start_script
from helpers import folder_of, values_in

import midstride as ms


def test_only_two_files_are_renamed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    renamed = []
    for name in ("rename", "replace"):
        real = getattr(os, name)

        def spy(source: str, target: str, real: object = real, **options: object) -> None:
            assert os.path.isfile(source), f"{source} is not a file"
            assert os.path.dirname(source) == os.path.dirname(target)
            renamed.append(os.path.basename(target))
            real(source, target, **options)  # type: ignore[operator]

        monkeypatch.setattr(os, name, spy)
    with ms.Checkpointer(tmp_path, keep=1) as ckpt:
        for step in (1, 2, 2):
            ckpt.save(step, {"a": {"w": np.full(10, step)}}).result()
        ckpt.save(2, {"a": {"w": np.full(10, 3)}}, overwrite=True).result()
    assert sorted(renamed) == ["manifest.json"] * 3 + ["midstride.json"]


COPIED = """
import os, sys
import numpy as np
import midstride as ms

def copy_then_delete(source, target):
    data = open(source, "rb").read()
    with open(target, "wb") as out:
        for at in range(0, len(data), 64):
            out.write(data[at : at + 64])
            out.flush()
            if "00002-" in target:
                print(at, flush=True)
                sys.stdin.readline()
    os.unlink(source)

os.replace = os.rename = copy_then_delete
with ms.Checkpointer(sys.argv[1], engine="thread") as ckpt:
    for step in (1, 2):
        ckpt.save(step, {"a": {"w": np.full(10, step)}})
"""


def test_killed_in_the_middle_of_a_rename_that_copies(tmp_path: Path) -> None:
    with start_script(COPIED, tmp_path) as child:
        assert child.stdout is not None and child.stdin is not None
        for _ in range(5):  # a reader that looks at each moment of the copy
            child.stdout.readline()
            reader = ms.open(tmp_path)
            assert [info.step for info in reader.checkpoints()] == [1]
            assert values_in(reader.load()) == {1}
            child.stdin.write("\n")
            child.stdin.flush()
        os.kill(child.pid, signal.SIGKILL)
    half = folder_of(tmp_path, 2)
    assert {entry.name for entry in half.glob("manifest*")} == {"manifest.json", "manifest.json.tmp"}
    latest = ms.open(tmp_path).latest()
    assert latest is not None and latest.step == 1

    with ms.Checkpointer(tmp_path) as ckpt:
        restored = ckpt.restore()
        assert restored is not None and restored.step == 1
        assert "step 2 was passed over" in restored.warnings[0]
        ckpt.save(2, {"a": {"w": np.full(10, 2)}})
    reader = ms.open(tmp_path)
    assert [info.step for info in reader.checkpoints()] == [1, 2]
    assert values_in(reader.load(2)) == {2}
