"""What a failed attempt or an interrupted retirement leaves goes with the next commit, and counts for nothing until then."""

from __future__ import annotations

import errno
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

import midstride as ms
from midstride.format import layout
from midstride.storage.system_errors import storage_error
from midstride.testing import FaultyStorage, Operation
from midstride.testing.faulty import Fault

MANIFEST = f"/{layout.MANIFEST}"


class Failing(Fault):
    """Operations that ``chosen`` picks fail, until ``over``; ``late``: though they have taken effect."""

    def __init__(
        self, chosen: Callable[[Operation], bool], *, late: bool = False, code: int = errno.EDQUOT, times: int = 1000
    ) -> None:
        self._chosen, self._late, self._code, self._times = chosen, late, code, times
        self.failed: list[str] = []
        self.seen: list[tuple[str, str]] = []

    def over(self) -> None:
        self._times = 0

    def _act(self, operation: Operation) -> None:
        if self._times and self._chosen(operation):
            self._times -= 1
            self.failed.append(operation.name)
            raise storage_error(OSError(self._code, "made up"), operation.name, operation.target)

    def before(self, operation: Operation) -> None:
        self.seen.append((operation.name, operation.target))
        if not self._late:
            self._act(operation)

    def after(self, operation: Operation) -> None:
        if self._late:
            self._act(operation)


def state(value: int) -> dict[str, object]:
    return {"w": np.full(3000, value)}


@pytest.fixture
def storage(tmp_path: Path) -> FaultyStorage:
    return FaultyStorage(ms.LocalStorage(tmp_path))


def folders(path: Path) -> set[str]:
    return {p.name for p in path.iterdir() if p.is_dir()}


def save_that_fails(ckpt: ms.Checkpointer, step: int) -> None:
    with pytest.raises(ms.SaveError):
        ckpt.save(step, state(step)).result()


def test_debris_of_a_failed_attempt_goes_with_the_next_commit(tmp_path: Path, storage: FaultyStorage) -> None:
    with ms.Checkpointer(storage) as ckpt:
        fault = Failing(lambda op: op.name in ("write", "remove_file", "remove_folder"))
        storage.fault = fault
        save_that_fails(ckpt, 1)
        assert len(folders(tmp_path)) == 1, "the debris could not be removed"
        fault.over()
        info = ckpt.save(2, state(2)).result()
        ckpt.wait()
        assert folders(tmp_path) == {info.name}


def test_debris_that_could_not_be_removed_when_the_folder_was_opened(tmp_path: Path, storage: FaultyStorage) -> None:
    storage.fault = Failing(lambda op: op.name in ("write", "remove_file", "remove_folder"))
    with ms.Checkpointer(storage) as ckpt:
        save_that_fails(ckpt, 1)
    fault = Failing(lambda op: op.name == "remove_file", times=1)
    storage.fault = fault
    with ms.Checkpointer(storage) as ckpt:
        info = ckpt.save(2, state(2)).result()
        ckpt.wait()
        assert fault.failed
        assert folders(tmp_path) == {info.name}


def published_and_failed() -> Failing:
    """The manifest gets its name, the sync after that fails, and it cannot be taken back."""
    renamed = False

    def chosen(operation: Operation) -> bool:
        nonlocal renamed
        if operation.name == "rename" and operation.target.endswith(MANIFEST):
            renamed = True
        return renamed and operation.name in ("sync_folder", "remove_file")

    return Failing(chosen)


def test_failed_attempt_that_stayed_published_takes_no_place_in_keep(tmp_path: Path, storage: FaultyStorage) -> None:
    with ms.Checkpointer(storage, keep=2) as ckpt:
        first = ckpt.save(1, state(1)).result()
        fault = published_and_failed()
        storage.fault = fault
        save_fails_but_is_there(ckpt, tmp_path)
        fault.over()
        second = ckpt.save(3, state(3)).result()
        ckpt.wait()
        assert folders(tmp_path) == {first.name, second.name}
        assert [info.step for info in ckpt.checkpoints()] == [1, 3]


def save_fails_but_is_there(ckpt: ms.Checkpointer, path: Path) -> None:
    with pytest.raises(ms.CommitError):
        ckpt.save(2, state(2)).result()
    assert [info.step for info in ckpt.checkpoints()] == [1, 2]


def test_no_two_checkpoints_get_one_seq(tmp_path: Path, storage: FaultyStorage) -> None:
    with ms.Checkpointer(storage) as ckpt:
        ckpt.save(1, state(1)).result()
        fault = published_and_failed()
        storage.fault = fault
        save_fails_but_is_there(ckpt, tmp_path)
        [left] = [name for name in folders(tmp_path) if layout.parse_step_folder(name).step == 2]  # type: ignore[union-attr]
        # It cannot be read just now: its number must not be given away all the same.
        storage.fault = Failing(
            lambda op: left in op.target and op.name in ("open_file", "remove_file", "sync_folder"), code=errno.ENOENT
        )
        third = ckpt.save(3, state(3)).result()
        ckpt.wait()
        storage.fault = Fault()
        seqs = [info.seq for info in ms.open(tmp_path).checkpoints()]
        assert len(set(seqs)) == len(seqs), seqs
        assert third.seq == max(seqs)


def is_data(operation: Operation) -> bool:
    return operation.name == "remove_file" and operation.target.endswith(".safetensors")


@pytest.mark.parametrize("late", [False, True])
def test_no_data_is_deleted_while_its_manifest_may_come_back(
    tmp_path: Path, storage: FaultyStorage, late: bool
) -> None:
    """The manifest is removed and the sync of that fails: the bytes stay until a sync succeeds."""
    with ms.Checkpointer(storage, keep=1) as ckpt:
        old = ckpt.save(1, state(1)).result()
        fault = Failing(lambda op: op.name == "sync_folder" and op.target == old.name, late=late)
        storage.fault = fault
        ckpt.save(2, state(2)).result()
        ckpt.wait()
        assert fault.failed
        assert not any(name == "remove_file" and target.endswith(".safetensors") for name, target in fault.seen)
    # Opening anew takes it for debris: the sync comes first there too.
    fault = Failing(lambda op: op.name == "sync_folder" and op.target == old.name)
    storage.fault = fault
    with ms.Checkpointer(storage, existing="continue") as ckpt:
        ckpt.save(3, state(3)).result()
        ckpt.wait()
        assert fault.failed
        assert not any(old.name in target and name == "remove_file" for name, target in fault.seen)
        fault.over()
        last = ckpt.save(4, state(4)).result()
        ckpt.wait()
        assert old.name not in folders(tmp_path)
        assert last.name in folders(tmp_path)


def test_half_retired_checkpoint_is_none(tmp_path: Path, storage: FaultyStorage) -> None:
    """Its manifest is gone, its bytes could not be removed: it is no "saved already" for its step."""
    with ms.Checkpointer(storage, keep=1) as ckpt:
        old = ckpt.save(1, state(1)).result()
        fault = Failing(is_data)
        storage.fault = fault
        ckpt.save(2, state(2)).result()
        ckpt.wait()
        assert fault.failed
        again = ckpt.save(1, state(1)).result()
        assert again.name != old.name
        fault.over()
        last = ckpt.save(3, state(3)).result()
        ckpt.wait()
        assert folders(tmp_path) == {last.name}


@pytest.mark.parametrize("operation", ["list_folder", "lock", "sync_folder"])
def test_one_error_when_the_folder_is_opened_costs_no_checkpoint(
    operation: str, storage: FaultyStorage, pauses: list[float]
) -> None:
    storage.fault = fault = Failing(lambda op: op.name == operation, code=errno.EIO, times=1)
    with ms.Checkpointer(storage) as ckpt:
        ckpt.save(1, state(1)).result()
    assert fault.failed
    assert pauses == [0.5]


def test_a_path_that_cannot_be_is_told_at_once(tmp_path: Path, pauses: list[float]) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ms.StorageError), ms.Checkpointer(tmp_path / "file") as ckpt:
        ckpt.save(1, state(1))
    assert not pauses


def test_one_error_in_a_comparison_costs_no_checkpoint(storage: FaultyStorage, pauses: list[float]) -> None:
    with ms.Checkpointer(storage) as ckpt:
        info = ckpt.save(1, state(1)).result()
        ckpt.wait()
        storage.fault = fault = Failing(
            lambda op: op.name == "read" and op.target.endswith(MANIFEST), code=errno.EIO, times=1
        )
        assert ckpt.save(1, state(1)).result() == info
        assert fault.failed
        assert pauses == [0.5]


def test_progress_counts_what_the_last_attempt_wrote(storage: FaultyStorage) -> None:
    seen: list[int] = []
    with ms.Checkpointer(storage) as ckpt:

        class Looking(Failing):
            def before(self, operation: Operation) -> None:
                pending = ckpt._saver.pending
                if operation.name == "make_folder" and pending is not None:
                    seen.append(pending.progress().written_bytes)
                super().before(operation)

        storage.fault = Looking(
            lambda op: op.name == "sync" and op.target.endswith(".safetensors"), code=errno.EIO, times=1
        )
        pending = ckpt.save(1, state(1))
        pending.result()
        progress = pending.progress()
        assert progress.written_bytes == progress.total_bytes > 0
        assert seen == [0, 0]


def test_a_folder_that_was_made_though_the_answer_was_lost_goes_at_once(tmp_path: Path, storage: FaultyStorage) -> None:
    storage.fault = fault = Failing(lambda op: op.name == "make_folder", late=True, times=1)
    with ms.Checkpointer(storage) as ckpt:
        save_that_fails(ckpt, 1)
        assert fault.failed
        assert folders(tmp_path) == set()


def test_a_retirement_syncs_its_folder_once(tmp_path: Path, storage: FaultyStorage) -> None:
    with ms.Checkpointer(storage, keep=1) as ckpt:
        old = ckpt.save(1, state(1)).result()
        storage.fault = fault = Failing(lambda op: False)
        ckpt.save(2, state(2)).result()
        ckpt.wait()
    of_old = [name for name, target in fault.seen if target.startswith(old.name)]
    assert of_old.count("sync_folder") == 1
    data = [number for number, (name, target) in enumerate(fault.seen)
            if name == "remove_file" and target.startswith(old.name) and not target.endswith(MANIFEST)]  # fmt: skip
    assert fault.seen.index(("remove_file", old.name + MANIFEST)) < fault.seen.index(("sync_folder", old.name))
    assert fault.seen.index(("sync_folder", old.name)) < min(data)
