"""Where the writer runs: a process where one can do the work, a thread elsewhere; what was asked for, or an error."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

import midstride as ms
from midstride.errors import WriterDied
from midstride.retention import Retention
from midstride.save.engine import ThreadEngine
from midstride.save.messages import Failed, Job, Reply, Seal, Staged
from midstride.save.process_engine import ProcessEngine
from midstride.storage import Storage


class Odd(Retention):
    """A rule of the script's own."""

    def kept(self, infos: Sequence[ms.CheckpointInfo]) -> set[int]:
        return {info.seq for info in infos}


class Mine(ms.LocalStorage):
    """A storage of the script's own, though it is almost ours."""


def chosen(path: Path, *, storage: Storage | None = None, keep: object = None, wanted: object = None) -> str:
    with ms.Checkpointer(storage or path, keep=keep, engine=wanted) as ckpt:  # type: ignore[arg-type]
        return ckpt._saver._engine.name


@pytest.mark.writer_process
def test_a_process_is_the_default(tmp_path: Path) -> None:
    assert chosen(tmp_path) == "process"
    assert chosen(tmp_path, keep=ms.LatestN(2) | ms.BestN(1, "loss", "min")) == "process"
    assert chosen(tmp_path, wanted="thread") == "thread"


@pytest.mark.writer_process
def test_code_of_the_scripts_own_runs_on_a_thread(tmp_path: Path) -> None:
    for options, why in (
        ({"storage": ms.MemoryStorage()}, "cannot open this storage"),
        ({"storage": Mine(tmp_path)}, "cannot open this storage"),
        ({"keep": Odd()}, "your own code"),
        ({"keep": Odd() | ms.LatestN(1)}, "your own code"),
    ):
        assert chosen(tmp_path, **options) == "thread"  # type: ignore[arg-type]
        with pytest.raises(ValueError, match=why):
            chosen(tmp_path, wanted="process", **options)  # type: ignore[arg-type]


@pytest.mark.writer_process
@pytest.mark.parametrize("sign", ["prompt", "notebook"])
def test_a_notebook_has_a_thread_unless_it_asks(sign: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if sign == "prompt":
        monkeypatch.setattr(sys, "ps1", ">>> ", raising=False)
    else:
        monkeypatch.setitem(sys.modules, "ipykernel", sys)
    assert chosen(tmp_path) == "thread"
    assert chosen(tmp_path, wanted="process") == "process"


@pytest.mark.writer_process
@pytest.mark.parametrize("lack", ["pidfd_open", "memfd_create"])
def test_elsewhere_than_on_linux_it_is_a_thread(lack: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(f"os.{lack}")
    assert chosen(tmp_path) == "thread"
    with pytest.raises(ValueError, match="Linux"):
        chosen(tmp_path, wanted="process")


@pytest.mark.writer_process
def test_a_frozen_program_is_not_started_again_as_a_writer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "frozen", True, raising=False)
    assert chosen(tmp_path) == "thread"


def test_a_job_for_a_writer_that_is_gone_fails_at_once(tmp_path: Path) -> None:
    replies: list[Reply] = []
    thread = ThreadEngine(ms.LocalStorage(tmp_path), "{}", replies.append)
    thread.start()
    assert thread.stop(60)
    job = object.__new__(Job)
    object.__setattr__(job, "number", 7)
    thread.send(job)
    (failed,) = [reply for reply in replies if isinstance(reply, Failed)]
    assert failed.job == 7
    assert isinstance(failed.error, WriterDied)


@pytest.mark.writer_process
def test_statistics_say_where_the_writer_runs(tmp_path: Path) -> None:
    with ms.Checkpointer(tmp_path) as ckpt:
        assert ckpt.statistics().engine is None
        ckpt.save(1, {"w": np.ones(3)}).result()
        assert ckpt.statistics().engine == "process"


def test_a_late_answer_to_an_earlier_job_leaves_the_present_one_alone(tmp_path: Path) -> None:
    class Woken:
        def wake(self) -> None: ...

    replies: list[Reply] = []
    process = ProcessEngine(ms.LocalStorage(tmp_path), "{}", replies.append)
    process._writer = Woken()  # type: ignore[assignment]
    job = object.__new__(Job)
    object.__setattr__(job, "number", 2)
    for request in (job, Staged(2, 0, 0), Seal(2)):
        process.send(request)
    process._answered(Failed(1, WriterDied("given up after it was sealed")))
    assert process._requests == [job, Staged(2, 0, 0), Seal(2)]
    process._answered(Failed(2, WriterDied("this one")))
    assert process._requests == []
    assert len(replies) == 2
