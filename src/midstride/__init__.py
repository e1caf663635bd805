"""Midstride: checkpoint a training run without breaking its stride, and lose nothing."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from midstride.checkpointer import Checkpointer
    from midstride.errors import (
        Busy,
        CommitError,
        CoordinationError,
        CorruptCheckpoint,
        Deadline,
        ForeignRun,
        Gone,
        MidstrideError,
        NewerFormat,
        NoSpace,
        NotCommitted,
        NotFound,
        NothingRestorable,
        PeerLost,
        PermissionDenied,
        RestoreError,
        SaveError,
        StagingError,
        StateMismatch,
        StepExists,
        StorageError,
        TornSnapshot,
        Unavailable,
        UnsupportedState,
        WriteError,
        WriterDied,
    )
    from midstride.info import CheckpointInfo, Progress
    from midstride.listeners import Listener
    from midstride.reader import RunReader, newest, open
    from midstride.restore.load import Restored
    from midstride.retention import BestN, EveryNSteps, LatestN
    from midstride.rng import RNG
    from midstride.save.pending import PendingSave
    from midstride.storage import LocalStorage, MemoryStorage, Storage
    from midstride.telemetry import Statistics
    from midstride.triggers import EverySeconds, EverySteps, OnSignal

__version__ = "0.1.0"

_HOMES = {
    "checkpointer": ("Checkpointer",),
    "errors": (
        "Busy", "CommitError", "CoordinationError", "CorruptCheckpoint", "Deadline", "ForeignRun", "Gone",
        "MidstrideError", "NewerFormat", "NoSpace", "NotCommitted", "NotFound", "NothingRestorable", "PeerLost",
        "PermissionDenied", "RestoreError", "SaveError", "StagingError", "StateMismatch", "StepExists",
        "StorageError", "TornSnapshot", "Unavailable", "UnsupportedState", "WriteError", "WriterDied",
    ),
    "info": ("CheckpointInfo", "Progress"),
    "listeners": ("Listener",),
    "reader": ("RunReader", "newest", "open"),
    "restore.load": ("Restored",),
    "retention": ("BestN", "EveryNSteps", "LatestN"),
    "rng": ("RNG",),
    "save.pending": ("PendingSave",),
    "storage": ("LocalStorage", "MemoryStorage", "Storage"),
    "telemetry": ("Statistics",),
    "triggers": ("EverySeconds", "EverySteps", "OnSignal"),
}  # fmt: skip
"""Names are looked up when they are first used, so that importing the package costs nothing."""

_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}

__all__ = [
    "RNG", "BestN", "Busy", "CheckpointInfo", "Checkpointer", "CommitError", "CoordinationError",
    "CorruptCheckpoint", "Deadline", "EveryNSteps", "EverySeconds", "EverySteps", "ForeignRun", "Gone",
    "LatestN", "Listener", "LocalStorage", "MemoryStorage", "MidstrideError", "NewerFormat", "NoSpace",
    "NotCommitted", "NotFound", "NothingRestorable", "OnSignal", "PeerLost", "PendingSave",
    "PermissionDenied", "Progress", "RestoreError", "Restored", "RunReader", "SaveError", "StagingError",
    "StateMismatch", "Statistics", "StepExists", "Storage", "StorageError", "TornSnapshot", "Unavailable",
    "UnsupportedState", "WriteError", "WriterDied", "newest", "open",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    home = _HOME_OF.get(name)
    if home is None:
        raise AttributeError(f"module 'midstride' has no attribute {name!r}")
    value = getattr(importlib.import_module(f"midstride.{home}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
