"""Overwriting a step commits the new checkpoint before the old one is retired: there is always one of the two.

Killed before every operation, failing with a full disk at every operation, and where files cannot be
renamed: the step restores as the old content or as the new, at every moment in between too.
"""

from __future__ import annotations

import errno
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from children import run_well
from helpers import values_in

import midstride as ms
from midstride.storage import open_storage
from midstride.testing import FaultyStorage, Operation, fail_at

OLD, NEW = 1.0, 2.0


def _state(value: float) -> dict[str, Any]:
    return {"model": {"w": np.full(5000, value)}, "optimizer": {"m": np.full(100, value)}}


SWEEP = """
import sys
from pathlib import Path
import numpy as np
import midstride as ms
from helpers import kill_at_each_operation, values_in
from test_b015_overwrite_keeps_one import NEW, OLD, _state

run = Path(sys.argv[1]) / "run"
with ms.Checkpointer(run) as ckpt:
    ckpt.save(5, _state(OLD))

def work(storage):
    with ms.Checkpointer(storage, existing="continue") as ckpt:
        ckpt.save(5, _state(NEW), overwrite=True)

def check(folder, number):
    reader = ms.open(folder)
    found = values_in(reader.load(5))
    assert found in ({OLD}, {NEW}), found
    assert not any(reader.verify().values())
    print(*found, flush=True)

print(kill_at_each_operation(run, work, check), "operations")
"""


def test_killed_before_every_operation(tmp_path: Path) -> None:
    *found, last = run_well(SWEEP, tmp_path).splitlines()
    assert int(last.split()[0]) >= 20
    assert found == sorted(found)
    assert set(found) == {str(OLD), str(NEW)}


def _overwrite(run: Path, storage: FaultyStorage) -> set[float]:
    """Overwrite step 5, looking in before every operation; return what it holds afterwards."""
    plan = storage.fault
    neither: list[Operation] = []

    class Looking:
        def before(self, operation: Operation) -> None:
            if values_in(ms.open(run).load(5)) not in ({OLD}, {NEW}):
                neither.append(operation)
            plan.before(operation)

        def after(self, operation: Operation) -> None:
            plan.after(operation)

    storage.fault = Looking()  # type: ignore[assignment]
    try:
        with ms.Checkpointer(storage, existing="continue") as ckpt:
            ckpt.save(5, _state(NEW), overwrite=True)
        failed = False
    except ms.MidstrideError:
        failed = True
    assert neither == []
    found = values_in(ms.open(run).load(5))
    assert found == ({OLD} if failed else {NEW}), "what the save said is what is there"
    return found


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO])
def test_failing_at_every_operation(tmp_path: Path, code: int) -> None:
    prepared = tmp_path / "prepared"
    with ms.Checkpointer(prepared) as ckpt:
        ckpt.save(5, _state(OLD))
    outcomes: list[set[float]] = []
    number = 0
    while True:
        number += 1
        run = tmp_path / f"run-{number}"
        shutil.copytree(prepared, run)
        storage = FaultyStorage(open_storage(run), fail_at(number, code))
        outcomes.append(_overwrite(run, storage))
        if len(storage.operations) < number:
            break
    # One I/O error is ridden out; a full disk is told at once.
    assert ({OLD} in outcomes) == (code == errno.ENOSPC)
    assert outcomes[-1] == {NEW}
    assert number > 20


def test_rename_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with ms.Checkpointer(tmp_path) as ckpt:
        ckpt.save(5, _state(OLD)).result()
        with monkeypatch.context() as patched:

            def refuse(source: str, target: str) -> None:
                raise OSError(errno.EXDEV, "Invalid cross-device link")

            patched.setattr("os.replace", refuse)
            patched.setattr("os.rename", refuse)
            with pytest.raises(ms.CommitError, match="step 5 was written but could not be published"):
                ckpt.save(5, _state(NEW), overwrite=True).result()
        assert values_in(ms.open(tmp_path).load(5)) == {OLD}
        ckpt.save(5, _state(NEW), overwrite=True).result()
    assert values_in(ms.open(tmp_path).load(5)) == {NEW}
    assert [info.step for info in ms.open(tmp_path).checkpoints()] == [5], "the old one is retired"
