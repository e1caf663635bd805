"""The trainer's side follows the writer: what the run holds, signs of life, and a writer that dies early."""

from __future__ import annotations

import errno
from pathlib import Path

import numpy as np
import pytest

import midstride as ms
from midstride import limits
from midstride.format import layout
from midstride.storage.system_errors import storage_error
from midstride.testing import FaultyStorage, Gate, Operation, fail_at
from midstride.testing.faulty import Fault


def state(value: int) -> dict[str, object]:
    return {"one": {"w": np.full(3000, value)}, "two": {"w": np.full(3000, value)}}


@pytest.fixture
def storage(tmp_path: Path) -> FaultyStorage:
    return FaultyStorage(ms.LocalStorage(tmp_path / "run"))


def test_a_step_that_was_retired_is_saved_anew(storage: FaultyStorage) -> None:
    with ms.Checkpointer(storage, keep=1) as ckpt:
        ckpt.save(1, state(1)).result()
        ckpt.save(2, state(2)).result()
        ckpt.wait()  # for the retirement of step 1
        assert ckpt.save(1, state(10)).result().step == 1
        ckpt.wait()
        (only,) = ckpt.checkpoints()
    assert only.step == 1
    assert np.array_equal(ms.open(storage).load()["one"]["w"], np.full(3000, 10))


class Life(Fault):
    """What a waiting trainer takes for life, at each operation of some kinds while a save is in flight."""

    def __init__(self, ckpt: ms.Checkpointer, *names: str) -> None:
        self._ckpt, self._names = ckpt, names
        self.seen: list[tuple[str, str, object]] = []

    def before(self, operation: Operation) -> None:
        pending = self._ckpt._saver.pending
        if operation.name in self._names and pending is not None:
            self.seen.append((operation.name, operation.target, pending._progress_or_life()))


def test_a_retirement_of_many_shows_life_at_each(storage: FaultyStorage) -> None:
    with ms.Checkpointer(storage) as ckpt:
        for step in range(1, 6):
            ckpt.save(step, state(step)).result()
    with ms.Checkpointer(storage, keep=1, existing="continue") as ckpt:
        storage.fault = life = Life(ckpt, "remove_file", "remove_folder")
        ckpt.save(6, state(6)).result()
        ckpt.wait()
    for last in (f"/{layout.MANIFEST}", ""):
        name = "remove_file" if last else "remove_folder"
        lives = [alive for what, target, alive in life.seen if what == name and target.endswith(last)]
        assert len(lives) >= 5
        assert len(set(lives)) == len(lives), f"no sign of life between two: {name}"


def test_an_attempt_that_is_written_again_shows_life_at_each_chunk(storage: FaultyStorage, pauses: list[float]) -> None:
    with ms.Checkpointer(storage) as ckpt:

        class FailingOnce(Life):
            def before(self, operation: Operation) -> None:
                super().before(operation)
                if operation.name == "write" and len(self.seen) == 2:
                    fail_at(operation.number, errno.EIO).before(operation)

        storage.fault = life = FailingOnce(ckpt, "write")
        pending = ckpt.save(1, state(1))
        assert pending.result().step == 1
        assert pauses == [0.5]
        progress = pending.progress()
        assert progress.written_bytes == progress.total_bytes
    again = [alive for _, target, alive in life.seen[2:] if target.endswith(".safetensors")]
    assert len(again) >= 2
    assert len(set(again)) == len(again)


@pytest.mark.parametrize("failed", [False, True])
def test_each_file_that_is_synced_shows_life(failed: bool, storage: FaultyStorage, pauses: list[float]) -> None:
    with ms.Checkpointer(storage) as ckpt:

        class FailingAtFirst(Life):
            def before(self, operation: Operation) -> None:
                super().before(operation)
                if failed and operation.name == "sync" and len(self.seen) == 1:
                    fail_at(operation.number, errno.EIO).before(operation)

        storage.fault = life = FailingAtFirst(ckpt, "sync")
        ckpt.save(1, state(1)).result()
        assert len(pauses) == failed
    lives = [alive for _, target, alive in life.seen if target.endswith(".safetensors")]
    assert len(lives) == 2 + failed
    assert len(set(lives)) == len(lives)


@pytest.mark.parametrize("operation", ["make_root", "lock", "list_folder"])
def test_a_writer_that_dies_while_the_folder_is_opened(
    operation: str, storage: FaultyStorage, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is told at once, and not as a storage that makes no progress."""
    monkeypatch.setattr(limits, "STORAGE_SECONDS", 5.0)

    class Dying(Fault):
        died = False

        def before(self, now: Operation) -> None:
            if now.name == operation and not self.died:
                self.died = True
                raise SystemExit("injected")

    with ms.Checkpointer(storage, existing="continue") as ckpt:
        storage.fault = Dying()
        with pytest.raises(ms.SaveError, match="injected") as caught:
            ckpt.save(1, state(1))
        assert isinstance(caught.value.__cause__, SystemExit)
        assert ckpt.save(1, state(1)).result().step == 1


def test_the_late_answer_to_an_opening_that_was_given_up_is_not_the_next_ones(
    storage: FaultyStorage, monkeypatch: pytest.MonkeyPatch
) -> None:
    with ms.Checkpointer(storage) as ckpt:
        ckpt.save(1, state(1)).result()
    gate = Gate(lambda op: op.name == "lock")
    storage.fault = gate
    with ms.Checkpointer(storage) as ckpt:
        monkeypatch.setattr(limits, "STORAGE_SECONDS", 0.2)
        with pytest.raises(ms.Deadline):
            ckpt.save(2, state(2))
        monkeypatch.setattr(limits, "STORAGE_SECONDS", 60.0)
        assert ckpt.restore() is not None
        gate.open()  # now the first is answered, by a refusal: nothing had been restored when it was asked
        assert ckpt.save(2, state(2)).result().step == 2


def test_what_the_writer_remembers_does_not_grow_with_the_saves(storage: FaultyStorage) -> None:
    with ms.Checkpointer(storage, keep=2) as ckpt:
        for step in range(30):
            ckpt.save(step, state(step)).result()
        ckpt.wait()
        view = ckpt._saver.view
        assert view is not None
        assert len(view.line) <= 3
        assert {info.seq for info in view.checkpoints} <= view.line


def test_a_snapshot_that_is_gone_from_the_staging_memory_is_not_written_again(
    storage: FaultyStorage, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A budget smaller than the state: when the last file fails, the first chunks were overwritten already."""
    monkeypatch.setattr(limits, "RETRY_SECONDS", (0.0,))
    large = {"w": np.arange(500_000, dtype=np.float64)}
    with ms.Checkpointer(storage, staging_bytes=256 * 1024) as ckpt:
        ckpt.save(1, large).result()
        storage.fault = FailingOnce("sync")
        with pytest.raises(ms.SaveError):
            ckpt.save(2, {"w": large["w"] + 1}).result()
        assert ckpt.statistics().saves_retried == 0
        assert [info.step for info in ckpt.checkpoints()] == [1]
        ckpt.save(3, large).result()


class FailingOnce(Fault):
    """The first operation of a kind fails, as on a storage that is unavailable for a moment."""

    def __init__(self, name: str) -> None:
        self._name: str | None = name

    def before(self, operation: Operation) -> None:
        if operation.name == self._name:
            self._name = None
            raise storage_error(OSError(errno.EIO, "made up"), operation.name, operation.target)
