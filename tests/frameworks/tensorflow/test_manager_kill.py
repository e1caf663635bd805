"""A process is killed with SIGKILL at every file operation of ``CheckpointManager``'s saves; what it leaves must be whole.

Its operations are numbered (``operations.py``), and for each number a new process is killed just before it. After each
kill, and after the power loss that might have been there instead: the state file names a checkpoint that a plain
``tf.train.Checkpoint`` restores whole, and so are those before it; nothing that was acknowledged is gone; digests are
right; and a new run goes on from there and leaves nothing behind of the killed one.

``MIDSTRIDE_LONG=1`` takes every operation; the short form a few.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("tensorflow")
pytest.importorskip("midstride.tensorflow")

import tensorflow as tf

from midstride.listeners import Listener
from midstride.tensorflow import CheckpointFolder, durable, latest_checkpoint, leftovers, state_file
from midstride.tensorflow.object_snapshot import ObjectSnapshot
from tests.frameworks.tensorflow import children
from tests.frameworks.tensorflow.objects import content, fill, numbered, ours, values
from tests.frameworks.tensorflow.operations import Disk, Operations, after_power_loss

LONG = os.environ.get("MIDSTRIDE_LONG") == "1"
KEEP = 2
NUMBERS: dict[str, list[int | None]] = {"counted": [None] * 4, "written over": [1, 2, 2, 1]}
"""Of the saves of a run. The n-th saves variables that hold n, from 1."""


class Tell(Listener):
    """Writes down each number that was said to be saved; in a file, since the process will be gone."""

    def __init__(self, path: str) -> None:
        self._path = path

    def after_save(self, event: Any) -> None:
        with open(self._path, "a", encoding="utf-8") as file:
            print(event.info.step, file=file)


def killed_run(base: str, kind: str, broken: str, at: int) -> None:
    """``at`` 0: it is not killed, and writes down its operations."""
    folder = os.path.join(base, "run")
    os.mkdir(folder)
    disk = Disk(folder, os.path.join(base, "shadow"))

    def act(name: str, path: str) -> None:
        if len(operations.seen) == at:
            Path(base, "unsynced").write_text(json.dumps(disk.unsynced()))
            os.kill(os.getpid(), signal.SIGKILL)

    patch = pytest.MonkeyPatch()
    operations = Operations(folder, act)
    disk.watch(patch)
    operations.watch(patch)
    patch.setattr(ObjectSnapshot, "write", operations._save_op(ObjectSnapshot.write))
    if broken:
        BROKEN[broken](patch)
    train(folder, NUMBERS[kind], [Tell(os.path.join(base, "told"))])
    Path(base, "operations").write_text(json.dumps(operations.seen))
    os._exit(0)


def train(folder: str, numbers: list[int | None], listeners: list[Listener] | None = None) -> tf.train.Checkpoint:
    """From where the folder is."""
    checkpoint, variables = numbered()
    with ours(checkpoint, folder, KEEP, listeners=listeners or []) as manager:
        manager.restore_or_initialize()
        for number in numbers:
            fill(variables, float(variables[0][0]) + 1)
            manager.save(number)
            manager.sync()
    return checkpoint


def state_file_before_the_syncs(patch: pytest.MonkeyPatch) -> None:
    replace, make_durable = state_file.replace, durable.make_durable

    def replace_first(folder: str, newest: str, kept: Any, **options: Any) -> None:
        replace(folder, newest, kept, **options)
        make_durable(newest, 0)

    patch.setattr(durable, "make_durable", durable.without_digests)
    patch.setattr(state_file, "replace", replace_first)


def deletion_before_the_announcement(patch: pytest.MonkeyPatch) -> None:
    make_durable = durable.make_durable

    def delete_first(path: str, number: int) -> Any:
        leftovers.delete(f"{path.rpartition('-')[0]}-{number - 1}")
        return make_durable(path, number)

    patch.setattr(durable, "make_durable", delete_first)


BROKEN: dict[str, Callable[[pytest.MonkeyPatch], None]] = {
    "state file before the syncs": state_file_before_the_syncs,
    "deletion before the announcement": deletion_before_the_announcement,
}


def problems_at_rest(folder: Path, kind: str, told: list[int]) -> Iterator[str]:
    """What is wrong with a folder, before anybody writes into it again."""
    state = tf.train.get_checkpoint_state(str(folder))
    if state is None:
        if told or (folder / "checkpoint").exists():
            yield "the state file names nothing"
        return
    # The folder may be a copy, but what the state file says is relative.
    listed, named = list(state.all_model_checkpoint_paths), state.model_checkpoint_path
    if listed[-1] != named:
        yield "the newest is not the last of the list"
    # Older ones may be half deleted, and one that is written over is never the newest meanwhile.
    for path in listed[-KEEP:] if kind == "counted" else [named]:
        yield from problems_of(path, kind)
    numbers = [int(path.rpartition("-")[2]) for path in listed]
    if kind == "counted":
        for number in told[-KEEP:]:
            if number not in numbers and number > max(numbers) - KEEP:
                yield f"number {number} was said to be saved, and is not listed"
    yield from CheckpointFolder(folder).problems(os.path.basename(named))
    if latest_checkpoint(folder) != named:
        yield f"latest_checkpoint gives {latest_checkpoint(folder)}, not {named}"


def problems_of(path: str, kind: str) -> Iterator[str]:
    checkpoint, variables = numbered(-1.0)
    number = int(path.rpartition("-")[2])
    try:
        checkpoint.restore(path).assert_consumed()
    except (tf.errors.OpError, AssertionError, IndexError, RuntimeError, ValueError) as error:
        yield f"{path} cannot be restored: {error}"
        return
    found = {float(value) for variable in variables for value in variable.numpy()}
    saves = [count for count, other in enumerate(NUMBERS[kind], 1) if number == (other or count)]
    if found not in [{float(count)} for count in saves]:
        yield f"{path} holds {found}"


def problems_of_a_new_run(folder: Path) -> Iterator[str]:
    state = tf.train.get_checkpoint_state(str(folder))
    before = values(state.model_checkpoint_path).pop() if state is not None else 0.0
    checkpoint = train(str(folder), [None] * 3)
    last = int(checkpoint.save_counter)
    expected = {f"ckpt-{number}" for number in (last - 1, last)}
    files = {f"{name}.{kind}" for name in expected for kind in ("index", "data-00000-of-00001")}
    if set(content(folder)) != {"checkpoint", *files}:
        yield f"there are {sorted(content(folder))}"
    if values(folder / f"ckpt-{last}") != {before + 3}:
        yield "it did not go on from what the state file named"
    if CheckpointFolder(folder).verify() != {name: [] for name in expected}:
        yield f"digests: {CheckpointFolder(folder).verify()}"


def problems_after(base: Path, kind: str) -> list[str]:
    told = [int(line) for line in (base / "told").read_text().split()] if (base / "told").exists() else []
    found = list(problems_at_rest(base / "run", kind, told))
    unsynced = json.loads((base / "unsynced").read_text())
    for names, what in (("run", "with all names"), ("shadow", "with the names of the last sync")):
        lost = base / f"lost-{names}"
        after_power_loss(str(base / names), unsynced, str(lost))
        found += [f"after a power loss, {what}: {one}" for one in problems_at_rest(lost, kind, told)]
    return found or [f"in a new run: {one}" for one in problems_of_a_new_run(base / "run")]


def operations_of(base: Path, kind: str, broken: str = "") -> list[str]:
    """Those of a run that is not killed."""
    base.mkdir()
    child = children.run(killed_run, base, kind, broken, 0)
    assert child.wait() == 0, child.output
    found: list[str] = json.loads((base / "operations").read_text())
    return found


def problems_if_killed_at(base: Path, kind: str, at: int, broken: str = "") -> list[str]:
    folder = base / f"at-{at}"
    folder.mkdir()
    child = children.run(killed_run, folder, kind, broken, at)
    assert child.wait() == -signal.SIGKILL, f"operation {at} never came: {child.output}"
    found = problems_after(folder, kind)
    shutil.rmtree(folder)
    return found


@pytest.mark.timeout(3600 if LONG else 300)
@pytest.mark.parametrize("kind, count", [("counted", 10), ("written over", 6)])
def test_whatever_operation_it_is_killed_at(kind: str, count: int, tmp_path: Path) -> None:
    operations = operations_of(tmp_path / "whole", kind)
    for expected in ("save op of", "after save op of", "fsync", "replace checkpoint.midstride-draft"):
        assert any(operation.startswith(expected) for operation in operations), "or the wrong functions are watched"
    points = range(1, len(operations) + 1, 1 if LONG else len(operations) // count)
    found = {at: problems_if_killed_at(tmp_path, kind, at) for at in points}
    wrong = [f"killed before {at}, {operations[at - 1]}: {one}" for at, all in found.items() for one in all]
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("broken", BROKEN)
def test_a_broken_order_is_found_out(broken: str, tmp_path: Path) -> None:
    operations = operations_of(tmp_path / "whole", "counted", broken)
    first = {
        "state file before the syncs": "replace checkpoint.midstride-draft",
        "deletion before the announcement": "DeleteFile ckpt-3.index",
    }[broken]
    last_save = operations.index("after save op of ckpt-4")
    at = operations.index(first, last_save) + 2
    assert problems_if_killed_at(tmp_path, "counted", at, broken), "the sweep saw nothing wrong"
