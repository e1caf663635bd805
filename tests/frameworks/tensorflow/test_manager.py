"""``midstride.tensorflow.CheckpointManager``, with ``tf.train.CheckpointManager`` in another folder as the oracle."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("tensorflow")
pytest.importorskip("midstride.tensorflow")

import tensorflow as tf

from midstride.tensorflow import latest_checkpoint
from tests.frameworks.tensorflow.objects import (
    KIND,
    KINDS,
    Kind,
    content,
    fill,
    numbered,
    ours,
    tensors,
)
from tests.frameworks.tensorflow.training import WATCHDOG_SECONDS, MockedTime

THEIRS = tf.train.CheckpointManager
of_each_kind = pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> MockedTime:
    mocked = MockedTime()
    monkeypatch.setattr(time, "time", mocked)
    return mocked


def settle(manager: Any) -> Any:
    if not isinstance(manager, THEIRS) or hasattr(manager, "wait"):
        manager.wait(WATCHDOG_SECONDS)
    return manager


# The same files


@of_each_kind
def test_it_writes_what_the_plain_manager_would_have_written(kind: Kind, tmp_path: Path, clock: MockedTime) -> None:
    checkpoint = tf.train.Checkpoint(**kind.make())
    expected = THEIRS(checkpoint, str(tmp_path / "theirs"), 3).save()
    checkpoint.save_counter.assign_sub(1)
    with ours(checkpoint, str(tmp_path / "ours"), 3) as manager:
        path = manager.save()
        manager.sync()
        assert path == str(tmp_path / "ours" / "ckpt-1") == manager.latest_checkpoint
    assert Path(expected).name == "ckpt-1"
    assert content(tmp_path / "ours") == content(tmp_path / "theirs"), "to the byte, the state file too"
    assert latest_checkpoint(tmp_path / "ours") == path, "every byte is as the digests say"


@of_each_kind
def test_a_plain_checkpoint_restores_it(kind: Kind, tmp_path: Path) -> None:
    with ours(tf.train.Checkpoint(**kind.make()), str(tmp_path), 3) as manager:
        path = manager.save()
    objects = kind.make()
    kind.train(objects)
    checkpoint = tf.train.Checkpoint(**objects)
    checkpoint.restore(path).assert_consumed()
    checkpoint.write(str(tmp_path / "again"))
    assert tensors(tmp_path / "again") == tensors(path)


def test_restored_iterator_goes_on_where_it_was(tmp_path: Path) -> None:
    objects = KIND["iterators"].make()
    with ours(tf.train.Checkpoint(**objects), str(tmp_path), 3) as manager:
        path = manager.save()
        expected = [int(next(objects["shuffled"])) for _ in range(5)]
    fresh = KIND["iterators"].make()
    tf.train.Checkpoint(**fresh).restore(path)
    assert [int(next(fresh["shuffled"])) for _ in range(5)] == expected


def test_options_reach_the_saver(tmp_path: Path) -> None:
    if not hasattr(tf.train.experimental, "MaxShardSizePolicy"):
        pytest.skip("this TensorFlow has no sharding policies")
    checkpoint, _ = numbered(floats=1000)
    options = tf.train.CheckpointOptions(
        experimental_sharding_callback=tf.train.experimental.MaxShardSizePolicy(max_shard_size=4000)
    )
    THEIRS(checkpoint, str(tmp_path / "theirs"), 3).save(options=options)
    checkpoint.save_counter.assign_sub(1)
    with ours(checkpoint, str(tmp_path / "ours"), 3) as manager:
        manager.save(options=options)
    theirs, mine = content(tmp_path / "theirs"), content(tmp_path / "ours")
    assert len(theirs) > 3, "or nothing was sharded"
    assert {**mine, "checkpoint": b""} == {**theirs, "checkpoint": b""}


Step = tuple[float, int | None]
"""When a save is made, in seconds from the start, and its number."""


@pytest.mark.parametrize(
    "options, saves",
    [
        ({"max_to_keep": 2}, [(1, None), (2, None), (3, None), (4, None)]),
        ({"max_to_keep": 1}, [(1, None), (2, None), (3, None)]),
        ({"max_to_keep": None}, [(1, None), (2, None), (3, None)]),
        (
            {"max_to_keep": 1, "keep_checkpoint_every_n_hours": 1},
            [(0, None), (1800, None), (3599, None), (3800, None), (7000, None), (7500, None), (11000, None)],
        ),
        ({"max_to_keep": 2}, [(1, 10), (2, 20), (3, 10), (4, 30), (5, 20), (6, 20)]),
        ({"max_to_keep": 2, "checkpoint_name": "model"}, [(1, 5), (1, 6), (1, 7)]),
        ({"max_to_keep": 3}, [(100, None), (200, None), (50, None), (60, None), (70, None), (300, None)]),
    ],
    ids=["two", "one", "all", "hourly", "numbers", "name", "clock set back"],
)
@pytest.mark.parametrize("restart", [False, True], ids=["one manager", "a new manager each time"])
def test_it_keeps_and_deletes_as_the_plain_manager_does(
    options: dict[str, Any], saves: list[Step], restart: bool, tmp_path: Path, clock: MockedTime
) -> None:
    """Each folder by one kind of manager, and two by both in turn."""
    writers = {
        "theirs": [THEIRS],
        "ours": [ours],
        "theirs then ours": [THEIRS, ours],
        "ours then theirs": [ours, THEIRS],
    }
    managers: dict[str, Any] = {}
    checkpoints = {name: numbered(floats=1)[0] for name in writers}
    for count, (seconds, number) in enumerate(saves):
        clock.move_to(seconds)
        for name, makers in writers.items():
            make = makers[0 if count < len(saves) / 2 else -1]
            if count == 0 or restart or make is not makers[0]:
                managers[name] = make(checkpoints[name], str(tmp_path / name), **options)
                makers[0] = makers[-1] = make
            managers[name].save(checkpoint_number=number)
            settle(managers[name])
        expected = content(tmp_path / "theirs")
        for name in writers:
            assert content(tmp_path / name) == expected, f"{name}, after save {count}"
            kept = [os.path.relpath(path, tmp_path / name) for path in managers[name].checkpoints]
            assert kept == [os.path.relpath(path, tmp_path / "theirs") for path in managers["theirs"].checkpoints]
            assert managers[name].latest_checkpoint == tf.train.latest_checkpoint(str(tmp_path / name))
        digests = {file.name.removesuffix(".midstride.json") for file in (tmp_path / "ours").glob("*.midstride.json")}
        assert digests == {name.removesuffix(".index") for name in expected if name.endswith(".index")}


@pytest.mark.parametrize("check_interval", [True, False])
def test_interval(check_interval: bool, tmp_path: Path) -> None:
    def saved_at(make: Callable[..., Any], name: str) -> list[int]:
        step = tf.Variable(0)
        manager = make(
            numbered()[0], str(tmp_path / name), None, step_counter=step, checkpoint_interval=3, checkpoint_name="c"
        )
        assert manager.checkpoint_interval == 3
        found = []
        for now in (0, 0, 1, 2, 3, 4, 7, 7, 9, 10):
            step.assign(now)
            path = manager.save(check_interval=check_interval)
            found += [now] if path is not None else []
            settle(manager)
        return found

    assert saved_at(ours, "ours") == saved_at(THEIRS, "theirs")


def test_interval_counts_from_the_restored_step(tmp_path: Path) -> None:
    def run(make: Callable[..., Any], name: str) -> list[bool]:
        found = []
        for _ in range(2):
            step = tf.Variable(4)
            checkpoint = tf.train.Checkpoint(step=step)
            manager = make(checkpoint, str(tmp_path / name), 3, step_counter=step, checkpoint_interval=3)
            manager.restore_or_initialize()
            for _ in range(5):
                found.append(manager.save() is not None)
                step.assign_add(1)
            settle(manager)
        return found

    assert run(ours, "ours") == run(THEIRS, "theirs")


def test_restore_or_initialize(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoint, variables = numbered()
    initialized: list[bool] = []
    manager = ours(checkpoint, str(tmp_path), 3, init_fn=lambda: initialized.append(True))
    assert manager.restore_or_initialize() is None
    assert initialized == [True]
    fill(variables, 1.0)
    manager.save()
    fill(variables, 2.0)
    assert manager.restore_or_initialize() == str(tmp_path / "ckpt-1"), "also while it is being written"
    assert {float(variable[0]) for variable in variables} == {1.0}
    assert initialized == [True]
    assert manager.checkpoint is checkpoint and manager.directory == str(tmp_path)
    manager.close()


# No TensorFlow at the import of this file: processes are forked from one that has imported it.
@pytest.mark.parametrize("make", [int, np.int64, tf.constant, tf.Variable])
def test_numbers_of_any_kind(make: Callable[[int], Any], tmp_path: Path) -> None:
    number = make(7)
    checkpoint, _ = numbered()
    with ours(checkpoint, tmp_path, 3) as manager:
        assert manager.save(number) == str(tmp_path / "ckpt-7")
        assert manager.save(checkpoint_number=number) == str(tmp_path / "ckpt-7")
    assert int(checkpoint.save_counter) == 2
    assert manager.checkpoints == [str(tmp_path / "ckpt-7")]


@pytest.mark.parametrize("directory", ["a", "a/b", "[x]*", "ü"])
@pytest.mark.parametrize("name", ["ckpt", "deep/ckpt"])
def test_relative_folders_of_any_name(
    directory: str, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, clock: MockedTime
) -> None:
    found = []
    for make in (THEIRS, ours):
        start = tmp_path / make.__name__
        start.mkdir()
        monkeypatch.chdir(start)
        manager = make(numbered()[0], directory, 1, checkpoint_name=name)
        paths = [manager.save()]
        settle(manager)
        if make is ours:  # TensorFlow's would go along
            monkeypatch.chdir(tmp_path)
        paths += [manager.save()]
        settle(manager)
        found.append((paths, manager.checkpoints, manager.latest_checkpoint, content(start)))
    theirs, mine = found
    if "[" in directory:  # there, TensorFlow's deletes nothing
        theirs = (*theirs[:3], {file: raw for file, raw in theirs[3].items() if "ckpt-1." not in file})
    assert mine == theirs


# Wrong uses


def test_graph_mode_is_refused(tmp_path: Path) -> None:
    hint = "AsyncCheckpointSaverHook"
    checkpoint, _ = numbered()
    manager = ours(checkpoint, str(tmp_path), 3)
    with tf.Graph().as_default():
        with pytest.raises(RuntimeError, match=hint):
            ours(checkpoint, str(tmp_path), 3)
        for call in (manager.save, manager.restore_or_initialize):
            with pytest.raises(RuntimeError, match=hint):
                call()

    @tf.function
    def step() -> None:
        manager.save()

    with pytest.raises(RuntimeError, match=hint):
        step()
    assert content(tmp_path) == {}
    manager.close()


def test_wrong_arguments(tmp_path: Path) -> None:
    checkpoint, _ = numbered()
    with pytest.raises(ValueError, match="busy"):
        ours(checkpoint, str(tmp_path), 3, busy="never")
    with pytest.raises(ValueError, match="max_to_keep"):
        ours(checkpoint, str(tmp_path), 0)
    with pytest.raises(ValueError, match="step_counter"):
        ours(checkpoint, str(tmp_path), 3, checkpoint_interval=5)
    manager = ours(checkpoint, str(tmp_path), 3)
    with pytest.raises(TypeError):
        manager.save(checkpoint_number=1.5)
    manager.close()


def test_it_passes_for_tensorflows_manager(tmp_path: Path) -> None:
    """Code that asks for the class, as TensorFlow's own for preemptions does, takes it."""
    assert isinstance(ours(numbered()[0], str(tmp_path), 3), tf.train.CheckpointManager)
