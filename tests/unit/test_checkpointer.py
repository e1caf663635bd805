"""The face: when it saves, what it waits for, what it raises and when."""

from __future__ import annotations

import errno
import os
import signal
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import midstride as ms
from midstride.testing import FaultyStorage, Operation, fail_from
from midstride.testing.faulty import Fault


def state_of(value: int) -> dict[str, Any]:
    return {"model": {"w": np.full(5000, value)}, "value": value}


class Gate(Fault):
    """Holds every write until it is opened."""

    def __init__(self) -> None:
        self.open, self.reached = threading.Event(), threading.Event()

    def before(self, operation: Operation) -> None:
        if operation.name == "write":
            self.reached.set()
            assert self.open.wait(60)


class FailSync(Fault):
    """Every sync of a data file fails while ``broken``."""

    broken = True

    def before(self, operation: Operation) -> None:
        if self.broken and operation.name == "sync" and operation.target.endswith(".safetensors"):
            fail_from(0, errno.EIO).before(operation)


@pytest.fixture
def storage(tmp_path: Path) -> FaultyStorage:
    return FaultyStorage(ms.LocalStorage(tmp_path / "run"))


def test_step_saves_when_due_and_returns_the_handle(tmp_path: Path) -> None:
    with ms.Checkpointer(tmp_path / "run", every=3, busy="wait") as ckpt:
        handles = [ckpt.step(step, state_of(step)) for step in range(1, 10)]
    assert [handle.step for handle in handles if handle is not None] == [3, 6, 9]
    assert [info.step for info in ms.open(tmp_path / "run").checkpoints()] == [3, 6, 9]


def test_a_save_put_off_stays_due_and_is_counted(storage: FaultyStorage) -> None:
    storage.fault = gate = Gate()
    with ms.Checkpointer(storage, every=2) as ckpt:
        first = ckpt.step(2, state_of(2))
        assert first is not None
        assert gate.reached.wait(60)
        assert not first.done()
        assert ckpt.step(3, state_of(3)) is None
        assert ckpt.statistics().saves_skipped == 0
        assert ckpt.step(4, state_of(4)) is None
        assert ckpt.step(5, state_of(5)) is None
        assert ckpt.statistics().saves_skipped == 2
        gate.open.set()
        first.result()
        late = ckpt.step(5, state_of(5))
        assert late is not None
        assert late.result().step == 5
    assert ms.open(storage).load()["value"] == 5


def test_progress_and_phases(storage: FaultyStorage) -> None:
    storage.fault = gate = Gate()
    with ms.Checkpointer(storage) as ckpt:
        pending = ckpt.save(1, state_of(1))
        assert gate.reached.wait(60)
        assert pending.staged()
        assert pending.progress().phase == "writing"
        assert pending.progress().written_bytes < pending.progress().total_bytes == pending.progress().staged_bytes
        with pytest.raises(TimeoutError, match="step 1"):
            pending.result(timeout=0.01)
        gate.open.set()
        info = pending.result()
        assert pending.done()
        assert pending.progress().fraction == 1.0
        assert (info.step, info.seq, info.parent) == (1, 1, None)
        assert ckpt.save(2, state_of(2)).result().parent == 1


def test_save_waits_for_its_turn(storage: FaultyStorage) -> None:
    storage.fault = gate = Gate()
    with ms.Checkpointer(storage) as ckpt:
        first = ckpt.save(1, state_of(1))
        assert gate.reached.wait(60)
        threading.Timer(0.05, gate.open.set).start()
        ckpt.save(2, state_of(2))
        assert first.done()


@pytest.mark.parametrize("ask", ["handle", "step", "save", "wait", "check", "close"])
def test_a_failure_is_raised_once_to_whoever_asks_first(storage: FaultyStorage, ask: str) -> None:
    storage.fault = fault = FailSync()
    ckpt = ms.Checkpointer(storage, every=1)
    pending = ckpt.save(1, state_of(1))
    ckpt._saver.wait_idle(None)
    fault.broken = False
    asking = {
        "handle": pending.result,
        "step": lambda: ckpt.step(2, state_of(2)),
        "save": lambda: ckpt.save(2, state_of(2)),
        "wait": ckpt.wait,
        "check": ckpt.check,
        "close": ckpt.close,
    }[ask]
    with pytest.raises(ms.WriteError, match="step 1 could not be saved") as caught:
        asking()
    assert isinstance(caught.value.__cause__, ms.Unavailable)
    ckpt.check()
    ckpt.wait()
    ckpt.close()
    # step() and save() took the save that was due before they raised.
    assert [info.step for info in ckpt.checkpoints()] == ([2] if ask in ("step", "save") else [])


def test_tolerated_failures(storage: FaultyStorage) -> None:
    storage.fault = fault = FailSync()
    ckpt = ms.Checkpointer(storage, every=1, busy="wait", max_failures=2)
    for step in (1, 2):
        assert ckpt.step(step, state_of(step)) is not None
    ckpt._saver.wait_idle(None)
    assert ckpt.statistics().failures_in_a_row == 2
    fault.broken = False
    ckpt.save(3, state_of(3)).result()
    assert ckpt.statistics().failures_in_a_row == 0
    ckpt.wait()  # it is over, and was tolerated
    fault.broken = True
    for step in (4, 5, 6):
        ckpt.step(step, state_of(step))
    ckpt._saver.wait_idle(None)
    with pytest.raises(ms.WriteError, match="step 4") as caught:
        ckpt.step(7, state_of(7))
    assert "more saves failed" in caught.value.__notes__[0]
    with pytest.raises(ms.WriteError, match="step 7"):
        ckpt.close()


def test_leaving_with_an_exception_keeps_it_and_notes_the_failure(storage: FaultyStorage) -> None:
    storage.fault = FailSync()
    with pytest.raises(ZeroDivisionError) as caught, ms.Checkpointer(storage) as ckpt:
        ckpt.save(1, state_of(1))
        raise ZeroDivisionError
    assert "step 1 could not be saved" in caught.value.__notes__[0]


def test_leaving_finishes_the_save_in_flight_and_starts_none(tmp_path: Path) -> None:
    with pytest.raises(ZeroDivisionError), ms.Checkpointer(tmp_path / "run", every=1) as ckpt:
        ckpt.step(1, state_of(1))
        raise ZeroDivisionError
    assert [info.step for info in ms.open(tmp_path / "run").checkpoints()] == [1]
    with pytest.raises(ms.SaveError, match="closed"):
        ckpt.save(2, state_of(2))
    ckpt.close()


def test_metrics_are_read_only_when_a_save_is_due(tmp_path: Path) -> None:
    class Loss:
        shape = ()
        reads = 0

        def item(self) -> float:
            Loss.reads += 1
            return 0.5

    with ms.Checkpointer(tmp_path / "run", every=5) as ckpt:
        for step in range(1, 6):
            ckpt.step(step, state_of(step), metrics={"loss": Loss()})
    assert Loss.reads == 1
    assert ms.open(tmp_path / "run").latest().metrics == {"loss": 0.5}  # type: ignore[union-attr]


def test_listeners_hear_of_everything_and_break_nothing(storage: FaultyStorage) -> None:
    heard: list[str] = []

    class Loud:
        def __getattr__(self, name: str) -> Any:
            return lambda event: heard.append(name)

    class Broken(ms.Listener):
        def before_save(self, event: object) -> None:
            raise RuntimeError("a listener's own fault")

    class Stopper(ms.Listener):
        def after_save(self, event: Any) -> bool:
            return event.info.step == 2

    storage.fault = fault = FailSync()
    fault.broken = False
    with ms.Checkpointer(storage, listeners=[Broken(), Loud(), Stopper()]) as ckpt:  # type: ignore[list-item]
        ckpt.save(1, state_of(1)).result()
        assert not ckpt.should_stop
        ckpt.save(2, state_of(2)).result()
        assert ckpt.should_stop
        ckpt.save(2, state_of(2)).result()  # equal content: nothing is saved, nobody is told
        fault.broken = True
        with pytest.raises(ms.WriteError):
            ckpt.save(3, state_of(3)).result()
        assert ckpt.statistics().listener_failures == 3
    assert heard == ["begin", *["before_save", "after_save"] * 2, "before_save", "save_failed", "end"]


def test_rolling_back_keeps_lineage_and_order(tmp_path: Path) -> None:
    with ms.Checkpointer(tmp_path / "run") as ckpt:
        for step in (100, 200, 300, 400, 500):
            ckpt.save(step, state_of(step)).result()
    with ms.Checkpointer(tmp_path / "run") as ckpt:
        restored = ckpt.restore(step=300)
        assert restored is not None
        info = ckpt.save(310, state_of(310)).result()
        assert (info.seq, info.parent) == (6, restored.info.seq)
        assert ckpt.latest() == info  # although 500 is there
        ckpt.save(400, state_of(4000)).result()  # 400 belongs to the line that was left: superseded unasked
        with pytest.raises(ms.StepExists, match="step 310"):
            ckpt.save(310, state_of(0))
        assert ckpt.save(300, state_of(300)).result() == restored.info  # it is in this line, and equal
    assert ms.open(tmp_path / "run").load(step=400)["value"] == 4000


def test_a_save_that_fails_while_staging_is_dropped_and_the_next_one_works(tmp_path: Path) -> None:
    class Bad(np.ndarray):
        pass

    with ms.Checkpointer(tmp_path / "run") as ckpt:
        ckpt.save(1, state_of(1)).result()
        with pytest.raises(ms.UnsupportedState, match="/model/w"):
            ckpt.save(2, {"model": {"w": np.zeros(3).view(Bad)}})
        real = ckpt._saver._stager.stage_whole  # type: ignore[union-attr]

        def interrupted(*arguments: Any) -> None:
            raise KeyboardInterrupt

        ckpt._saver._stager.stage_whole = interrupted  # type: ignore[union-attr, method-assign]
        with pytest.raises(KeyboardInterrupt):
            ckpt.save(2, state_of(2))
        ckpt._saver._stager.stage_whole = real  # type: ignore[union-attr, method-assign]
        assert ckpt.save(3, state_of(3)).result().step == 3
    assert [info.step for info in ms.open(tmp_path / "run").checkpoints()] == [1, 3]


def test_the_three_answers(tmp_path: Path) -> None:
    run = tmp_path / "run"
    assert ms.Checkpointer(run).restore() is None
    assert ms.Checkpointer(run).latest() is None
    with pytest.raises(ms.NotFound):
        ms.open(run)
    (run / "step-000000000001-00000000").mkdir(parents=True)  # only what a first save that never ended left
    assert ms.Checkpointer(run).restore() is None
    with ms.Checkpointer(run) as ckpt:
        info = ckpt.save(1, state_of(1)).result()
    manifest = run / info.name / "manifest.json"
    whole = manifest.read_bytes()
    for damage in (whole[:-9], None):
        manifest.unlink()
        if damage is not None:
            manifest.write_bytes(damage)
        with pytest.raises(ms.NothingRestorable, match="Do not start at step 0"):
            ms.Checkpointer(run).restore()
        with pytest.raises(ms.NothingRestorable):
            ms.open(run).latest()
    (tmp_path / "file").write_text("")
    with pytest.raises(ms.StorageError):
        ms.Checkpointer(tmp_path / "file" / "run").save(1, state_of(1))
    (tmp_path / "link").symlink_to(tmp_path / "mount that is away" / "run")
    for path, told in ((tmp_path / "file", "not a folder"), (tmp_path / "link", "not mounted")):
        for look in (ms.open, lambda p: ms.Checkpointer(p).restore(), lambda p: ms.Checkpointer(p).latest()):
            with pytest.raises(ms.StorageError, match=told):
                look(path)


def test_statistics_have_the_age_of_the_last_commit(tmp_path: Path) -> None:
    with ms.Checkpointer(tmp_path / "run") as ckpt:
        assert ckpt.statistics().last_commit_age_seconds is None
        ckpt.save(1, state_of(1)).result()
        one = ckpt.statistics().last_commit_age_seconds
        two = ckpt.statistics().last_commit_age_seconds
        assert one is not None
        assert two is not None
        assert 0 <= one <= two


def test_the_order_counts_unreadable_manifests_and_the_one_restored_from(tmp_path: Path) -> None:
    run = tmp_path / "run"
    with ms.Checkpointer(run) as ckpt:
        for step in (1, 2, 3):
            ckpt.save(step, state_of(step)).result()
    hidden = next(run.glob("step-*3-*")) / "manifest.json"
    hidden.write_bytes(b"nonsense")
    with ms.Checkpointer(run) as ckpt:
        restored = ckpt.restore()
        assert restored is not None
        assert restored.step == 2
        last = ckpt.save(4, state_of(4)).result()
        assert last.seq > 3, "2 is the highest that can be read, and one is hidden"
    lonely = tmp_path / "lonely"
    with ms.Checkpointer(lonely) as ckpt:
        ckpt._adopt, ckpt._restored = True, ms.open(run).latest()  # a run that moved to a new folder
        assert ckpt.save(5, state_of(5)).result().seq == last.seq + 1


def test_another_runs_folder_is_refused_at_the_first_step_due_or_not(tmp_path: Path) -> None:
    with ms.Checkpointer(tmp_path / "run") as ckpt:
        ckpt.save(1, state_of(1))
    other = ms.Checkpointer(tmp_path / "run", every=1000)
    with pytest.raises(ms.ForeignRun, match="Call restore"):
        other.step(1, state_of(1))
    other.close()


def test_a_refused_state_leaves_nothing_behind(tmp_path: Path) -> None:
    heard: list[str] = []

    class Loud:
        def __getattr__(self, name: str) -> Any:
            return lambda event: heard.append(name)

    for use in ("save", "step"):
        ckpt = ms.Checkpointer(tmp_path / "run", every=1, listeners=[Loud()])  # type: ignore[list-item]
        with pytest.raises(ms.UnsupportedState, match="/model/f"):
            getattr(ckpt, use)(1, {"model": {"f": object()}})
        assert not (tmp_path / "run").exists()
        ckpt.save(1, state_of(1)).result()
        with pytest.raises(ms.UnsupportedState):
            ckpt.save(2, {"model": {"f": object()}})
        ckpt.close()
        assert heard == ["begin", "before_save", "after_save", "before_save", "save_failed", "end"]
        heard.clear()
        for path in sorted((tmp_path / "run").rglob("*"), reverse=True):
            path.rmdir() if path.is_dir() else path.unlink()
        (tmp_path / "run").rmdir()


def test_a_second_thread_waits_and_the_same_one_is_refused(tmp_path: Path) -> None:
    with ms.Checkpointer(tmp_path / "run") as ckpt:

        def many(first: int) -> None:
            for step in range(first, first + 20):
                ckpt.save(step, {"w": np.full(200_000, step), "value": step})

        threads = [threading.Thread(target=many, args=(first,)) for first in (1000, 2000, 3000)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        ckpt.wait()

        class Reentrant:
            def state_dict(self) -> dict[str, int]:
                ckpt.save(9, {})
                return {}

            def load_state_dict(self, state: object) -> None: ...

        with pytest.raises(ms.SaveError, match="inside step"):
            ckpt.save(1, {"x": Reentrant()})
    reader = ms.open(tmp_path / "run")
    assert len(reader.checkpoints()) == 60
    for info in reader.checkpoints():
        state = reader.load(info.step)
        assert state["value"] == info.step
        assert (state["w"] == info.step).all()


def test_a_line_that_was_left_is_superseded_although_parents_were_retired(tmp_path: Path) -> None:
    keep = ms.EveryNSteps(100) | ms.LatestN(1)
    with ms.Checkpointer(tmp_path / "run", keep=keep) as ckpt:
        for step in (100, 200, 300):
            ckpt.save(step, state_of(step)).result()
    with ms.Checkpointer(tmp_path / "run", keep=keep) as ckpt:
        ckpt.restore(step=100)
        for step in (150, 160):
            ckpt.save(step, state_of(step)).result()
        assert ckpt.save(200, state_of(7)).result().step == 200
        assert ckpt.save(100, state_of(100)).result().seq == 1  # its own line reaches back beyond what was retired


def test_a_lock_that_was_lost_is_taken_anew(tmp_path: Path) -> None:
    with ms.Checkpointer(tmp_path / "run") as ckpt:
        ckpt.save(1, state_of(1)).result()
        (tmp_path / "run" / ".lock").unlink()
        with pytest.raises(ms.CommitError):
            ckpt.save(2, state_of(2)).result()
        assert ckpt.save(3, state_of(3)).result().parent == 1
    assert [info.step for info in ms.open(tmp_path / "run").checkpoints()] == [1, 3]


def test_a_step_whose_checkpoint_rotted_is_saved_anew(tmp_path: Path) -> None:
    with ms.Checkpointer(tmp_path / "run") as ckpt:
        name = ckpt.save(1, state_of(1)).result().name
        (tmp_path / "run" / name / "manifest.json").write_bytes(b"nonsense")
        info = ckpt.save(1, state_of(1)).result()
        assert info.name != name
    assert ms.open(tmp_path / "run").load()["value"] == 1


def test_syncs_and_deletions_count_as_progress(storage: FaultyStorage, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each takes half of what may pass without progress; all together take a multiple of it."""
    monkeypatch.setattr("midstride.limits.STORAGE_SECONDS", 0.6)

    class Slow(Fault):
        def after(self, operation: Operation) -> None:
            if operation.name == "sync" and operation.target.endswith(".safetensors"):
                threading.Event().wait(0.25)

    with ms.Checkpointer(storage) as ckpt:
        state = {f"item{n}": {"w": np.zeros(3)} for n in range(6)}
        storage.fault = Slow()
        ckpt.save(1, state).result()


def test_a_storage_that_never_answers_is_not_waited_for_for_ever(
    storage: FaultyStorage, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("midstride.limits.STORAGE_SECONDS", 0.2)
    storage.fault = gate = Gate()
    ckpt = ms.Checkpointer(storage)
    with pytest.raises(ms.Deadline, match=r"step 1 .* no progress for 0\.2 s"):
        ckpt.save(1, state_of(1)).result()
    gate.open.set()
    ckpt.close()


def test_a_manifest_that_could_not_be_read_for_a_while_is_not_the_newest_afterwards(tmp_path: Path) -> None:
    with ms.Checkpointer(tmp_path, keep=ms.LatestN(1) | ms.EveryNSteps(100)) as ckpt:
        for step in (100, 110, 120, 130, 140):
            newest = ckpt.save(step, state_of(step)).result()
    manifest = tmp_path / newest.name / "manifest.json"
    content = manifest.read_bytes()
    manifest.write_bytes(b"nonsense")
    with ms.Checkpointer(tmp_path) as ckpt:
        assert ckpt.restore(step=100) is not None
        for step in (105, 106):
            ckpt.save(step, state_of(step)).result()
    manifest.write_bytes(content)
    found = ms.open(tmp_path).checkpoints()
    assert [info.step for info in found] == [100, 140, 105, 106]
    assert found[-1].seq == found[-2].seq + 1


@pytest.mark.parametrize("trouble", ["missing", "cut"])
def test_a_step_whose_file_is_gone_is_saved_anew(trouble: str, tmp_path: Path) -> None:
    with ms.Checkpointer(tmp_path) as ckpt:
        old = ckpt.save(1, state_of(1)).result()
        file = next((tmp_path / old.name).glob("*.safetensors"))
        if trouble == "missing":
            file.unlink()
        else:
            os.truncate(file, file.stat().st_size - 1)
        new = ckpt.save(1, state_of(1)).result()
        assert new.name != old.name
        assert ms.open(tmp_path).latest() == new


@pytest.mark.parametrize("trouble", ["state", "storage"])
def test_a_signal_ends_the_run_also_when_its_save_cannot_be_taken(
    trouble: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with ms.Checkpointer(tmp_path, every=ms.OnSignal(signal.SIGUSR1)) as ckpt:
        ckpt.step(1, state_of(1))
        signal.raise_signal(signal.SIGUSR1)
        if trouble == "storage":
            monkeypatch.setattr(ckpt._saver, "wait_idle", lambda *_: (_ for _ in ()).throw(ms.Deadline("made up")))
        bad = {**state_of(2), "bad": object()} if trouble == "state" else state_of(2)
        with pytest.raises((ms.UnsupportedState, ms.Deadline)):
            ckpt.step(2, bad)
        assert ckpt.should_stop
        monkeypatch.undo()


def test_restores_of_two_items_that_did_not_end_are_made_good_one_by_one(tmp_path: Path) -> None:
    def modules(value: float) -> dict[str, Any]:
        made = {name: torch.nn.Linear(64, 64) for name in ("model", "ema")}
        for module in made.values():
            torch.nn.init.constant_(module.weight, value)
        return made

    with ms.Checkpointer(tmp_path) as ckpt:
        step = tmp_path / ckpt.save(1, modules(1.0)).result().name
    intact = {name: (step / f"{name}.safetensors").read_bytes() for name in ("model", "ema")}
    for name, raw in intact.items():
        (step / f"{name}.safetensors").write_bytes(raw[:-1] + bytes([raw[-1] ^ 1]))
    with ms.Checkpointer(tmp_path) as ckpt:
        state = modules(7.0)
        for only in ("model", "ema"):
            with pytest.raises(ms.NothingRestorable):
                ckpt.restore(state, only=only)
        for name in ("model", "ema"):
            with pytest.raises(ms.StagingError, match="not whole"):
                ckpt.save(2, state)
            (step / f"{name}.safetensors").write_bytes(intact[name])
            ckpt.restore(state, only=name)
        ckpt.save(2, state).result()


def test_statistics_in_a_signal_handler_and_in_a_forked_child_wait_for_nobody(tmp_path: Path) -> None:
    with ms.Checkpointer(tmp_path) as ckpt, ckpt._recorder._lock:  # as if in the middle of counting
        done = threading.Thread(target=ckpt.statistics, daemon=True)
        done.start()
        done.join(10)
        assert not done.is_alive()
