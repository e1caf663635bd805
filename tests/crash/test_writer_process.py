"""The writer process is killed, stopped, orphaned; the trainer too. No acknowledged checkpoint is lost, nobody hangs."""

from __future__ import annotations

import contextlib
import os
import resource
import signal
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import midstride as ms
from midstride import limits
from midstride.save import process_engine
from midstride.save.process_engine import ProcessEngine
from midstride.testing import FaultyStorage, StruckStorage
from tests.crash import struck_writer

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.writer_process


def state(value: int) -> dict[str, Any]:
    return {"model": {"w": np.full(30_000, value)}, "optimizer": {"m": np.full(30_000, -value)}, "n": value}


def saves(ckpt: ms.Checkpointer) -> list[ms.CheckpointInfo]:
    """A save, one that retires it, an overwrite."""
    first = ckpt.save(1, state(1)).result()
    second = ckpt.save(2, state(2)).result()
    third = ckpt.save(2, state(3), overwrite=True).result()
    ckpt.wait()
    return [first, second, third]


def operations(path: Path) -> int:
    storage = FaultyStorage(ms.LocalStorage(path))
    with ms.Checkpointer(storage, keep=1, engine="thread") as ckpt:
        saves(ckpt)
        return len(storage.operations)


def content(path: Path) -> dict[int, int]:
    reader = ms.open(path)
    found = {info.step: reader.load(step=info.step) for info in reader.checkpoints()}
    for loaded in found.values():
        n = loaded["n"]
        assert (loaded["model"]["w"] == n).all()
        assert (loaded["optimizer"]["m"] == -n).all()
    return {step: loaded["n"] for step, loaded in found.items()}


def leftovers(path: Path) -> list[str]:
    return sorted(p.name for p in path.iterdir() if p.is_dir() and not (p / "manifest.json").exists())


def writer_of(ckpt: ms.Checkpointer) -> int:
    engine = ckpt._saver._engine
    assert isinstance(engine, ProcessEngine)
    assert engine.pid is not None
    return engine.pid


def is_there(pid: int) -> bool:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, 0)
        return True
    return False


def wait_until(ready: Any, seconds: float = 60.0) -> None:
    deadline = time.monotonic() + seconds
    while not ready():
        assert time.monotonic() < deadline
        time.sleep(0.02)


@pytest.fixture(scope="module")
def count(tmp_path_factory: pytest.TempPathFactory) -> int:
    return operations(tmp_path_factory.mktemp("count") / "run")


LONG = bool(os.environ.get("MIDSTRIDE_LONG"))


def numbers(every: int, first: int, last: int = 90) -> list[int]:
    """Every so many, beginning with ``first``; all of them in the long form."""
    return list(range(1, last)) if LONG else list(range(first, last, every))


def strike_at(number: int, late: bool, signum: int, tmp_path: Path) -> ms.Statistics:
    run, mark = tmp_path / "run", tmp_path / "struck"
    storage = StruckStorage(ms.LocalStorage(run), number, signum, str(mark), late=late)
    with ms.Checkpointer(storage, keep=1, engine="process") as ckpt:
        infos = saves(ckpt)
        assert [info.step for info in infos] == [1, 2, 2]
        assert len({info.seq for info in infos}) == 3
        ckpt.save(3, state(4)).result()  # also where it died in the last retirement
        ckpt.wait()
        statistics = ckpt.statistics()
    assert content(run) == {3: 4}
    assert leftovers(run) == []
    return statistics


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("number", numbers(9, 2))
def test_a_writer_that_is_killed_costs_no_save(number: int, late: bool, count: int, tmp_path: Path) -> None:
    strike_at(number, late, signal.SIGKILL, tmp_path)
    assert late or (tmp_path / "struck").exists() == (number <= count)  # one that fails as it should has no "after"


@pytest.mark.parametrize("number", numbers(40, 3))
def test_a_writer_that_is_stopped_is_replaced(number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "WRITER_SECONDS", 3.0)
    strike_at(number, False, signal.SIGSTOP, tmp_path)


def strike_at_message(number: int, signum: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """``seq`` of the checkpoints that are there at the end; nothing is retired but what is overwritten."""
    mark = tmp_path / "struck"
    monkeypatch.setattr(process_engine, "_BOOT", struck_writer.BOOT)
    monkeypatch.setenv(struck_writer.STRIKE, f"{number} {int(signum)} {mark}")
    run = tmp_path / "run"
    with ms.Checkpointer(run, engine="process") as ckpt:
        saves(ckpt)
        ckpt.save(3, state(4)).result()
        ckpt.wait()
    assert content(run) == {1: 1, 2: 3, 3: 4}
    assert leftovers(run) == []
    assert mark.exists()
    return [info.seq for info in ms.open(run).checkpoints()]


@pytest.mark.parametrize("number", numbers(5, 2, 46))
def test_a_writer_that_is_killed_at_a_message(number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seqs = strike_at_message(number, signal.SIGKILL, tmp_path, monkeypatch)
    assert seqs == [1, 3, 4], "nothing was published twice"


@pytest.mark.parametrize("number", numbers(30, 4, 46))
def test_a_writer_that_is_stopped_at_a_message(number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "WRITER_SECONDS", 3.0)
    assert strike_at_message(number, signal.SIGSTOP, tmp_path, monkeypatch) == [1, 3, 4]


def test_a_writer_that_adopts_nothing_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(struck_writer.BROKEN, "adopts nothing")
    twice = []
    for number in range(9, 15):  # among them the message that says "committed"
        (tmp_path / str(number)).mkdir()
        with contextlib.suppress(AssertionError):
            twice.append(strike_at_message(number, signal.SIGKILL, tmp_path / str(number), monkeypatch))
    assert any(seqs != [1, 3, 4] for seqs in twice)


# The trainer dies.


LARGE = """
def state(n): return {"w": np.full(4_000_000, n), "n": n}
"""


def train(script: str, *arguments: str, **options: Any) -> subprocess.Popen[str]:
    code = "import sys, os, signal, threading, time, numpy as np, midstride as ms\n" + textwrap.dedent(script)
    return subprocess.Popen(
        [sys.executable, "-c", code, *arguments], cwd=ROOT, text=True, **{"stdout": subprocess.PIPE, **options}
    )


def orphans_are_gone(run: Path) -> None:
    """The writer that a dead trainer left lets the folder go when it is done."""

    def free() -> bool:
        try:
            ms.LocalStorage(run).lock(".lock", "{}").release()
        except ms.Busy:
            return False
        return True

    wait_until(free)


def test_what_save_has_returned_for_survives_the_trainers_death(tmp_path: Path) -> None:
    for number in range(3):
        run = tmp_path / str(number)
        trainer = train(
            LARGE
            + """
ckpt = ms.Checkpointer(sys.argv[1], keep=1)
ckpt.save(1, state(1)).result()
ckpt.save(2, state(2))
os.kill(os.getpid(), signal.SIGKILL)
""",
            str(run),
        )
        assert trainer.wait(60) == -signal.SIGKILL
        orphans_are_gone(run)
        (info,) = ms.open(run).checkpoints()
        assert info.step == 2
        assert (ms.open(run).load()["w"] == 2).all()


DIES_AT_A_MESSAGE = """
from midstride.save import process_engine
mode = sys.argv[3] if len(sys.argv) > 3 else ""
if mode == "forked":
    if os.fork() == 0:
        os.closerange(1, 3)
        time.sleep(4)
        os._exit(0)
elif "slow" in mode:
    flush = process_engine._Process.flush
    process_engine._Process.flush = lambda writer: (time.sleep(0.3), flush(writer))
elif mode:
    from tests.crash import struck_writer
    process_engine._BOOT = struck_writer.BOOT
    os.environ[struck_writer.BROKEN] = sys.argv[3]
def state(n): return {"model": {"w": np.full(4_000_000, n)}, "n": n}
ckpt = ms.Checkpointer(sys.argv[1], keep=1)
ckpt.save(1, state(1)).result()
ckpt.wait()
engine, messages = ckpt._saver._engine, 0
class Dying:
    def __getattr__(self, name): return getattr(engine, name)
    def send(self, request):
        global messages
        engine.send(request)
        messages += 1
        if messages == int(sys.argv[2]):
            engine.hand_over()
            os.kill(os.getpid(), signal.SIGKILL)
ckpt._saver._engine = Dying()
if "careless" in mode:
    engine.hand_over = lambda: None
ckpt.save(2, state(2))
os.kill(os.getpid(), signal.SIGKILL)
"""
# A job, two chunks, the seal.


def dies_at(number: int, run: Path, *broken: str) -> list[int]:
    trainer = train(DIES_AT_A_MESSAGE, str(run), str(number), *broken)
    assert trainer.wait(60) == -signal.SIGKILL
    orphans_are_gone(run)
    assert (ms.open(run).load()["model"]["w"] == ms.open(run).load()["n"]).all()
    with ms.Checkpointer(run) as ckpt:
        restored = ckpt.restore()
        assert restored is not None
        assert restored.state["n"] == restored.step
        ckpt.save(3, {"w": np.zeros(3)}).result()
    assert leftovers(run) == []
    return [info.step for info in ms.open(run).checkpoints() if info.step < 3]


@pytest.mark.parametrize("forked", ["", "forked"])
@pytest.mark.parametrize("number", [1, 2, 3, 4, 5])
def test_a_trainer_that_dies_while_it_stages(number: int, forked: str, tmp_path: Path) -> None:
    assert dies_at(number, tmp_path, forked) == ([1] if number <= 3 else [2])


DIES_AT_AN_OPERATION = (
    LARGE
    + """
from midstride.testing import StruckStorage
storage = StruckStorage(ms.LocalStorage(sys.argv[1]), int(sys.argv[2]), signal.SIGKILL, sys.argv[3], pid=os.getpid())
ckpt = ms.Checkpointer(storage, keep=1, engine="process")
for step in range(1, 4):
    print("begin", step, flush=True)
    pending = ckpt.save(step, state(step))
    print("returned", step, flush=True)
    pending.result()
    print("saved", step, flush=True)
ckpt.wait()
"""
)


@pytest.mark.parametrize("number", numbers(13, 3, 80))
def test_a_trainer_that_dies_while_its_writer_works(number: int, tmp_path: Path) -> None:
    run, mark = tmp_path / "run", tmp_path / "struck"
    trainer = train(DIES_AT_AN_OPERATION, str(run), str(number), str(mark))
    # The last line may be cut short by the kill.
    said = [
        line.split() for line in trainer.communicate(timeout=60)[0].splitlines(keepends=True) if line.endswith("\n")
    ]
    if not mark.exists():
        assert said[-1] == ["saved", "3"]
        return
    assert trainer.returncode == -signal.SIGKILL
    begun = max(int(step) for what, step in said if what == "begin")
    returned = max((int(step) for what, step in said if what != "begin"), default=0)
    if run.exists():
        orphans_are_gone(run)
    with ms.Checkpointer(run) as ckpt:
        restored = ckpt.restore()
        step = 0 if restored is None else restored.step
        assert returned <= step <= begun
        assert restored is None or (restored.state["w"] == step).all()
        ckpt.save(9, {"w": np.zeros(3)}).result()
        ckpt.wait()
    assert leftovers(run) == []


@pytest.mark.parametrize(("mode", "kept"), [("slow", [2]), ("slow and careless", [1])])
def test_save_returns_when_the_snapshot_is_the_writers(mode: str, kept: list[int], tmp_path: Path) -> None:
    """The second does not wait for that, and so loses what it had returned for."""
    assert dies_at(5, tmp_path, mode) == kept


def test_a_writer_that_seals_by_itself_is_noticed(tmp_path: Path) -> None:
    assert dies_at(3, tmp_path, "seals by itself") != [1]


def test_a_writer_that_ends_with_its_trainer_is_noticed(tmp_path: Path) -> None:
    assert dies_at(4, tmp_path, "ends at once") != [2]


def test_a_forked_child_that_lives_on_holds_nothing(tmp_path: Path) -> None:
    trainer = train(
        LARGE
        + """
ckpt = ms.Checkpointer(sys.argv[1], keep=1)
ckpt.save(1, state(1)).result()
ckpt.save(2, state(2))
if os.fork() == 0:
    held = [os.readlink(f"/proc/self/fd/{fd}") for fd in os.listdir("/proc/self/fd") if os.path.lexists(f"/proc/self/fd/{fd}")]
    held = [name for name in held if "socket" in name or "midstride" in name or "pidfd" in name or "eventfd" in name]
    mapped = [line for line in open("/proc/self/maps") if "midstride-arena" in line]
    try:
        ckpt.save(3, state(3))
    except ms.SaveError as error:
        print("refused:", error, flush=True)
    print("held:", held, mapped, flush=True)
    os.close(1)
    time.sleep(20)
    os._exit(0)
time.sleep(1)
os.kill(os.getpid(), signal.SIGKILL)
""",
        str(tmp_path),
    )
    said = trainer.communicate(timeout=60)[0]
    assert "refused: save(): this is a forked child" in said
    assert "held: [] []" in said
    orphans_are_gone(tmp_path)
    assert [info.step for info in ms.open(tmp_path).checkpoints()] == [2]


def test_both_are_killed(tmp_path: Path) -> None:
    trainer = train(
        LARGE
        + """
ckpt = ms.Checkpointer(sys.argv[1], keep=1)
ckpt.save(1, state(1)).result()
ckpt.save(2, state(2))
os.kill(ckpt._saver._engine.pid, signal.SIGKILL)
os.kill(os.getpid(), signal.SIGKILL)
""",
        str(tmp_path),
    )
    trainer.wait(60)
    orphans_are_gone(tmp_path)
    with ms.Checkpointer(tmp_path, keep=1) as ckpt:
        restored = ckpt.restore()
        assert restored is not None
        assert (restored.state["w"] == restored.step).all()
        ckpt.save(3, {"w": np.zeros(3)}).result()
        ckpt.wait()
    assert leftovers(tmp_path) == []


# What users do to their processes.


def test_nobody_waits_for_the_writers_streams(tmp_path: Path) -> None:
    """``train | tee``: the reader of the trainer's output sees its end when the trainer ends."""
    slow = """
ckpt = ms.Checkpointer(sys.argv[1])
ckpt.save(1, {"w": np.ones(10)}).result()
ckpt.wait()
os.kill(ckpt._saver._engine.pid, signal.SIGSTOP)
ckpt.save(2, {"w": np.ones(20)})
print(ckpt._saver._engine.pid, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""
    trainer = train(slow, str(tmp_path), stderr=subprocess.STDOUT)
    pid = int(trainer.communicate(timeout=60)[0])
    assert is_there(pid), "it is stopped, and held no stream"
    os.kill(pid, signal.SIGCONT)
    orphans_are_gone(tmp_path)
    assert [info.step for info in ms.open(tmp_path).checkpoints()] == [1, 2]


@pytest.mark.parametrize("end", ["pass", "sys.exit(0)", "sys.exit(3)", "raise RuntimeError('mine')"])
def test_a_script_that_ends_without_waiting(end: str, tmp_path: Path) -> None:
    trainer = train(
        LARGE
        + f"""
ckpt = ms.Checkpointer(sys.argv[1])
ckpt.save(1, state(1))
print(ckpt._saver._engine.pid, flush=True)
{end}
""",
        str(tmp_path),
        stderr=subprocess.DEVNULL,
    )
    pid = int(trainer.communicate(timeout=60)[0])
    assert trainer.returncode == {"pass": 0, "sys.exit(0)": 0, "sys.exit(3)": 3}.get(end, 1)
    assert [info.step for info in ms.open(tmp_path).checkpoints()] == [1]
    wait_until(lambda: not is_there(pid))


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_to_the_whole_group_is_the_trainers_business(signum: int, tmp_path: Path) -> None:
    trainer = train(
        LARGE
        + """
for number in (signal.SIGTERM, signal.SIGHUP):
    signal.signal(number, lambda *_: sys.exit(9))
with ms.Checkpointer(sys.argv[1]) as ckpt:
    ckpt.save(1, state(1)).result()
    ckpt.save(2, state(2))
    print(ckpt._saver._engine.pid, flush=True)
    time.sleep(60)
""",
        str(tmp_path),
        start_new_session=True,
        stderr=subprocess.DEVNULL,
    )
    assert trainer.stdout is not None
    pid = int(trainer.stdout.readline())
    os.kill(pid, signum)  # also where it is sent to every process of a container
    os.killpg(trainer.pid, signum)
    trainer.communicate(timeout=60)
    assert trainer.returncode in (9, 1, -signal.SIGINT)
    assert [info.step for info in ms.open(tmp_path).checkpoints()] == [1, 2]
    wait_until(lambda: not is_there(pid))


def test_the_writer_loads_no_framework(tmp_path: Path) -> None:
    import torch

    with ms.Checkpointer(tmp_path, engine="process") as ckpt:
        ckpt.save(1, {"w": torch.ones(10), "rng": ms.RNG()}).result()
        mapped = Path(f"/proc/{writer_of(ckpt)}/maps").read_text()
        environment = Path(f"/proc/{writer_of(ckpt)}/cmdline").read_bytes()
    assert "libtorch" not in mapped
    assert "_xxhash" in mapped
    assert b"midstride-writer" in environment
    assert str(tmp_path).encode() in environment


def open_things(pid: int) -> int:
    return len(os.listdir(f"/proc/{pid}/fd"))


def test_many_saves_leave_everything_level(tmp_path: Path) -> None:
    def look(ckpt: ms.Checkpointer) -> tuple[int, ...]:
        pid = writer_of(ckpt)
        return pid, open_things(pid), open_things(os.getpid()), len(os.listdir(f"/proc/{pid}/task"))

    def resident(pid: int) -> int:
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * 4096

    with ms.Checkpointer(tmp_path, keep=2, engine="process") as ckpt:
        for step in range(20):
            ckpt.save(step, state(step)).result()
        ckpt.wait()
        before, memory = look(ckpt), resident(writer_of(ckpt))
        for step in range(20, 220):
            ckpt.save(step, state(step)).result()
        ckpt.wait()
        assert look(ckpt) == before
        assert resident(writer_of(ckpt)) < memory + 8 * 2**20
    assert len(ms.open(tmp_path).checkpoints()) == 2


def test_a_writer_that_dies_idle_is_replaced_by_the_next_save(tmp_path: Path) -> None:
    with ms.Checkpointer(tmp_path, engine="process") as ckpt:
        ckpt.save(1, state(1)).result()
        ckpt.wait()
        pid = writer_of(ckpt)
        os.kill(pid, signal.SIGKILL)
        wait_until(lambda: ckpt.statistics().writer_restarts == 1)
        ckpt.save(2, state(2)).result()
        assert writer_of(ckpt) != pid
    assert content(tmp_path) == {1: 1, 2: 2}


def test_with_less_memory_than_the_state_that_save_fails_by_name_and_the_next_succeeds(tmp_path: Path) -> None:
    storage = StruckStorage(ms.LocalStorage(tmp_path / "run"), 13, signal.SIGKILL, str(tmp_path / "struck"))
    large = {"w": np.arange(500_000.0)}
    with ms.Checkpointer(storage, engine="process", staging_bytes=256 * 1024) as ckpt:
        with pytest.raises(ms.WriterDied, match="signal 9"):
            ckpt.save(1, large).result()
        ckpt.save(2, large).result()
    assert [info.step for info in ms.open(tmp_path / "run").checkpoints()] == [2]


def test_a_writer_that_always_dies_fails_the_save_and_not_the_trainer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    storage = StruckStorage(ms.LocalStorage(tmp_path), 12, signal.SIGKILL, None)
    with ms.Checkpointer(storage, engine="process") as ckpt, pytest.raises(ms.WriterDied):
        ckpt.save(1, state(1)).result()


def test_a_process_that_cannot_be_had_is_a_thread(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(sys, "executable", "/no/such/python")
    with (
        pytest.raises(ms.WriterDied, match="could not be started"),
        ms.Checkpointer(tmp_path, engine="process") as ckpt,
    ):
        ckpt.save(1, state(1))
    with ms.Checkpointer(tmp_path) as ckpt:
        ckpt.save(1, state(1)).result()
        assert ckpt.statistics().engine == "thread"
    assert "runs on a thread" in caplog.text


@pytest.mark.parametrize("restores", [True, False])
def test_a_new_run_waits_for_the_writer_that_a_dead_one_left(
    restores: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    trainer = train(
        LARGE
        + """
ckpt = ms.Checkpointer(sys.argv[1], keep=1)
ckpt.save(1, state(1)).result()
ckpt.wait()
pid = ckpt._saver._engine.pid
os.kill(pid, signal.SIGSTOP)
ckpt.save(2, state(2))
print(pid, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
""",
        str(tmp_path),
    )
    pid = int(trainer.communicate(timeout=60)[0])
    threading.Timer(1.5, lambda: os.kill(pid, signal.SIGCONT)).start()
    with ms.Checkpointer(tmp_path, existing="continue") as ckpt:
        if restores:
            restored = ckpt.restore()
            assert restored is not None
            assert restored.step == 2
        ckpt.save(3, state(3)).result()
    assert "still works in" in caplog.text
    assert [info.step for info in ms.open(tmp_path).checkpoints()] == [2, 3]


def test_one_that_does_not_move_is_not_waited_for_for_ever(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = train(
        """
ckpt = ms.Checkpointer(sys.argv[1], keep=1)
ckpt.save(1, {"w": np.ones(3)}).result()
ckpt.wait()
pid = ckpt._saver._engine.pid
os.kill(pid, signal.SIGSTOP)
print(pid, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
""",
        str(tmp_path),
    )
    pid = int(trainer.communicate(timeout=60)[0])
    monkeypatch.setattr(limits, "LOCK_SECONDS", 1.0)
    try:
        with pytest.raises(ms.Busy, match="dead"), ms.Checkpointer(tmp_path, existing="continue") as ckpt:
            ckpt.save(2, state(2))
    finally:
        os.kill(pid, signal.SIGKILL)


def test_a_save_that_is_interrupted_after_its_seal_does_not_take_the_next_one_along(tmp_path: Path) -> None:
    with ms.Checkpointer(tmp_path, engine="process") as ckpt:
        ckpt.save(1, state(1)).result()
        ckpt.wait()
        hand_over = ckpt._saver._engine.hand_over

        def interrupted() -> None:
            hand_over()
            raise KeyboardInterrupt

        for step in range(2, 12, 2):
            ckpt._saver._engine.hand_over = interrupted  # type: ignore[method-assign]
            with pytest.raises(KeyboardInterrupt):
                ckpt.save(step, state(step))
            ckpt._saver._engine.hand_over = hand_over  # type: ignore[method-assign]
            ckpt.save(step + 1, state(step + 1)).result(timeout=60)
        assert ckpt.statistics().saves_failed == 0
    assert set(range(3, 12, 2)) <= set(content(tmp_path))


def test_a_trainer_that_stages_for_long_has_a_writer_that_waits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "WRITER_SECONDS", 2.0)
    with ms.Checkpointer(tmp_path, engine="process") as ckpt:
        ckpt.save(1, state(1)).result()
        send = ckpt._saver._engine.send

        def slow(request: Any) -> None:
            if hasattr(request, "chunk"):
                time.sleep(3)
            send(request)

        ckpt._saver._engine.send = slow  # type: ignore[method-assign]
        ckpt.save(2, state(2)).result()
        assert ckpt.statistics().writer_restarts == 0


# The disk, the memory and the descriptors that the writer has.


WEDGED = """
from midstride import limits
from midstride.testing import StruckStorage
limits.EXIT_SECONDS = limits.STORAGE_SECONDS = 3.0
limits.WRITER_SECONDS = 2.0
ckpt = ms.Checkpointer(StruckStorage(ms.LocalStorage(sys.argv[1]), int(sys.argv[2]), None, None), engine="process")
ckpt.save(1, {"w": np.ones(3)}).result()
ckpt.wait()
ckpt.save(2, {"w": np.zeros(3)})
print(ckpt._saver._engine.pid, flush=True)
"""


@pytest.mark.parametrize("end", ["", "os.kill(os.getpid(), signal.SIGKILL)"])
def test_a_disk_that_hangs_keeps_neither_the_trainer_nor_its_writer_for_ever(end: str, tmp_path: Path) -> None:
    first = FaultyStorage(ms.LocalStorage(tmp_path / "count"))
    with ms.Checkpointer(first, engine="thread") as ckpt:
        ckpt.save(1, {"w": np.ones(3)}).result()
        ckpt.wait()
        count = len(first.operations)
    run = tmp_path / "run"
    trainer = train(WEDGED + end, str(run), str(count + 3), stderr=subprocess.PIPE)
    said, errors = trainer.communicate(timeout=60)
    if not end:
        assert trainer.returncode == 1
        assert "no progress for 3 s" in errors
    wait_until(lambda: not is_there(int(said)), 30)
    assert "makes no progress" in (run / "writer.log").read_text()
    with ms.Checkpointer(run) as ckpt:
        restored = ckpt.restore()
        assert restored is not None
        assert restored.step == 1
        ckpt.save(2, {"w": np.zeros(3)}).result()
    assert leftovers(run) == []


def test_what_an_orphan_has_to_say_stays_small_and_a_full_disk_does_not_matter(tmp_path: Path) -> None:
    import logging

    from midstride.save import writer_process

    class Dead:
        is_dead = True

    record = logging.LogRecord("midstride", logging.WARNING, "", 0, "x" * 1000, (), None)
    handler = writer_process._Log(Dead(), str(tmp_path))  # type: ignore[arg-type]
    for _ in range(1000):
        handler.emit(record)
    assert (tmp_path / "writer.log").stat().st_size < 300_000
    writer_process._Log(Dead(), "/dev/full/no").emit(record)  # type: ignore[arg-type]
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "writer.log").symlink_to("/dev/full")
    writer_process._Log(Dead(), str(tmp_path / "full")).emit(record)  # type: ignore[arg-type]


def limited(pid: int, which: int, limit: int) -> tuple[int, int]:
    before = resource.prlimit(pid, which)
    resource.prlimit(pid, which, (limit, before[1]))
    return before


def test_a_writer_without_descriptors_fails_the_save_by_name(tmp_path: Path) -> None:
    with ms.Checkpointer(tmp_path, engine="process") as ckpt:
        ckpt.save(1, state(1)).result()
        ckpt.wait()
        pid = writer_of(ckpt)
        before = limited(pid, resource.RLIMIT_NOFILE, open_things(pid))
        with pytest.raises(ms.WriteError, match="Too many open files"):
            ckpt.save(2, state(2)).result()
        resource.prlimit(pid, resource.RLIMIT_NOFILE, before)
        ckpt.save(3, state(3)).result()
        assert writer_of(ckpt) == pid
    assert [info.step for info in ms.open(tmp_path).checkpoints()] == [1, 3]


def test_a_writer_without_memory_is_replaced(tmp_path: Path) -> None:
    with ms.Checkpointer(tmp_path, engine="process") as ckpt:
        ckpt.save(1, state(1)).result()
        ckpt.wait()
        pid = writer_of(ckpt)
        limited(pid, resource.RLIMIT_AS, int(Path(f"/proc/{pid}/statm").read_text().split()[0]) * 4096)
        ckpt.save(2, {"w": np.ones(20_000_000)}).result()
        assert ckpt.statistics().writer_restarts == 1
    assert [info.step for info in ms.open(tmp_path).checkpoints()] == [1, 2]
