"""Messages between two processes: whole, in order, whatever their size, with their descriptors and their errors."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Iterator
from typing import Any

import pytest

import midstride as ms
from midstride.save.channel import Channel


@pytest.fixture
def ends() -> Iterator[tuple[Channel, Channel]]:
    one, other = map(Channel, socket.socketpair())
    yield one, other
    one.close()
    other.close()


def pump(sender: Channel, receiver: Channel, count: int) -> list[Any]:
    got: list[Any] = []
    while len(got) < count:
        sender.flush()
        got.extend(receiver.take())
    return got


def test_messages_come_whole_and_in_order_whatever_their_size(ends: tuple[Channel, Channel]) -> None:
    one, other = ends
    sent = [("small", 1), b"x" * 3_000_000, None, list(range(1000)), b"y" * 500_000]
    for message in sent:
        one.put(message)
    assert pump(one, other, len(sent)) == sent
    assert not one.has_unsent


def test_a_message_that_was_left_lying_comes_with_the_next_look(ends: tuple[Channel, Channel]) -> None:
    one, other = ends
    for number in range(3):
        one.put(number)
    one.flush()
    assert next(iter(other.take())) == 0
    assert list(other.take()) == [1, 2]


def test_nothing_waits_for_an_end_that_does_not_read(ends: tuple[Channel, Channel]) -> None:
    one, _ = ends
    one.put(b"x" * 10_000_000)
    assert one.flush() == 0
    assert one.has_unsent


def test_descriptors_come_with_their_messages(ends: tuple[Channel, Channel]) -> None:
    one, other = ends
    files = [os.memfd_create(f"file-{number}") for number in range(2)]
    for number, file in enumerate(files):
        os.write(file, str(number).encode())
        one.put(b"x" * 1_000_000)
        one.put(("file", number), [file])
    got = pump(one, other, 4)
    assert [message for message in got if isinstance(message, tuple)] == [("file", 0), ("file", 1)]
    for number, file in enumerate(files):
        theirs = other.take_descriptor()
        assert os.pread(theirs, 10, 0) == str(number).encode()
        os.close(theirs)
        os.close(file)


def test_the_end_is_seen(ends: tuple[Channel, Channel]) -> None:
    one, other = ends
    one.put("last")
    one.flush()
    one.close()
    assert list(other.take()) == ["last"]
    assert other.ended
    other.put("to nobody")
    other.flush()
    assert not other.has_unsent


class Odd(Exception):
    """It cannot be put together again from its arguments."""

    def __init__(self, one: object, two: object) -> None:
        super().__init__("odd")
        self.lock = threading.Lock()


def test_errors_keep_their_class_cause_and_notes(ends: tuple[Channel, Channel]) -> None:
    one, other = ends
    error = ms.WriteError("step 3 could not be saved")
    error.__cause__ = ms.Busy("held by another")
    error.__cause__.__cause__ = OSError(11, "try again")
    error.__cause__.left_at = "12"
    error.add_note("a note")
    odd = ms.CommitError("what")
    odd.__cause__ = Odd(1, 2)
    for message in (error, odd):
        one.put(message)
    got, got_odd = pump(one, other, 2)
    assert type(got) is ms.WriteError
    assert str(got) == str(error)
    assert got.__notes__ == ["a note"]
    assert type(got.__cause__) is ms.Busy
    assert got.__cause__.left_at == "12"
    assert isinstance(got.__cause__.__cause__, OSError)
    assert got.__cause__.__cause__.errno == 11
    assert type(got_odd) is ms.CommitError
    assert "Odd" in str(got_odd.__cause__)
