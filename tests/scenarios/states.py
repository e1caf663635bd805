"""Save a state, and get it back from the folder."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import midstride as ms


def save(path: Path, state: Any, step: int = 1, **options: Any) -> ms.CheckpointInfo:
    """Save one checkpoint of a run."""
    with ms.Checkpointer(path, existing="continue", **options) as ckpt:
        return ckpt.save(step, state).result(60)


def restore(path: Path, template: Any = None, **options: Any) -> ms.Restored:
    """Restore the latest one; there must be one."""
    with ms.Checkpointer(path) as ckpt:
        restored = ckpt.restore(template, **options)
    assert restored is not None
    return restored


def round_trip(path: Path, state: Any, template: Any = None) -> Any:
    """The state as a restore gives it."""
    save(path, state)
    return restore(path, template).state


def manifest_of(path: Path, info: ms.CheckpointInfo) -> Any:
    """A checkpoint's manifest as plain JSON."""
    return json.loads((path / info.name / "manifest.json").read_bytes())


def nothing_written(path: Path) -> bool:
    """True if a run's folder has no trace of a save: no step folder, no mark."""
    return not path.exists() or {entry.name for entry in path.iterdir()} <= {".lock"}
