"""Listeners: told of every save. What they do wrong is logged and counted, and never breaks a save."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from midstride.info import CheckpointInfo

_log = logging.getLogger("midstride")


@dataclass(frozen=True, slots=True)
class RunBegan:
    """The ``Checkpointer`` was made."""

    path: str


@dataclass(frozen=True, slots=True)
class SaveBegan:
    """A save is about to capture the state; on the training thread."""

    step: int


@dataclass(frozen=True, slots=True)
class SaveCommitted:
    """A checkpoint is durable: another process can restore it. On the writer's thread."""

    info: CheckpointInfo
    stall_seconds: float
    """What the training thread spent in the call."""
    total_seconds: float
    """From the call until durable."""


@dataclass(frozen=True, slots=True)
class SaveFailed:
    """A save failed; nothing was published. On the writer's thread."""

    step: int
    error: BaseException


@dataclass(frozen=True, slots=True)
class RunEnded:
    """The ``Checkpointer`` was closed. ``last`` is the newest checkpoint that it knew of."""

    last: CheckpointInfo | None


class Listener:
    """Override what you need. For each save that ``before_save`` announced, exactly one of
    ``after_save`` and ``save_failed`` is called."""

    def begin(self, event: RunBegan) -> None: ...

    def before_save(self, event: SaveBegan) -> None: ...

    def after_save(self, event: SaveCommitted) -> bool | None:
        """Return True to ask the training loop to stop: it sets ``should_stop``."""

    def save_failed(self, event: SaveFailed) -> None: ...

    def end(self, event: RunEnded) -> None: ...


class Listeners:
    """Calls all listeners in order. A listener need not derive from ``Listener``, nor have every method."""

    def __init__(self, items: Iterable[Listener]) -> None:
        self._items = tuple(items)
        self.failures = 0

    def begin(self, event: RunBegan) -> None:
        self._call("begin", event)

    def before_save(self, event: SaveBegan) -> None:
        self._call("before_save", event)

    def after_save(self, event: SaveCommitted) -> bool:
        """Whether any listener asked to stop."""
        return any(answer is True for answer in self._call("after_save", event))

    def save_failed(self, event: SaveFailed) -> None:
        self._call("save_failed", event)

    def end(self, event: RunEnded) -> None:
        self._call("end", event)

    def _call(self, method: str, event: object) -> list[Any]:
        answers = []
        for item in self._items:
            call = getattr(item, method, None)
            if call is None:
                continue
            try:
                answers.append(call(event))
            except BaseException as error:
                # On the writer's thread even sys.exit() must not end it; on the caller's, Ctrl-C is the caller's.
                if not isinstance(error, Exception) and method not in ("after_save", "save_failed"):
                    raise
                self.failures += 1
                _log.exception("listener %s failed in %s(); the save goes on", type(item).__name__, method)
        return answers
