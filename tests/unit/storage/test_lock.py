"""The lock: who has it is said, a kill releases it, a fork does not keep it, a replaced file is noticed."""

from __future__ import annotations

import errno
import json
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

import midstride as ms
from midstride.storage import lock as locks
from midstride.storage.lock import HeartbeatLock, describe_owner, take_lock

HOLD = """
import sys, time
from midstride.storage.lock import describe_owner, take_lock
lock = take_lock(sys.argv[1], describe_owner())
print("held", flush=True)
sys.stdin.read()
"""


@pytest.fixture
def path(tmp_path: Path) -> str:
    return str(tmp_path / ".lock")


def hold_elsewhere(path: str) -> subprocess.Popen[bytes]:
    process = subprocess.Popen([sys.executable, "-c", HOLD, path], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert process.stdout is not None
    assert process.stdout.readline() == b"held\n"
    return process


def test_held_by_another_process_until_it_is_killed(path: str) -> None:
    process = hold_elsewhere(path)
    with pytest.raises(ms.Busy, match=f"pid {process.pid} on this host .*alive"):
        take_lock(path, describe_owner())
    process.send_signal(signal.SIGKILL)
    process.wait()
    take_lock(path, describe_owner()).release()


def test_held_by_this_process(path: str) -> None:
    held = take_lock(path, describe_owner())
    with pytest.raises(ms.Busy, match="this very process"):
        take_lock(path, describe_owner())
    held.release()
    assert os.path.exists(path)  # never unlinked: another may be waiting on this inode


@pytest.mark.parametrize("content", ["", "nonsense", "{}", '{"pid": "x"}'])
def test_an_owner_that_does_not_say_who_it_is(path: str, content: str) -> None:
    held = take_lock(path, content)
    with pytest.raises(ms.Busy, match="does not say which"):
        take_lock(path, describe_owner())
    held.release()


def test_an_owner_on_another_host_and_a_dead_one(path: str) -> None:
    here = json.loads(describe_owner())
    for owner, told in (
        ({**here, "boot": "other", "host": "node7", "pid": 12}, "pid 12 on host node7"),
        ({**here, "pid": 2**22 + 1}, "dead: something it started holds the lock"),
    ):
        held = take_lock(path, json.dumps(owner))
        with pytest.raises(ms.Busy, match=told):
            take_lock(path, describe_owner())
        held.release()


def test_a_forked_child_does_not_keep_it(path: str) -> None:
    held = take_lock(path, describe_owner())
    wait_here, go = os.pipe()
    told, tell = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(go)
        os.write(tell, b"x")
        os.read(wait_here, 1)  # until the parent is done
        os._exit(0)
    os.read(told, 1)  # the child has started, and so has let go
    held.release()
    take_lock(path, describe_owner()).release()  # although the child lives
    os.close(go)
    os.waitpid(child, 0)


def test_a_replaced_file_is_noticed(path: str) -> None:
    held = take_lock(path, describe_owner())
    held.check()
    os.rename(path, path + ".old")
    with pytest.raises(ms.Busy, match="replaced or removed"):
        held.check()
    other = take_lock(path, describe_owner())
    with pytest.raises(ms.Busy, match="replaced or removed"):
        held.check()
    other.check()


def test_a_file_replaced_between_opening_and_locking(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    real, calls = locks.fcntl.flock, []

    def replace_first(descriptor: int, how: int) -> None:
        calls.append(descriptor)
        if len(calls) == 1:
            os.unlink(path)
        real(descriptor, how)

    monkeypatch.setattr(locks.fcntl, "flock", replace_first)
    take_lock(path, describe_owner()).check()
    assert len(calls) == 2


class Time:
    """A clock that moves only when somebody waits."""

    def __init__(self) -> None:
        self.now = 0.0
        self.on_wait = lambda: None

    def clock(self) -> float:
        return self.now

    def wait(self, seconds: float) -> None:
        self.now += seconds
        self.on_wait()


def test_heartbeat_taken_over_only_after_silence(path: str) -> None:
    time = Time()
    first = HeartbeatLock(path, "{}", time.clock, time.wait)
    first.check()
    first._stop.set()  # it beats no more, as after a kill
    start = time.now
    second = HeartbeatLock(path, "{}", time.clock, time.wait)
    assert time.now - start >= locks.LOCK_SECONDS
    second.check()
    with pytest.raises(ms.Busy, match="taken over"):
        first.check()
    second.release()


def test_heartbeat_that_beats_is_busy(path: str) -> None:
    time = Time()
    first = HeartbeatLock(path, describe_owner(), time.clock, time.wait)
    time.on_wait = first._write
    with pytest.raises(ms.Busy, match="held by another run"):
        HeartbeatLock(path, "{}", time.clock, time.wait)
    first.check()
    time.on_wait = lambda: None
    first.release()
    HeartbeatLock(path, "{}", time.clock, time.wait).release()  # released: no need to wait for silence


def test_without_flock_a_heartbeat_is_used_and_said(
    path: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def no_locks(*_: object) -> None:
        raise OSError(locks.errno.ENOLCK, "no locks")

    monkeypatch.setattr(locks.fcntl, "flock", no_locks)
    monkeypatch.setattr(locks, "HEARTBEAT_SECONDS", 0.01)
    held = take_lock(path, describe_owner())
    assert isinstance(held, HeartbeatLock)
    assert "a heartbeat is used instead" in caplog.text
    held.release()
    caplog.clear()
    take_lock(path, describe_owner()).release()
    assert caplog.text == ""  # said once


def no_wait(seconds: float) -> None:
    pass


def test_a_forked_child_does_not_end_its_parents_heartbeat(path: str) -> None:
    held = HeartbeatLock(path, "{}", pause=no_wait)
    child = os.fork()
    if child == 0:
        held.release()
        try:
            held.check()
        except ms.Busy:
            os._exit(7)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
    held.check()
    held.release()


def test_a_heartbeat_leaves_one_file_and_never_writes_over_a_new_owner(
    path: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(locks, "HEARTBEAT_SECONDS", 0.01)
    first = HeartbeatLock(path, "{}", pause=no_wait)
    token = Path(path).read_text().splitlines()[1].split()[0]
    new = "{}\nffffffffffffffff 000000000001\n"
    Path(path).write_text(f"{new}{token} 000000000001\n")  # what is after the second line says nothing
    first._thread.join(30)
    assert not first._thread.is_alive()
    assert Path(path).read_text().startswith(new)
    assert "taken over" in caplog.text
    first.release()
    assert Path(path).read_text().startswith(new)
    assert os.listdir(os.path.dirname(path)) == [".lock"]


def test_a_heartbeat_survives_an_error(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(locks, "HEARTBEAT_SECONDS", 0.01)
    held = HeartbeatLock(path, "{}", pause=no_wait)
    failed, beaten = threading.Event(), threading.Event()
    real = held._write

    def write() -> None:
        if not failed.is_set():
            failed.set()
            raise OSError(errno.EIO, "I/O error")
        real()
        beaten.set()

    monkeypatch.setattr(held, "_write", write)
    assert beaten.wait(30)
    held.check()
    held.release()


def test_a_heartbeat_released_while_it_is_waited_for_is_taken(path: str) -> None:
    time = Time()
    first = HeartbeatLock(path, "{}", time.clock, time.wait)
    time.on_wait = first.release
    HeartbeatLock(path, "{}", time.clock, time.wait).release()
    assert time.now < locks.LOCK_SECONDS


def test_a_lock_that_could_not_be_written_is_not_kept(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> int:
        raise OSError(errno.EIO, "I/O error")

    with monkeypatch.context() as broken:
        broken.setattr(os, "pwrite", fail)
        with pytest.raises(OSError, match="I/O error"):
            take_lock(path, "{}")
    take_lock(path, "{}").release()


def test_looking_at_the_lock_may_fail(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    held = take_lock(path, "{}")

    def fail(*_: object, **__: object) -> None:
        raise OSError(errno.ESTALE, "Stale file handle")

    with monkeypatch.context() as broken:
        broken.setattr(os, "stat", fail)
        with pytest.raises(ms.Unavailable, match=r"look at the lock .*\.lock: Stale"):
            held.check()
    held.check()
    held.release()
    with pytest.raises(ms.Busy, match="not held any more"):
        held.check()


def test_the_same_pid_in_another_container_is_not_this_process(path: str) -> None:
    here = json.loads(describe_owner())
    held = take_lock(path, json.dumps({**here, "host": "another-container"}))
    with pytest.raises(ms.Busy, match=f"pid {os.getpid()} on host another-container, since 20"):
        take_lock(path, describe_owner())
    held.release()


def test_an_owner_that_nobody_has_waited_for_is_dead(path: str) -> None:
    child = os.fork()
    if child == 0:
        os._exit(0)
    os.waitid(os.P_PID, child, os.WEXITED | os.WNOWAIT)  # it has ended, and is a zombie
    started = Path(f"/proc/{child}/stat").read_text().rpartition(")")[2].split()[19]
    held = take_lock(path, json.dumps({**json.loads(describe_owner()), "pid": child, "started": started}))
    with pytest.raises(ms.Busy, match=f"pid {child} .*dead"):
        take_lock(path, describe_owner())
    held.release()
    os.waitpid(child, 0)
