"""TensorFlow's own counters of what checkpoints cost, under the label that its asynchronous hook had."""

from __future__ import annotations

from typing import Any

try:
    from tensorflow.python.saved_model.pywrap_saved_model import metrics as _metrics
except ImportError:  # a TensorFlow without them
    _metrics = None

_LABEL = "async_checkpoint_v1"


def count_written(seconds: float) -> None:
    """A checkpoint was written in the background; from its trigger to its end."""
    _add("AddAsyncCheckpointWriteDuration", seconds)


def count_saved(seconds: float) -> None:
    """Training time from the start of one write to the start of the next."""
    _add("AddTrainingTimeSaved", seconds)


def count_blocked(seconds: float) -> None:
    """Training stood still for a save, also for one that was put off."""
    _add("AddCheckpointWriteDuration", seconds)


def _add(name: str, seconds: float) -> None:
    add: Any = getattr(_metrics, name, None)
    if add is not None:
        add(api_label=_LABEL, microseconds=max(0, round(seconds * 1e6)))
