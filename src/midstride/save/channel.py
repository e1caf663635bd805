"""Messages between the trainer and its writer process, over a pair of sockets.

Both ends were made by one program and nobody else can reach them, so messages are pickled; no file
of a checkpoint ever is.
"""

from __future__ import annotations

import io
import pickle
import socket
import struct
from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any

from midstride.errors import MidstrideError

_LENGTH = struct.Struct("<Q")
_READ_BYTES = 2**18


class Channel:
    """One end. Sends and receives whole messages, and never waits: the caller asks when it may go on.

    A message may carry descriptors, which the other end takes with ``take_descriptor`` in the same order.
    """

    def __init__(self, end: socket.socket) -> None:
        end.setblocking(False)
        self._socket = end
        self._out: deque[tuple[memoryview, Sequence[int]]] = deque()
        self._in = bytearray()
        self._descriptors: deque[int] = deque()
        self.ended = False
        """Whether the other end, and every copy of it, is closed: nothing more will come."""

    def fileno(self) -> int:
        return self._socket.fileno()

    @property
    def has_unsent(self) -> bool:
        return bool(self._out)

    def put(self, message: object, descriptors: Sequence[int] = ()) -> None:
        """Line a message up; ``flush`` sends it."""
        body = _dump(message)
        self._out.append((memoryview(_LENGTH.pack(len(body)) + body), descriptors))

    def flush(self) -> int:
        """Send as much as the other end takes now; return how many messages went out whole."""
        sent = 0
        while self._out:
            data, descriptors = self._out[0]
            try:
                count = (
                    socket.send_fds(self._socket, [data], list(descriptors))
                    if descriptors
                    else self._socket.send(data, socket.MSG_NOSIGNAL)
                )
            except BlockingIOError:
                break
            except OSError:  # the other end is gone, and nobody will read what is left
                self._out.clear()
                break
            if count < len(data):
                self._out[0] = (data[count:], ())
            else:
                self._out.popleft()
                sent += 1
        return sent

    def take(self) -> Iterator[Any]:
        """The messages that are there by now."""
        yield from self._whole_messages()  # of an earlier look that was not read to its end
        while not self.ended:
            try:
                data, descriptors, _, _ = socket.recv_fds(self._socket, _READ_BYTES, 4)
            except BlockingIOError:
                break
            except OSError:
                self.ended = True
                break
            self.ended = not data
            self._in += data
            self._descriptors.extend(descriptors)
            yield from self._whole_messages()

    def _whole_messages(self) -> Iterator[Any]:
        while len(self._in) >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(self._in)
            end = _LENGTH.size + length
            if len(self._in) < end:
                return
            body = bytes(self._in[_LENGTH.size : end])
            del self._in[:end]
            yield pickle.loads(body)

    def take_descriptor(self) -> int:
        """The next descriptor that came with a message."""
        return self._descriptors.popleft()

    def close(self) -> None:
        self._socket.close()


class _Pickler(pickle.Pickler):
    def reducer_override(self, value: Any) -> Any:
        if isinstance(value, BaseException):
            return _restore_error, (_dumped(value), repr(value), value.__cause__)
        return NotImplemented


def _dump(message: object) -> bytes:
    buffer = io.BytesIO()
    _Pickler(buffer, pickle.HIGHEST_PROTOCOL).dump(message)
    return buffer.getvalue()


def _dumped(error: BaseException) -> bytes | None:
    try:
        dumped = pickle.dumps(error)
        pickle.loads(dumped)
    except Exception:  # an error of a library's own that cannot be put together again from its arguments
        return None
    return dumped


def _restore_error(dumped: bytes | None, text: str, cause: BaseException | None) -> BaseException:
    error: BaseException = pickle.loads(dumped) if dumped is not None else MidstrideError(text)
    error.__cause__ = cause
    return error
