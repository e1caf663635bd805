"""For TensorFlow: asynchronous checkpoints of sessions and of objects, and what reads their folders."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from midstride.tensorflow.folder import CheckpointFolder
    from midstride.tensorflow.hook import AsyncCheckpointSaverHook
    from midstride.tensorflow.latest import latest_checkpoint
    from midstride.tensorflow.manager import CheckpointManager

_HOMES = {
    "AsyncCheckpointSaverHook": "hook",
    "CheckpointFolder": "folder",
    "CheckpointManager": "manager",
    "latest_checkpoint": "latest",
}
"""Looked up when first used: what only reads a folder needs no TensorFlow."""

__all__ = ["AsyncCheckpointSaverHook", "CheckpointFolder", "CheckpointManager", "latest_checkpoint"]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'midstride.tensorflow' has no attribute {name!r}")
    value = getattr(importlib.import_module(f"midstride.tensorflow.{_HOMES[name]}"), name)
    globals()[name] = value
    return value
