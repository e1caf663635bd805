"""When ``CheckpointManager`` announces a checkpoint, what becomes of errors, of a save while one runs, and of the exit."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("tensorflow")
pytest.importorskip("midstride.tensorflow")

import tensorflow as tf

from midstride.errors import MidstrideError, NoSpace, SaveError, WriteError
from midstride.listeners import Listener
from midstride.tensorflow import CheckpointFolder, durable, latest_checkpoint, leftovers, state_file
from midstride.tensorflow.object_snapshot import ObjectSnapshot
from tests.frameworks.tensorflow import children
from tests.frameworks.tensorflow.file_order import FileOrder
from tests.frameworks.tensorflow.objects import (
    Gate,
    content,
    failing,
    fill,
    numbered,
    ours,
    values,
)
from tests.frameworks.tensorflow.training import WATCHDOG_SECONDS, FullDisk, wait_until

# Durable before it is announced


def test_files_are_durable_before_they_are_named_and_named_before_others_go(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoint, _ = numbered()
    order = FileOrder(tmp_path, "ckpt", kinds=("data", "index"))
    order.watch(monkeypatch)
    with ours(checkpoint, str(tmp_path), 1) as manager:
        for _ in range(3):
            manager.save()
            manager.sync()
    monkeypatch.undo()
    assert order.published == [1, 2, 2, 3, 3], "a second time when the old one is gone"
    assert {name.split(".")[0] for name in order.deleted} == {"ckpt-1", "ckpt-2"}
    assert order.faults == []
    assert set(content(tmp_path)) == {"checkpoint", "ckpt-3.data-00000-of-00001", "ckpt-3.index"}


def test_only_what_is_durable_is_listed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoint, variables = numbered(1.0)
    manager = ours(checkpoint, str(tmp_path), 1)
    assert manager.latest_checkpoint is None and manager.checkpoints == []
    first = manager.save()
    manager.sync()
    fill(variables, 2.0)
    make_durable, seen = durable.make_durable, []

    def look(path: str, step: int) -> Any:
        seen.append((manager.latest_checkpoint, manager.checkpoints, tf.train.latest_checkpoint(str(tmp_path))))
        return make_durable(path, step)

    monkeypatch.setattr(durable, "make_durable", look)
    second = manager.save()
    manager.sync()
    assert seen == [(first, [first], first)]
    assert (manager.latest_checkpoint, manager.checkpoints) == (second, [second])
    assert values(second) == {2.0}
    manager.close()


def test_old_one_is_listed_until_it_is_deleted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A manager after a kill in between deletes what is left of it."""
    delete, listed = leftovers.delete, []

    def look(path: str) -> None:
        listed.append(list(tf.train.get_checkpoint_state(str(tmp_path)).all_model_checkpoint_paths))
        delete(path)

    monkeypatch.setattr(leftovers, "delete", look)
    with ours(numbered()[0], str(tmp_path), 1) as manager:
        paths = [manager.save(), manager.save()]
    assert listed == [paths]
    assert list(tf.train.get_checkpoint_state(str(tmp_path)).all_model_checkpoint_paths) == paths[1:]


def test_folder_is_one_for_the_command_line(tmp_path: Path) -> None:
    with ours(numbered()[0], str(tmp_path), 3) as manager:
        manager.save()
        manager.save(checkpoint_number=40)
    folder = CheckpointFolder(tmp_path)
    assert [(info.name, info.step) for info in folder.checkpoints()] == [("ckpt-1", 1), ("ckpt-40", 40)]
    assert folder.verify() == {"ckpt-1": [], "ckpt-40": []}


def test_leftovers_of_a_killed_run_are_swept_by_the_first_save(tmp_path: Path) -> None:
    """The names are those that SIGKILL leaves in the middle of a save of TensorFlow's or of ours."""
    leftovers = [
        "ckpt-9_temp/part-00000-of-00001.data-00000-of-00001",
        "ckpt-8_temp/part-00000-of-00001.data-00000-of-00001.tempstate13821786751309912367",
        "ckpt-7.index.tempstate13003401784014780804",
        "checkpoint.midstride-draft",
    ]
    of_others = ["other-9_temp/part-00000-of-00001.index", "ckpt-5.index", "ckpt-5.data-00000-of-00001", "notes_temp/a"]
    for name in leftovers + of_others:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(b"x")
    manager = ours(numbered()[0], str(tmp_path), 3)
    assert all((tmp_path / name).exists() for name in leftovers), "one that only restores deletes nothing"
    manager.save()
    manager.close()
    assert [name for name in of_others if not (tmp_path / name).exists()] == []
    assert [name for name in leftovers if (tmp_path / name).exists()] == []


def test_checkpoint_that_is_written_over_is_not_named_meanwhile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoint, variables = numbered(1.0)
    with ours(checkpoint, str(tmp_path), 3) as manager:
        first = manager.save(1)
        second = manager.save(2)
        manager.sync()
        fill(variables, 3.0)
        gate = Gate(monkeypatch)
        manager.save(2)
        gate.wait_until_held()
        assert tf.train.latest_checkpoint(str(tmp_path)) == first == manager.latest_checkpoint
        assert manager.checkpoints == [first]
        gate.open()
        manager.sync()
        assert manager.checkpoints == [first, second]
    assert tf.train.latest_checkpoint(str(tmp_path)) == second
    assert values(second) == {3.0}
    assert latest_checkpoint(tmp_path) == second


# Errors


def told(error: BaseException | None) -> list[type]:
    """An error's type, and those of what it was raised from."""
    found: list[type] = []
    while error is not None:
        found.append(type(error))
        error = error.__cause__
    return found


NEXT: dict[str, Callable[[Any], Any]] = {
    "save": lambda manager: manager.save(),
    "sync": lambda manager: manager.sync(),
    "wait": lambda manager: manager.wait(WATCHDOG_SECONDS),
    "close": lambda manager: manager.close(),
    "end of the block": lambda manager: manager.__exit__(None, None, None),
}


@pytest.mark.parametrize("call", NEXT.values(), ids=NEXT)
@pytest.mark.parametrize("cause", [FullDisk(), NoSpace("no space left")], ids=["TensorFlow's", "ours"])
def test_full_disk_is_told_once_by_the_next_call(
    call: Callable[[Any], Any], cause: Exception, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoint, variables = numbered(1.0)
    manager = ours(checkpoint, str(tmp_path), 3)
    first = manager.save()
    manager.sync()
    before = content(tmp_path)
    failing(monkeypatch, cause)
    fill(variables, 2.0)
    manager.save()
    wait_until(lambda: manager.statistics().saves_failed == 1, "the save to fail")
    manager._saves.wait(WATCHDOG_SECONDS)
    assert content(tmp_path) == before, "what it wrote was removed, and nothing else"
    assert manager.latest_checkpoint == first
    with pytest.raises(MidstrideError) as raised:
        call(manager)
    assert type(cause) in told(raised.value)
    manager.close()
    if call is NEXT["save"]:
        assert manager.latest_checkpoint == str(tmp_path / "ckpt-3"), "that save was begun, and is no worse for it"
        assert values(manager.latest_checkpoint) == {2.0}


def test_failure_after_the_bytes_leaves_nothing_either(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoint, _ = numbered()
    manager = ours(checkpoint, str(tmp_path), 3)
    with monkeypatch.context() as patch:

        def fail(path: str, step: int) -> None:
            assert list(tmp_path.glob("ckpt-1.*"))
            raise NoSpace("for the digests")

        patch.setattr(durable, "make_durable", fail)
        manager.save()
        with pytest.raises(WriteError, match="for the digests"):
            manager.sync()
    assert content(tmp_path) == {}
    manager.save()
    manager.close()
    assert manager.checkpoints == [str(tmp_path / "ckpt-2")]


def test_failed_overwriting_leaves_the_old_one_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoint, variables = numbered(1.0)
    manager = ours(checkpoint, str(tmp_path), 3)
    paths = [manager.save(1), manager.save(2)]
    manager.sync()
    before = content(tmp_path)
    failing(monkeypatch, FullDisk())
    fill(variables, 2.0)
    manager.save(2)
    with pytest.raises(MidstrideError):
        manager.sync()
    assert content(tmp_path) == before
    assert manager.checkpoints == paths
    manager.close()


def test_state_file_that_cannot_be_written_loses_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoint, _ = numbered()
    manager = ours(checkpoint, str(tmp_path), 1)
    first = manager.save()
    manager.sync()
    with monkeypatch.context() as patch:
        patch.setattr(state_file, "replace", lambda *_, **__: (_ for _ in ()).throw(NoSpace("for the state file")))
        manager.save()
        with pytest.raises(WriteError, match="for the state file"):
            manager.sync()
    assert manager.latest_checkpoint == first == tf.train.latest_checkpoint(str(tmp_path))
    third = manager.save()
    manager.close()
    assert manager.checkpoints == [third]


def test_error_that_passes_is_ridden_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, pauses: list[float]) -> None:
    checkpoint, variables = numbered(1.0)
    failing(monkeypatch, *[tf.errors.UnavailableError(None, None, "not now")] * 2)
    with ours(checkpoint, str(tmp_path), 3) as manager:
        path = manager.save()
        fill(variables, 2.0)
        manager.sync()
        statistics = manager.statistics()
    assert (statistics.saves_retried, statistics.saves_failed) == (2, 0) and len(pauses) == 2
    assert values(path) == {1.0}


def test_failures_that_are_tolerated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoint, _ = numbered()
    failing(monkeypatch, FullDisk(), FullDisk())
    with ours(checkpoint, str(tmp_path), 3, max_failures=2) as manager:
        for _ in range(3):
            manager.save()
            manager._saves.wait(WATCHDOG_SECONDS)
        manager.save()
    assert [Path(path).name for path in manager.checkpoints] == ["ckpt-3", "ckpt-4"]
    for tell in ("sync", "close"):
        failing(monkeypatch, FullDisk())
        manager = ours(checkpoint, str(tmp_path), 3, max_failures=2)
        manager.save()
        with pytest.raises(MidstrideError):
            getattr(manager, tell)()
        manager.close()


def test_failed_save_is_due_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    step = tf.Variable(5)
    manager = ours(numbered()[0], str(tmp_path), 3, step_counter=step, checkpoint_interval=10)
    failing(monkeypatch, FullDisk())
    manager.save()
    with pytest.raises(MidstrideError):
        manager.sync()
    assert manager.save() == str(tmp_path / "ckpt-2"), "of the same step"
    manager.close()
    assert manager.latest_checkpoint == str(tmp_path / "ckpt-2")


def test_callbacks_are_called_when_it_is_durable_and_their_errors_are_told(tmp_path: Path) -> None:
    called: list[Any] = []

    def fail() -> None:
        raise ZeroDivisionError

    manager = ours(numbered()[0], str(tmp_path), 1)
    callbacks = [lambda path: called.append((path, tf.train.latest_checkpoint(str(tmp_path)))), fail]
    options = tf.train.CheckpointOptions(experimental_write_callbacks=callbacks)
    paths = []
    for _ in range(2):
        paths.append(manager.save(options=options))
        with pytest.raises(ZeroDivisionError):
            manager.sync()
    assert called == [(path, path) for path in paths]
    assert len(options.experimental_write_callbacks) == 2
    assert manager.checkpoints == [paths[1]], "the checkpoint is good, and the old one was deleted"
    manager.close()


class Recorded(Listener):
    def __init__(self) -> None:
        self.events: list[str] = []

    def before_save(self, event: Any) -> None:
        self.events.append(f"before {event.step}")

    def after_save(self, event: Any) -> None:
        self.events.append(f"after {event.info.step} {event.info.name}")

    def save_failed(self, event: Any) -> None:
        self.events.append(f"failed {event.step}")


def test_listeners_and_statistics(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    listener = Recorded()
    manager = ours(numbered()[0], str(tmp_path), 3, listeners=[listener])
    manager.save()
    manager.sync()
    failing(monkeypatch, FullDisk())
    manager.save()
    with pytest.raises(MidstrideError):
        manager.close()
    assert listener.events == ["before 1", "after 1 ckpt-1", "before 2", "failed 2"]
    statistics = manager.statistics()
    assert (statistics.saves_begun, statistics.saves_committed, statistics.saves_failed) == (2, 1, 1)
    assert statistics.snapshot == "handles"
    assert statistics.bytes_committed == sum(
        len(raw) for name, raw in content(tmp_path).items() if name != "checkpoint"
    )


# One save at a time


def test_busy_wait(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoint, variables = numbered(1.0)
    gate = Gate(monkeypatch)
    with ours(checkpoint, str(tmp_path), None) as manager:
        first = manager.save()
        gate.wait_until_held()
        fill(variables, 2.0)
        waited: list[bool] = []
        wait = manager._saves.wait

        def open_and_wait(*arguments: Any) -> None:
            waited.append(True)
            gate.open()
            wait(*arguments)

        monkeypatch.setattr(manager._saves, "wait", open_and_wait)
        second = manager.save()
        assert waited == [True]
        fill(variables, 3.0)
    assert (values(first), values(second)) == ({1.0}, {2.0})


def test_busy_skip(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoint, variables = numbered(1.0)
    gate = Gate(monkeypatch)
    step = tf.Variable(1)
    with ours(checkpoint, str(tmp_path), None, busy="skip", step_counter=step, checkpoint_interval=2) as manager:
        first = manager.save()
        gate.wait_until_held()
        step.assign(2)
        assert manager.save() is None, "not due"
        step.assign(3)
        assert manager.save() is None, "put off"
        assert manager.statistics().saves_skipped == 1
        assert int(checkpoint.save_counter) == 1
        gate.open()
        manager.sync()
        fill(variables, 2.0)
        step.assign(4)
        second = manager.save()
    assert second == str(tmp_path / "ckpt-2"), "it stayed due"
    assert (values(first), values(second)) == ({1.0}, {2.0})


def test_blocking(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    manager = ours(numbered()[0], str(tmp_path), 1, blocking=True)
    for count in (1, 2):
        assert manager.save() == str(tmp_path / f"ckpt-{count}") == manager.latest_checkpoint
    failing(monkeypatch, FullDisk())
    with pytest.raises(MidstrideError):
        manager.save()
    manager.close()


def test_wait_has_a_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gate = Gate(monkeypatch)
    with ours(numbered()[0], str(tmp_path), 3) as manager:
        manager.save()
        gate.wait_until_held()
        with pytest.raises(TimeoutError):
            manager.wait(0.01)
        gate.open()
        manager.wait(WATCHDOG_SECONDS)


def test_save_from_a_listener_would_wait_for_itself(tmp_path: Path) -> None:
    errors: list[BaseException] = []

    class Again(Listener):
        def after_save(self, event: Any) -> None:
            try:
                manager.save()
            except SaveError as error:
                errors.append(error)

    manager = ours(numbered()[0], str(tmp_path), 3, listeners=[Again()])
    manager.save()
    manager.close()
    assert len(errors) == 1


# The end


def _exits(folder: str, fails: bool, closes: bool) -> None:
    checkpoint, variables = numbered(1.0)
    manager = ours(checkpoint, folder, 3)
    patch = pytest.MonkeyPatch()
    if fails:
        failing(patch, FullDisk())
    write = ObjectSnapshot.write
    patch.setattr(ObjectSnapshot, "write", lambda *arguments: (time.sleep(0.3), write(*arguments)))
    with contextlib.ExitStack() as stack:
        if closes:
            stack.enter_context(manager)
        manager.save()
        fill(variables, 2.0)


@pytest.mark.parametrize("closes", [False, True], ids=["left open", "closed"])
def test_running_save_is_finished_at_the_exit(closes: bool, tmp_path: Path) -> None:
    child = children.run(_exits, tmp_path, False, closes)
    assert child.wait() == 0, child.output
    assert values(tf.train.latest_checkpoint(str(tmp_path))) == {1.0}


@pytest.mark.parametrize("closes", [False, True], ids=["left open", "closed"])
def test_failure_makes_the_exit_fail(closes: bool, tmp_path: Path) -> None:
    child = children.run(_exits, tmp_path, True, closes)
    assert child.wait() == 1
    assert "No space left on device (injected)" in child.output


def test_block_that_raises_is_left_with_its_own_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    failing(monkeypatch, FullDisk())
    with pytest.raises(ZeroDivisionError) as raised, ours(numbered()[0], str(tmp_path), 3) as manager:
        manager.save()
        raise ZeroDivisionError
    assert "could not be written" in raised.value.__notes__[0]


def test_closed_is_closed(tmp_path: Path) -> None:
    manager = ours(numbered()[0], str(tmp_path), 3)
    manager.close()
    manager.close()
    with pytest.raises(SaveError, match="closed"):
        manager.save()
