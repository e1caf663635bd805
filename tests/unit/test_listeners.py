"""Listeners are told in order, and what they do wrong stays theirs."""

from __future__ import annotations

import logging
from collections.abc import Callable

import pytest

from midstride.info import CheckpointInfo
from midstride.listeners import Listener, Listeners, RunBegan, RunEnded, SaveBegan, SaveCommitted, SaveFailed

INFO = CheckpointInfo(7, 1, None, "run", "step-7", "2026-01-01T00:00:00+00:00")
COMMITTED = SaveCommitted(INFO, 0.1, 1.0)
EVENTS = {
    "begin": RunBegan("runs/gpt"),
    "before_save": SaveBegan(7),
    "after_save": COMMITTED,
    "save_failed": SaveFailed(7, OSError("disk")),
    "end": RunEnded(INFO),
}


class Recording(Listener):
    def __init__(self, name: str, seen: list[tuple[str, str, object]]) -> None:
        self._name, self._seen = name, seen

    def begin(self, event: RunBegan) -> None:
        self._seen.append((self._name, "begin", event))

    def before_save(self, event: SaveBegan) -> None:
        self._seen.append((self._name, "before_save", event))

    def after_save(self, event: SaveCommitted) -> bool | None:
        self._seen.append((self._name, "after_save", event))
        return None

    def save_failed(self, event: SaveFailed) -> None:
        self._seen.append((self._name, "save_failed", event))

    def end(self, event: RunEnded) -> None:
        self._seen.append((self._name, "end", event))


class Broken:
    """Fails in everything it is told."""

    def __getattr__(self, method: str) -> Callable[[object], None]:
        def fail(event: object) -> None:
            raise RuntimeError(f"broken in {method}")

        return fail


@pytest.mark.parametrize("method", EVENTS)
def test_every_listener_is_told_in_order(method: str) -> None:
    seen: list[tuple[str, str, object]] = []
    listeners = Listeners([Recording("first", seen), Recording("second", seen)])
    getattr(listeners, method)(EVENTS[method])
    assert seen == [("first", method, EVENTS[method]), ("second", method, EVENTS[method])]


@pytest.mark.parametrize("method", EVENTS)
def test_a_failure_is_logged_with_the_listeners_name_counted_and_passed_over(
    method: str, caplog: pytest.LogCaptureFixture
) -> None:
    seen: list[tuple[str, str, object]] = []
    listeners = Listeners([Broken(), Recording("after it", seen)])  # type: ignore[list-item]
    with caplog.at_level(logging.ERROR, "midstride"):
        getattr(listeners, method)(EVENTS[method])
    assert seen == [("after it", method, EVENTS[method])]
    assert listeners.failures == 1
    (record,) = caplog.records
    assert "Broken" in record.getMessage() and method in record.getMessage()
    assert record.exc_info is not None and "broken in" in str(record.exc_info[1])


def test_an_exception_that_is_not_a_failure_goes_through() -> None:
    class Interrupted(Listener):
        def before_save(self, event: SaveBegan) -> None:
            raise KeyboardInterrupt

    listeners = Listeners([Interrupted()])
    with pytest.raises(KeyboardInterrupt):
        listeners.before_save(SaveBegan(1))
    assert listeners.failures == 0


@pytest.mark.parametrize(
    ("answers", "stop"),
    [
        ([], False),
        ([None], False),
        ([False], False),
        ([True], True),
        ([True, None], True),
        ([None, True], True),
        ([1], False),
    ],
)
def test_after_save_asks_to_stop_when_one_says_true(answers: list[object], stop: bool) -> None:
    class Answering:
        def __init__(self, answer: object) -> None:
            self._answer = answer

        def after_save(self, event: SaveCommitted) -> object:
            return self._answer

    assert Listeners(map(Answering, answers)).after_save(COMMITTED) is stop  # type: ignore[arg-type]


@pytest.mark.parametrize("method", EVENTS)
def test_a_listener_needs_not_have_every_method(method: str) -> None:
    listeners = Listeners([object(), Listener()])  # type: ignore[list-item]
    getattr(listeners, method)(EVENTS[method])
    assert listeners.failures == 0


def test_events_cannot_be_changed() -> None:
    with pytest.raises(AttributeError):
        COMMITTED.total_seconds = 2.0  # type: ignore[misc]
