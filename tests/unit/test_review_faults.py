"""Faults that reviews of the library found, one test each."""

from __future__ import annotations

import collections
import dataclasses
import enum
import errno
import functools
import logging
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import midstride as ms
import midstride.testing as ms_testing
from midstride import cli, retention
from midstride.testing import FaultyStorage, Operation, fail_at, fail_from
from midstride.testing.faulty import Fault


class Colour(enum.Flag):
    RED = 1
    BLUE = 2


def through(path: Path, state: Any, template: Any = None, **options: Any) -> Any:
    with ms.Checkpointer(path / "run") as ckpt:
        ckpt.save(1, state)
    restored = ms.Checkpointer(path / "run").restore(template, **options)
    assert restored is not None
    return restored


@pytest.mark.parametrize("flags", [Colour(0), Colour.RED, Colour.RED | Colour.BLUE, re.I | re.M])
def test_flags_come_back_whole_or_none_set(flags: enum.Flag, tmp_path: Path) -> None:
    assert through(tmp_path, {"f": flags}, {"f": flags}).state == {"f": flags}
    assert ms.open(tmp_path / "run").load() == {"f": flags.value}


def test_arrays_tied_in_the_template_are_tied_again(tmp_path: Path) -> None:
    one = torch.arange(4.0)
    state = through(tmp_path, {"a": one, "b": one, "c": one.clone()}, {"a": one, "b": one, "c": one.clone()}).state
    assert state["a"].data_ptr() == state["b"].data_ptr() != state["c"].data_ptr()
    assert state["a"].data_ptr() != one.data_ptr()


def test_a_tensor_whose_memory_was_freed_is_refused(tmp_path: Path) -> None:
    freed = torch.ones(1000)
    freed.untyped_storage().resize_(0)
    with pytest.raises(ms.UnsupportedState, match="/x/t: the tensor's memory was freed"):
        ms.Checkpointer(tmp_path / "run").save(1, {"x": {"t": freed}})


class TwoParameters(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = torch.nn.Parameter(torch.zeros(3)), torch.nn.Parameter(torch.zeros(3))


def stepped(parameters: list[torch.nn.Parameter]) -> torch.optim.Optimizer:
    optimizer = torch.optim.SGD(parameters, lr=0.1, momentum=0.9)
    for number, parameter in enumerate(parameters):
        optimizer.state[parameter]["momentum_buffer"] = torch.full((3,), float(number + 1))
    return optimizer


def moment(optimizer: torch.optim.Optimizer, parameter: torch.nn.Parameter) -> float:
    return float(optimizer.state[parameter]["momentum_buffer"][0])


def test_an_optimizer_alone_is_matched_by_the_models_names(tmp_path: Path) -> None:
    model, live = TwoParameters(), TwoParameters()
    optimizer, turned = stepped([model.a, model.b]), stepped([live.b, live.a])
    restored = through(tmp_path, {"m": model, "o": optimizer}, {"m": live, "o": turned}, only="o")
    assert (moment(turned, live.a), moment(turned, live.b)) == (1, 2)
    assert restored.warnings == ()


def test_a_parameter_without_a_name_does_not_take_the_others_names(tmp_path: Path) -> None:
    model, live = TwoParameters(), TwoParameters()
    extra, live_extra = torch.nn.Parameter(torch.zeros(3)), torch.nn.Parameter(torch.zeros(3))
    optimizer, turned = stepped([model.a, extra, model.b]), stepped([live_extra, live.b, live.a])
    restored = through(tmp_path, {"m": model, "o": optimizer}, {"m": live, "o": turned})
    assert [moment(turned, p) for p in (live.a, live_extra, live.b)] == [1, 2, 3]
    assert "by their position" in restored.warnings[0]


def test_other_names_are_told_beside_a_group_without_names(tmp_path: Path) -> None:
    class Other(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.x, self.b = torch.nn.Parameter(torch.zeros(3)), torch.nn.Parameter(torch.zeros(3))

    def two_groups(first: list[Any], second: list[Any]) -> torch.optim.Optimizer:
        return torch.optim.SGD([{"params": first}, {"params": second}], lr=0.1)

    model, other = TwoParameters(), Other()
    saved = two_groups([model.a, model.b], [torch.nn.Parameter(torch.zeros(3))])
    live = two_groups([other.x, other.b], [torch.nn.Parameter(torch.zeros(3))])
    with pytest.raises(ms.StateMismatch, match="the parameter 'a', the live one has not"):
        through(tmp_path, {"m": model, "o": saved}, {"m": other, "o": live}, rename={})


def test_a_renamed_parameter_keeps_its_moments(tmp_path: Path) -> None:
    class Renamed(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.b, self.new = torch.nn.Parameter(torch.zeros(3)), torch.nn.Parameter(torch.zeros(3))

    model, live = TwoParameters(), Renamed()
    optimizer, turned = stepped([model.a, model.b]), stepped([live.b, live.new])
    through(tmp_path, {"m": model, "o": optimizer}, {"m": live, "o": turned}, rename={"/m/a": "/m/new"})
    assert (moment(turned, live.new), moment(turned, live.b)) == (1, 2)


def test_extra_state_may_have_another_size_each_time(tmp_path: Path) -> None:
    class Extra(torch.nn.Module):
        def __init__(self, content: Any) -> None:
            super().__init__()
            self.content = content

        def get_extra_state(self) -> Any:
            return self.content

        def set_extra_state(self, state: Any) -> None:
            self.content = state

    live = torch.nn.ModuleList([Extra(torch.zeros(3, dtype=torch.uint8)), Extra({"a": 1})])
    saved = torch.nn.ModuleList([Extra(torch.arange(7, dtype=torch.uint8)), Extra({"b": [1, 2], "c": torch.ones(2)})])
    through(tmp_path, {"m": saved}, {"m": live})
    assert torch.equal(live[0].content, torch.arange(7, dtype=torch.uint8))
    assert live[1].content["b"] == [1, 2]
    assert torch.equal(live[1].content["c"], torch.ones(2))


def test_a_signal_during_a_save_is_answered_by_the_next_step(tmp_path: Path) -> None:
    class Signals:
        """Sends the signal while the state is captured."""

        armed = False

        def state_dict(self) -> dict[str, int]:
            if self.armed:
                Signals.armed = False
                os.kill(os.getpid(), signal.SIGTERM)
            return {}

        def load_state_dict(self, state: object) -> None: ...

    with ms.Checkpointer(tmp_path / "run", every=ms.EverySteps(10) | ms.OnSignal()) as ckpt:
        state = {"s": Signals(), "w": np.zeros(3)}
        ckpt.step(9, state)
        Signals.armed = True
        ckpt.step(10, state)
        assert not ckpt.should_stop
        pending = ckpt.step(11, state)
        assert pending is not None
        assert pending.done()
        assert ckpt.should_stop
    latest = ms.open(tmp_path / "run").latest()
    assert latest is not None
    assert latest.step == 11


def damage(run: Path, step: int, name: str) -> None:
    path = next(run.glob(f"step-*{step}-*")) / name
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


def test_one_damaged_step_by_its_number_is_not_the_end_of_all(tmp_path: Path) -> None:
    with ms.Checkpointer(tmp_path / "run") as ckpt:
        for step in (10, 20, 30):
            ckpt.save(step, {"m": {"w": np.full(10, step)}}).result()
    damage(tmp_path / "run", 30, "m.safetensors")
    for look in (
        lambda: ms.Checkpointer(tmp_path / "run").restore(step=30),
        lambda: ms.open(tmp_path / "run").load(30),
    ):
        with pytest.raises(ms.CorruptCheckpoint, match="step 30"):
            look()
    assert ms.open(tmp_path / "run").load(20)["m"]["w"][0] == 20


def test_a_mismatch_after_overwriting_says_that_objects_are_overwritten(tmp_path: Path) -> None:
    with ms.Checkpointer(tmp_path / "run") as ckpt:
        ckpt.save(1, {"m": torch.nn.Linear(3, 3)}).result()
        ckpt.save(2, {"m": torch.nn.Linear(3, 3), "more": 1}).result()
    damage(tmp_path / "run", 2, "m.safetensors")
    with pytest.raises(ms.StateMismatch, match="partly overwritten") as caught:
        ms.Checkpointer(tmp_path / "run").restore({"m": torch.nn.Linear(3, 3), "more": 0})
    assert "nothing was changed" not in str(caught.value)


def test_verify_does_not_call_damaged_what_it_could_not_look_at(tmp_path: Path) -> None:
    class Unreadable(Fault):
        def before(self, operation: Operation) -> None:
            if operation.name == "read" and operation.target.endswith(".safetensors"):
                fail_at(operation.number, errno.EIO).before(operation)

    storage = FaultyStorage(ms.LocalStorage(tmp_path / "run"))
    with ms.Checkpointer(storage) as ckpt:
        ckpt.save(1, {"m": {"w": np.zeros(3)}}).result()
    storage.fault = Unreadable()
    with pytest.raises(ms.Unavailable):
        ms.open(storage).verify()


def test_names_with_brackets_do_not_break_the_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with ms.Checkpointer(tmp_path / "run") as ckpt:
        ckpt.save(1, {"[/red]": {"[bold]w": np.zeros(3)}}, metrics={"[/loss]": 1.0}).result()
    for command in ("ls", "show"):
        monkeypatch.setattr(sys, "argv", ["midstride", command, str(tmp_path / "run")])
        monkeypatch.setenv("COLUMNS", "200")
        with pytest.raises(SystemExit) as ended:
            cli.main()
        assert not ended.value.code
        assert "[/" in capsys.readouterr().out


class LogThatFails(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        raise RuntimeError("the log is gone")


def test_a_log_that_fails_does_not_hold_up_the_saves(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    logger, handler = logging.getLogger("midstride"), LogThatFails()
    level = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        with ms.Checkpointer(tmp_path / "run") as ckpt:
            for step in (1, 2):
                assert ckpt.save(step, {"v": step}).result(30).step == step
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)
    assert "the log is gone" in capsys.readouterr().err


def test_listeners_and_rules_that_exit_do_not_end_the_writer(tmp_path: Path) -> None:
    heard = []

    class Exits(ms.Listener):
        def after_save(self, event: Any) -> None:
            heard.append(event.info.step)
            sys.exit(3)

    class BadRule(retention.Retention):
        def kept(self, infos: Any) -> set[int]:
            raise KeyError("a rule's own fault")

    with ms.Checkpointer(tmp_path / "run", listeners=[Exits()], keep=BadRule()) as ckpt:
        for step in (1, 2):
            ckpt.save(step, {"v": step}).result(30)
        assert ckpt.statistics().listener_failures == 2
    assert heard == [info.step for info in ms.open(tmp_path / "run").checkpoints()] == [1, 2]


def test_a_listener_cannot_wait_for_itself(tmp_path: Path) -> None:
    refused: list[str] = []

    class Waits(ms.Listener):
        def after_save(self, event: Any) -> None:
            for call in (pending.result, ckpt.restore, ckpt.close, ckpt.wait, lambda: ckpt.save(9, {})):
                try:
                    call()
                except ms.SaveError as error:
                    refused.append(str(error))

    gate = ms_testing.Gate(lambda operation: operation.name == "write")
    storage = FaultyStorage(ms.LocalStorage(tmp_path / "run"), gate)
    with ms.Checkpointer(storage, listeners=[Waits()]) as ckpt:
        pending = ckpt.save(1, {"w": np.zeros(3)})
        gate.open()
        pending.result(30)
    assert len(refused) == 5


@pytest.mark.parametrize("name", ["midstride-disk", "midstride-prefault", "midstride-writer"])
def test_a_thread_that_cannot_start_fails_one_save_at_most(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, failed = threading.Thread.start, []

    def start(thread: threading.Thread) -> None:
        if thread.name == name and not failed:
            failed.append(name)
            raise RuntimeError("can't start new thread")
        real(thread)

    monkeypatch.setattr(threading.Thread, "start", start)
    with ms.Checkpointer(tmp_path / "run") as ckpt:
        try:
            ckpt.save(1, {"m": {"w": np.zeros(1000)}}).result(30)
        except (RuntimeError, ms.SaveError):
            assert name != "midstride-prefault"
        assert ckpt.save(2, {"m": {"w": np.zeros(1000)}}).result(30).step == 2
    assert failed


def test_what_readers_would_refuse_is_not_published(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with ms.Checkpointer(tmp_path / "run", keep=1) as ckpt:
        ckpt.save(1, {"v": 1}).result()
        monkeypatch.setattr("midstride.save.commit.MANIFEST_LIMIT_BYTES", 2000)
        with pytest.raises(ms.CommitError, match="put large values into arrays"):
            ckpt.save(2, {"v": b"x" * 5000}).result()
        for state in ({"t": {"x": torch.zeros((1,) * 65)}}, {"s": {frozenset([1]), Frozen(np.float32(1))}}):
            with pytest.raises(ms.UnsupportedState):
                ckpt.save(3, state)
    assert ms.open(tmp_path / "run").load() == {"v": 1}


@dataclasses.dataclass(frozen=True)
class Frozen:
    x: Any


def test_inference_mode_around_the_first_save(tmp_path: Path) -> None:
    with ms.Checkpointer(tmp_path / "run") as ckpt:
        with torch.inference_mode():
            ckpt.save(1, {"m": {"w": torch.ones(3)}}).result()
        ckpt.save(2, {"m": {"w": torch.full((3,), 2.0)}}).result()
    with torch.inference_mode():
        restored = ms.Checkpointer(tmp_path / "run").restore({"m": {"w": torch.zeros(3)}})
    assert restored is not None
    restored.state["m"]["w"].add_(1)


def test_a_name_given_by_the_user_may_equal_one_of_a_module(tmp_path: Path) -> None:
    def setup() -> tuple[torch.nn.Module, torch.nn.Parameter, torch.optim.Optimizer]:
        model, own = torch.nn.Linear(3, 3, bias=False), torch.nn.Parameter(torch.zeros(2))
        return model, own, torch.optim.SGD([("weight", own), ("own", model.weight)], lr=0.1, momentum=0.9)

    model, own, optimizer = setup()
    optimizer.state[own]["momentum_buffer"] = torch.full((2,), 7.0)
    live_model, live_own, live = setup()
    through(tmp_path, {"m": model, "o": optimizer}, {"m": live_model, "o": live})
    assert torch.equal(live.state[live_own]["momentum_buffer"], torch.full((2,), 7.0))


@pytest.mark.parametrize("trouble", ["stdout closed", "stderr closed", "ctrl-c"])
def test_a_lost_last_save_is_never_exit_code_0(trouble: str, tmp_path: Path) -> None:
    script = """
import errno, os, signal, sys, threading
import numpy as np, midstride as ms
from midstride.testing import FaultyStorage, Gate, fail_from
trouble, path = sys.argv[1:]
storage = FaultyStorage(ms.LocalStorage(path))
ckpt = ms.Checkpointer(storage)
ckpt.save(1, {"w": np.zeros(3)}).result()
if trouble == "ctrl-c":
    storage.fault = Gate(lambda o: o.name == "write")
    ckpt.save(2, {"w": np.zeros(3)})
    class Interrupt(threading.Thread):
        def run(self):
            threading.main_thread().join()
            threading.Event().wait(0.3)
            os.kill(os.getpid(), signal.SIGINT)
    Interrupt(daemon=True).start()
else:
    storage.fault = fail_from(1, errno.EIO)
    ckpt.save(2, {"w": np.zeros(3)})
    (sys.stdout if trouble == "stdout closed" else sys.stderr).close()
"""
    done = subprocess.run(
        [sys.executable, "-c", script, trouble, str(tmp_path / "run")], capture_output=True, timeout=60
    )
    assert done.returncode == 1, done.stderr.decode()


def test_two_signals_at_once_do_not_hang(tmp_path: Path) -> None:
    """The handler takes no lock that an interrupted handler could hold."""
    trigger = ms.OnSignal(signal.SIGUSR1)
    watch = trigger.start(0)
    handler = signal.getsignal(signal.SIGUSR1)
    assert callable(handler)
    assert "Event" not in repr(vars(trigger)), "an Event's lock would be taken inside a handler"
    for _ in range(1000):
        os.kill(os.getpid(), signal.SIGUSR1)
    assert trigger.received
    watch.close()


def test_ctrl_c_as_the_signal_saves_and_stops(tmp_path: Path) -> None:
    with ms.Checkpointer(tmp_path / "run", every=ms.OnSignal(signal.SIGINT)) as ckpt:
        os.kill(os.getpid(), signal.SIGINT)
        pending = ckpt.step(5, {"v": 5})
        assert pending is not None
        assert ckpt.should_stop
    assert ms.open(tmp_path / "run").load() == {"v": 5}


def test_items_named_like_shards(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("midstride.limits.SPLIT_BYTES", 50)
    big = {f"w{n}": np.full(10, n, np.float32) for n in range(2)}
    state = {"big": big, "big-00001-of-00002": {"x": np.ones(3)}}
    with ms.Checkpointer(tmp_path / "run") as ckpt:
        ckpt.save(1, state).result()
    assert (ms.open(tmp_path / "run").load()["big"]["w1"] == 1).all()


def test_numpy_global_generator_of_another_kind(tmp_path: Path) -> None:
    before = np.random.get_bit_generator()
    try:
        np.random.set_bit_generator(np.random.PCG64(3))
        with ms.Checkpointer(tmp_path / "run") as ckpt:
            ckpt.save(1, {"rng": ms.RNG()})
        expected = np.random.random(3)
        ms.Checkpointer(tmp_path / "run").restore({"rng": ms.RNG()})
        assert (np.random.random(3) == expected).all()
    finally:
        np.random.set_bit_generator(before)


def test_a_child_forked_during_a_save_is_refused_and_does_not_hang(tmp_path: Path) -> None:
    """The lock of the calls is held by another thread at the moment of the fork."""
    reached, go = threading.Event(), threading.Event()

    class Waits:
        def state_dict(self) -> dict[str, int]:
            reached.set()
            assert go.wait(30)
            return {}

        def load_state_dict(self, state: object) -> None: ...

    with ms.Checkpointer(tmp_path / "run") as ckpt:
        ckpt.save(1, {"v": 1}).result()
        thread = threading.Thread(target=lambda: ckpt.save(2, {"w": Waits()}))
        thread.start()
        assert reached.wait(30)
        child = os.fork()
        if child == 0:
            try:
                ckpt.save(3, {})
            except ms.SaveError:
                os._exit(7)
            os._exit(1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
        go.set()
        thread.join()
    assert [info.step for info in ms.open(tmp_path / "run").checkpoints()] == [1, 2]


def test_a_generator_that_is_closed_tells_of_a_lost_save(tmp_path: Path) -> None:
    storage = FaultyStorage(ms.LocalStorage(tmp_path))

    def training() -> Iterator[int]:
        with ms.Checkpointer(storage) as ckpt:
            ckpt.save(1, {"w": np.ones(10)}).result()
            storage.fault = fail_from(1, errno.ENOSPC)
            ckpt.save(2, {"w": np.zeros(10)})
            yield 2

    running = training()
    next(running)
    with pytest.raises(ms.WriteError, match="step 2"):
        running.close()


@dataclasses.dataclass
class Square:
    side: int

    @functools.cached_property
    def area(self) -> int:
        return self.side**2


@dataclasses.dataclass
class Empty:
    pass


def test_what_a_dataclass_computed_from_its_fields_is_computed_anew(tmp_path: Path) -> None:
    with ms.Checkpointer(tmp_path) as ckpt:
        ckpt.save(1, {"x": Square(5)})
    template = Square(1)
    assert template.area == 1  # and it is kept
    with ms.Checkpointer(tmp_path) as ckpt:
        restored = ckpt.restore({"x": template})
        assert restored is not None
        assert restored.state["x"].area == 25
        with pytest.raises(ms.StateMismatch, match="fields"):
            ckpt.restore({"x": Empty()})


def test_two_classes_of_one_name_in_the_state_are_not_chosen_between(tmp_path: Path) -> None:
    one, other = (collections.namedtuple("Point", "x y") for _ in range(2))
    with ms.Checkpointer(tmp_path) as ckpt:
        ckpt.save(1, {"seen": {one(1, 2)}})
    with ms.Checkpointer(tmp_path) as ckpt:
        with pytest.raises(ms.StateMismatch, match="Point"):
            ckpt.restore({"seen": {one(0, 0), other(9, 9)}})
        restored = ckpt.restore({"seen": {one(0, 0)}})
        assert restored is not None
        (point,) = restored.state["seen"]
        assert type(point) is one
