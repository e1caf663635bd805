"""When a save is due."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import midstride
from midstride.triggers import AnyOf, EverySeconds, EverySteps, OnSignal, Trigger, Watch, as_trigger

SIGNAL = signal.SIGUSR1


class Clock:
    """A clock that is set by hand."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def calls() -> Iterator[list[int]]:
    """A handler for ``SIGNAL`` that was there before, and what it was called with."""
    seen: list[int] = []

    def handler(signum: int, frame: FrameType | None) -> None:
        seen.append(signum)

    before = signal.signal(SIGNAL, handler)
    yield seen
    signal.signal(SIGNAL, before)


# What ``every=`` may be.


@pytest.mark.parametrize(
    ("every", "meant"),
    [
        (500, EverySteps(500)),
        ("10min", EverySeconds(600)),
        ("90s", EverySeconds(90)),
        ("1.5h", EverySeconds(5400)),
        ("500ms", EverySeconds(0.5)),
        ("1d", EverySeconds(86400)),
        (" 10 min ", EverySeconds(600)),
        (EverySteps(3), EverySteps(3)),
        (None, None),
    ],
)
def test_every_means(every: Any, meant: Trigger | None) -> None:
    assert as_trigger(every) == meant


@pytest.mark.parametrize(
    ("every", "error"),
    [
        (0, ValueError),
        (-1, ValueError),
        (True, TypeError),
        (False, TypeError),
        (2.5, TypeError),
        ("0s", ValueError),
        ("-1s", ValueError),
        ("10", ValueError),
        ("10 minutes", ValueError),
        ("1e3s", ValueError),
        ("", ValueError),
        ("nan s", ValueError),
        ([5], TypeError),
    ],
)
def test_what_makes_no_sense_is_refused(every: Any, error: type[Exception]) -> None:
    with pytest.raises(error) as caught:
        as_trigger(every)
    assert type(caught.value) is error


def test_a_refusal_says_what_to_write() -> None:
    with pytest.raises(ValueError, match="'10min'"):
        as_trigger("ten minutes")
    with pytest.raises(TypeError, match=r"number of steps, a time such as '10min', or triggers joined by \|"):
        as_trigger(object())  # type: ignore[arg-type]


@pytest.mark.parametrize("n", [0, -1, True, 1.0, "3"])
def test_every_steps_takes_a_positive_int(n: Any) -> None:
    with pytest.raises((TypeError, ValueError)):
        EverySteps(n)


@pytest.mark.parametrize("seconds", [0, -1, True, float("nan"), float("inf"), "3"])
def test_every_seconds_takes_a_positive_number(seconds: Any) -> None:
    with pytest.raises((TypeError, ValueError)):
        EverySeconds(seconds)


def test_triggers_are_values() -> None:
    assert EverySteps(5) == EverySteps(5) and hash(EverySteps(5)) == hash(EverySteps(5))
    assert OnSignal() == OnSignal(signal.SIGTERM)
    with pytest.raises(AttributeError):
        EverySteps(5).n = 6  # type: ignore[misc]


def test_or_makes_one_flat_list() -> None:
    parts = EverySteps(5), EverySeconds(1), OnSignal()
    assert (parts[0] | parts[1]) | parts[2] == AnyOf(parts) == parts[0] | (parts[1] | parts[2])
    with pytest.raises(TypeError):
        _ = EverySteps(5) | 3  # type: ignore[operator]


# Steps.


def saved(watch: Watch, steps: list[int]) -> list[int]:
    """The steps at which a loop that saves whenever it is due saves."""
    taken = []
    for step in steps:
        if watch.observe(step):
            taken.append(step)
            watch.taken(step)
    return taken


def test_every_steps_counts_multiples_not_calls() -> None:
    assert saved(EverySteps(3).start(0), [1, 2, 3, 4, 5, 6, 7]) == [3, 6]
    assert saved(EverySteps(3).start(0), [2, 5, 8, 9]) == [5, 8, 9]  # 3, 6 and 9 were reached or passed
    assert saved(EverySteps(100).start(0), [64, 128, 192, 256, 320]) == [128, 256, 320]
    assert saved(EverySteps(1).start(0), [1, 1, 2]) == [1, 2]


def test_step_zero_and_the_first_step_of_a_resumed_run_are_not_due() -> None:
    assert saved(EverySteps(3).start(0), [0]) == []
    watch = EverySteps(3).start(0)
    watch.rewind(6)
    assert saved(watch, [6, 7, 8, 9]) == [9]


def test_a_save_that_was_put_off_stays_due() -> None:
    watch = EverySteps(3).start(0)
    assert [watch.observe(step) for step in (2, 3, 4, 5)] == [False, True, True, True]
    watch.taken(5)
    assert [watch.observe(step) for step in (5, 6)] == [False, True]


def test_a_save_taken_early_does_not_move_the_grid() -> None:
    watch = EverySteps(10).start(0)
    watch.observe(7)
    watch.taken(7)
    assert saved(watch, [8, 9, 10, 11]) == [10]


def test_a_step_that_goes_back_only_resets_what_was_seen() -> None:
    watch = EverySteps(10).start(0)
    assert saved(watch, [25, 3, 4, 9, 10]) == [25, 10]


@given(st.integers(1, 50), st.lists(st.integers(1, 40), max_size=60))
def test_every_multiple_that_is_passed_is_answered_by_a_save(n: int, strides: list[int]) -> None:
    watch, step = EverySteps(n).start(0), 0
    for stride in strides:
        passed = (step + stride) // n > step // n
        step += stride
        assert watch.observe(step) is passed
        if passed:
            watch.taken(step)


# Time.


def test_every_seconds_counts_from_the_start_and_from_the_last_save() -> None:
    clock = Clock()
    watch = EverySeconds(10).start(0, clock)
    clock.now += 9.9
    assert not watch.observe(1)
    clock.now += 0.1
    assert watch.observe(2) and watch.observe(3)
    clock.now += 5
    watch.taken(4)
    clock.now += 9.9
    assert not watch.observe(5)
    clock.now += 0.1
    assert watch.observe(6)


def test_a_restore_starts_the_time_anew() -> None:
    clock = Clock()
    watch = EverySeconds(10).start(0, clock)
    clock.now += 60
    watch.rewind(500)
    assert not watch.observe(501)


def test_the_default_clock_is_monotonic(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("time.time", lambda: pytest.fail("the wall clock was read"))
    assert not EverySeconds(3600).start(0).observe(1)


# Together.


def test_any_of_is_due_when_one_is_and_a_save_answers_all() -> None:
    clock = Clock()
    watch = (EverySteps(100) | EverySeconds(10)).start(0, clock)
    assert not watch.observe(50)
    clock.now += 10
    assert watch.observe(99)
    clock.now += 1
    assert watch.observe(100)  # both now
    watch.taken(100)
    assert not watch.observe(101)


def test_every_watch_sees_every_step_even_when_an_earlier_one_is_due() -> None:
    watch = (EverySteps(2) | EverySteps(3)).start(0)
    assert watch.observe(2) and watch.observe(3)
    watch.taken(3)
    assert [watch.observe(step) for step in (4, 5, 6)] == [True, True, True]


# Signals.


def test_a_signal_makes_one_save_due_and_asks_to_stop(calls: list[int]) -> None:
    trigger = OnSignal(SIGNAL)
    watch = trigger.start(0)
    assert not watch.observe(1) and not watch.stop_requested and not trigger.received
    signal.raise_signal(SIGNAL)
    assert trigger.received and watch.stop_requested
    assert watch.observe(2) and watch.observe(3)
    watch.taken(3)
    assert not watch.observe(4)
    assert watch.stop_requested
    watch.close()


def test_the_earlier_handler_is_called_and_put_back(calls: list[int]) -> None:
    before = signal.getsignal(SIGNAL)
    watch = OnSignal(SIGNAL).start(0)
    signal.raise_signal(SIGNAL)
    assert calls == [SIGNAL]
    watch.close()
    assert signal.getsignal(SIGNAL) is before
    watch.close()
    assert signal.getsignal(SIGNAL) is before


@pytest.mark.parametrize("earlier", [signal.SIG_IGN, signal.SIG_DFL])
def test_an_earlier_disposition_that_is_no_function_is_not_called(earlier: signal.Handlers, calls: list[int]) -> None:
    signal.signal(SIGNAL, earlier)
    watch = OnSignal(SIGNAL).start(0)
    signal.raise_signal(SIGNAL)
    assert watch.stop_requested
    watch.close()
    assert signal.getsignal(SIGNAL) is earlier


def test_a_handler_installed_over_ours_is_left_alone(calls: list[int]) -> None:
    watch = OnSignal(SIGNAL).start(0)

    def later(signum: int, frame: FrameType | None) -> None: ...

    signal.signal(SIGNAL, later)
    watch.close()
    assert signal.getsignal(SIGNAL) is later


def test_two_for_one_signal_both_hear_it(calls: list[int]) -> None:
    before = signal.getsignal(SIGNAL)
    watches = [OnSignal(SIGNAL).start(0), OnSignal(SIGNAL).start(0)]
    signal.raise_signal(SIGNAL)
    assert [watch.stop_requested for watch in watches] == [True, True]
    assert calls == [SIGNAL]
    for watch in reversed(watches):
        watch.close()
    assert signal.getsignal(SIGNAL) is before


def test_the_first_of_two_is_closed_first(calls: list[int]) -> None:
    """Its handler lies under the second's, which goes on calling it and at its own end puts it back."""
    before = signal.getsignal(SIGNAL)
    trigger = OnSignal(SIGNAL)
    first, second = trigger.start(0), OnSignal(SIGNAL).start(0)
    first.close()
    signal.raise_signal(SIGNAL)
    assert second.stop_requested and calls == [SIGNAL]
    assert not trigger.received
    second.close()
    signal.raise_signal(SIGNAL)
    assert calls == [SIGNAL, SIGNAL]
    assert signal.getsignal(SIGNAL) is before


def test_a_process_can_be_ended_by_the_signal_once_all_runs_are_closed() -> None:
    script = """
        import os, signal
        from midstride.triggers import OnSignal
        child = os.fork()
        if child == 0:
            watches = [OnSignal().start(0), OnSignal().start(0)]
            for watch in watches:
                watch.close()
            signal.raise_signal(signal.SIGTERM)
            os._exit(7)  # never reached
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGTERM)
    """
    assert _python(script) == "True"


def test_any_of_tells_of_the_signal_and_puts_handlers_back(calls: list[int]) -> None:
    before = signal.getsignal(SIGNAL)
    watch = (EverySteps(100) | OnSignal(SIGNAL) | OnSignal(signal.SIGUSR2)).start(0)
    assert not watch.stop_requested
    signal.raise_signal(SIGNAL)
    assert watch.stop_requested and watch.observe(1)
    watch.close()
    assert signal.getsignal(SIGNAL) is before


def test_a_process_that_was_told_to_end_tells_its_next_run_as_well(calls: list[int]) -> None:
    trigger = OnSignal(SIGNAL)
    first = trigger.start(0)
    signal.raise_signal(SIGNAL)
    first.observe(1)
    first.taken(1)
    first.close()
    second = trigger.start(0)
    assert second.stop_requested and second.observe(1)
    second.close()


def test_off_the_main_thread_one_warning_names_what_to_call_instead(
    calls: list[int], caplog: pytest.LogCaptureFixture
) -> None:
    before = signal.getsignal(SIGNAL)
    with pytest.warns(RuntimeWarning, match=r"SIGUSR1.*request_stop\(\)") as warned:
        watch = _on_a_thread(lambda: OnSignal(SIGNAL).start(0))
    assert len(warned) == 1
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert signal.getsignal(SIGNAL) is before
    signal.raise_signal(SIGNAL)
    assert not watch.observe(1) and not watch.stop_requested
    watch.close()
    assert signal.getsignal(SIGNAL) is before


def test_the_warning_can_name_a_signal_that_has_no_name() -> None:
    with pytest.warns(RuntimeWarning, match=f"signal {signal.SIGRTMIN + 1}"):
        _on_a_thread(lambda: OnSignal(signal.SIGRTMIN + 1).start(0))


def test_closing_off_the_main_thread_raises_nothing(calls: list[int]) -> None:
    watch = OnSignal(SIGNAL).start(0)
    _on_a_thread(watch.close)
    signal.raise_signal(SIGNAL)
    assert calls == [SIGNAL]


def test_in_a_forked_child_the_signal_means_what_it_meant_before() -> None:
    script = """
        import os, signal
        from midstride.triggers import OnSignal
        trigger = OnSignal()
        watch = trigger.start(0)
        child = os.fork()
        if child == 0:
            signal.raise_signal(signal.SIGTERM)
            signal.pause()  # never reached: the default is to end
        _, status = os.waitpid(child, 0)
        print(os.WIFSIGNALED(status), os.WTERMSIG(status) == signal.SIGTERM, trigger.received, watch.stop_requested)
    """
    assert _python(script) == "True True False False"


def test_in_a_forked_child_an_earlier_handler_runs_once_and_ours_stays_away() -> None:
    script = """
        import os, signal
        from midstride.triggers import OnSignal
        calls = []
        signal.signal(signal.SIGTERM, lambda signum, frame: calls.append(os.getpid()))
        trigger = OnSignal()
        watch = trigger.start(0)
        child = os.fork()
        if child == 0:
            signal.raise_signal(signal.SIGTERM)
            os._exit(10 * trigger.received + len(calls))
        _, status = os.waitpid(child, 0)
        print(os.waitstatus_to_exitcode(status), len(calls))
    """
    assert _python(script) == "1 0"


def test_closing_in_a_forked_child_changes_nothing() -> None:
    script = """
        import os, signal
        from midstride.triggers import OnSignal
        watch = OnSignal().start(0)
        child = os.fork()
        if child == 0:
            watch.close()
            os._exit(0)
        os.waitpid(child, 0)
        signal.raise_signal(signal.SIGTERM)
        print(watch.stop_requested)
    """
    assert _python(script) == "True"


def _on_a_thread(call: Callable[[], Any]) -> Any:
    results: list[Any] = []
    thread = threading.Thread(target=lambda: results.append(call()))
    thread.start()
    thread.join()
    return results[0]


def _python(script: str) -> str:
    source = str(Path(midstride.__file__).resolve().parents[1])
    return subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)],
        env={**os.environ, "PYTHONPATH": source},
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    ).stdout.strip()
