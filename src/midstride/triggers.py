"""When ``step()`` saves: every so many steps, every so much time, on a signal; joined by ``|``.

A trigger is a description, frozen and reusable; ``start`` makes the *watch* that one run keeps.
"""

from __future__ import annotations

import logging
import os
import re
import signal
import threading
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from types import FrameType
from typing import Any, Protocol

_log = logging.getLogger("midstride")


class Watch(Protocol):
    """One run's memory of a trigger."""

    @property
    def stop_requested(self) -> bool:
        """Whether a signal asked for a last save."""
        ...

    def observe(self, step: int) -> bool:
        """Whether a save is due at this step. Stays true until ``taken``."""
        ...

    def taken(self, step: int) -> None:
        """A save of this step was begun: nothing is due any more, and clocks start anew."""
        ...

    def rewind(self, step: int) -> None:
        """The run was restored to this step."""
        ...

    def close(self) -> None:
        """The run is over: put signal handlers back."""
        ...


class Trigger:
    """The root of all triggers."""

    def start(self, step: int, clock: Callable[[], float] = time.monotonic) -> Watch:
        """Begin to watch a run that is at ``step``. ``clock`` is in seconds and never goes back."""
        raise TypeError(f"{type(self).__name__} does not say when to save")

    def __or__(self, other: Trigger) -> Trigger:
        if not isinstance(other, Trigger):
            return NotImplemented
        return AnyOf((*_parts(self), *_parts(other)))


def _parts(trigger: Trigger) -> tuple[Trigger, ...]:
    return trigger.triggers if isinstance(trigger, AnyOf) else (trigger,)


@dataclass(frozen=True)
class EverySteps(Trigger):
    """Due when ``step // n`` has grown since the last step seen: steps may be skipped over, not missed."""

    n: int

    def __post_init__(self) -> None:
        if type(self.n) is not int:
            raise TypeError(f"EverySteps takes a number of steps, not {self.n!r}")
        if self.n < 1:
            raise ValueError(f"EverySteps takes at least 1, not {self.n}")

    def start(self, step: int, clock: Callable[[], float] = time.monotonic) -> Watch:
        return _StepsWatch(self.n, step)


@dataclass(frozen=True)
class EverySeconds(Trigger):
    """Due when so many seconds have passed since the last save was begun, or since the start."""

    seconds: float

    def __post_init__(self) -> None:
        if isinstance(self.seconds, bool) or not isinstance(self.seconds, int | float):
            raise TypeError(f"EverySeconds takes a number of seconds, not {self.seconds!r}")
        if not 0 < self.seconds < float("inf"):
            raise ValueError(f"EverySeconds takes a positive number of seconds, not {self.seconds}")

    def start(self, step: int, clock: Callable[[], float] = time.monotonic) -> Watch:
        return _SecondsWatch(self.seconds, clock)


@dataclass(frozen=True)
class OnSignal(Trigger):
    """Due when a signal has arrived: the next ``step()`` saves, waits for it, and sets ``should_stop``.

    The handler only sets a flag, and calls the handler that was there before. Handlers can be set
    on the main thread alone; elsewhere a warning says to call ``request_stop()`` instead.
    """

    signum: int = signal.SIGTERM
    # One flag. Not an Event: its lock would be taken in a handler that may interrupt itself.
    _arrived: list[bool] = field(default_factory=lambda: [False], init=False, repr=False, compare=False)

    @property
    def received(self) -> bool:
        """Whether the signal has arrived: visible at once, from any loop."""
        return self._arrived[0]

    def start(self, step: int, clock: Callable[[], float] = time.monotonic) -> Watch:
        return self.watch(lambda: True)

    def watch(self, listening: Callable[[], bool]) -> Watch:
        """``start`` for a run that may end unnoticed: a signal that comes when it is not ``listening`` means what it
        meant before."""
        return _SignalWatch(self.signum, self._arrived, listening)


@dataclass(frozen=True)
class AnyOf(Trigger):
    """Due when any of its triggers is."""

    triggers: tuple[Trigger, ...]

    def start(self, step: int, clock: Callable[[], float] = time.monotonic) -> Watch:
        return _AnyWatch([trigger.start(step, clock) for trigger in self.triggers])


_UNITS = {"ms": 0.001, "s": 1.0, "min": 60.0, "h": 3600.0, "d": 86400.0}
_TIME = re.compile(r"\s*([0-9]+(?:\.[0-9]+)?)\s*(ms|s|min|h|d)\s*")


def as_trigger(every: int | str | Trigger | None) -> Trigger | None:
    """What ``every=`` may be: a number of steps, a time such as ``"10min"``, a trigger, or None."""
    if every is None or isinstance(every, Trigger):
        return every
    if isinstance(every, str):
        match = _TIME.fullmatch(every)
        if match is None:
            raise ValueError(f"every={every!r} is not a time: write a number and ms, s, min, h or d, as in '10min'")
        return EverySeconds(float(match[1]) * _UNITS[match[2]])
    if type(every) is int:
        return EverySteps(every)
    raise TypeError(f"every must be a number of steps, a time such as '10min', or triggers joined by |, not {every!r}")


class _StepsWatch:
    stop_requested = False

    def __init__(self, n: int, step: int) -> None:
        self._n, self._last, self._due = n, step, False

    def observe(self, step: int) -> bool:
        self._due = self._due or step // self._n > self._last // self._n
        self._last = step
        return self._due

    def taken(self, step: int) -> None:
        self._last, self._due = step, False

    def rewind(self, step: int) -> None:
        self.taken(step)

    def close(self) -> None:
        pass


class _SecondsWatch:
    stop_requested = False

    def __init__(self, seconds: float, clock: Callable[[], float]) -> None:
        self._seconds, self._clock, self._since = seconds, clock, clock()

    def observe(self, step: int) -> bool:
        return self._clock() - self._since >= self._seconds

    def taken(self, step: int) -> None:
        self._since = self._clock()

    def rewind(self, step: int) -> None:
        self.taken(step)

    def close(self) -> None:
        pass


class _SignalWatch:
    def __init__(self, signum: int, arrived: list[bool], listening: Callable[[], bool]) -> None:
        self._signum, self._arrived, self._process = signum, arrived, os.getpid()
        self._listening = listening
        self._due, self._seen = True, False
        self._earlier: Any = None
        self._installed = threading.current_thread() is threading.main_thread()
        if self._installed:
            # Kept, so that it can be told later whether the handler in place is still ours.
            self._ours = self._handle
            self._earlier = signal.signal(signum, self._ours)
        else:
            name = signal.Signals(signum).name if signum in set(signal.Signals) else f"signal {signum}"
            message = f"OnSignal({name}) does nothing off the main thread: on {name} call request_stop() yourself"
            _log.warning(message)
            warnings.warn(message, RuntimeWarning, stacklevel=2)

    def _handle(self, signum: int, frame: FrameType | None) -> None:
        closed = not (self._installed and self._listening())
        if os.getpid() != self._process or (closed and signal.getsignal(signum) == self._ours):
            # A forked child, such as a pool's worker, or a closed run whose handler a run closed after it
            # put back: the signal means what it meant before.
            signal.signal(signum, self._earlier if self._earlier is not None else signal.SIG_DFL)
            os.kill(os.getpid(), signum)
            return
        if not closed:
            self._arrived[0] = True
        # Python's own handler of Ctrl-C would raise at once, and nothing would be saved.
        if callable(self._earlier) and self._earlier is not signal.default_int_handler:
            self._earlier(signum, frame)

    @property
    def stop_requested(self) -> bool:
        return self._arrived[0]

    def observe(self, step: int) -> bool:
        self._seen = self._arrived[0]
        return self._due and self._seen

    def taken(self, step: int) -> None:
        # A signal that came after the look does not count as answered by this save.
        self._due = self._due and not self._seen

    def rewind(self, step: int) -> None:
        pass

    def close(self) -> None:
        if self._installed and os.getpid() == self._process:
            self._installed = False
            if signal.getsignal(self._signum) == self._ours and _on_main_thread():
                signal.signal(self._signum, self._earlier if self._earlier is not None else signal.SIG_DFL)


def _on_main_thread() -> bool:
    return threading.current_thread() is threading.main_thread()


class _AnyWatch:
    def __init__(self, watches: list[Watch]) -> None:
        self._watches = watches

    @property
    def stop_requested(self) -> bool:
        return any(watch.stop_requested for watch in self._watches)

    def observe(self, step: int) -> bool:
        return any([watch.observe(step) for watch in self._watches])  # every watch must see the step

    def taken(self, step: int) -> None:
        for watch in self._watches:
            watch.taken(step)

    def rewind(self, step: int) -> None:
        for watch in self._watches:
            watch.rewind(step)

    def close(self) -> None:
        for watch in reversed(self._watches):
            watch.close()
