"""Which checkpoints a manager keeps: what it writes into the state file, and goes on from after a restart.

The rules are those of ``tf.train.CheckpointManager``. Checkpoints are *active*, with the time each was made, until
there are more than ``max_to_keep``. The oldest then leaves: it is deleted, or, where
``keep_checkpoint_every_n_hours`` have passed since the last one that was preserved, preserved for good, and not listed
any more.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, replace

import tensorflow as tf


@dataclass(frozen=True)
class Kept:
    """Never changed: each change gives another."""

    latest: str | None
    active: Mapping[str, float]
    """Prefix -> when it was made, in seconds since the epoch; oldest first."""
    last_preserved: float
    """When the last preserved one was made."""

    @classmethod
    def read(cls, folder: str, now: float) -> Kept:
        """What the state file of ``folder`` says."""
        state = tf.train.get_checkpoint_state(folder)
        if state is None:
            # A checkpoint that is made at once must come after it, also for a coarse clock.
            return cls(None, {}, now - 1)
        # A clock that was set back must not make checkpoints look old.
        last_preserved = min(state.last_preserved_timestamp, now)
        # By their names: a hook writes whole paths, and the folder may be a copy.
        paths = [os.path.join(folder, os.path.basename(path)) for path in state.all_model_checkpoint_paths]
        made = [min(seconds, now) for seconds in state.all_model_checkpoint_timestamps] or [last_preserved] * len(paths)
        active = {path: seconds for path, seconds in zip(paths, made, strict=False) if seconds > last_preserved}
        return cls(os.path.join(folder, os.path.basename(state.model_checkpoint_path)), active, last_preserved)

    def with_newest(self, path: str, now: float) -> Kept:
        """One more; if it was there already, it is the newest from now on."""
        others = {other: made for other, made in self.active.items() if other != path}
        return replace(self, latest=path, active={**others, path: now})

    def with_oldest(self, path: str) -> Kept:
        """One that is there is the next to leave, and another is the newest. The same, if there is no other."""
        others = {other: made for other, made in self.active.items() if other != path}
        if path not in self.active or not others:
            return self
        return replace(self, latest=next(reversed(others)), active={path: self.active[path], **others})

    def cut(self, count: int | None, hours: float | None) -> tuple[Kept, list[str]]:
        """At most ``count`` active ones, or all; and those that are to be deleted."""
        active, last_preserved, gone = dict(self.active), self.last_preserved, []
        while count is not None and len(active) > count:
            path = next(iter(active))
            made = active.pop(path)
            if hours and made - hours * 3600 >= last_preserved:
                last_preserved = made
            else:
                gone.append(path)
        return replace(self, active=active, last_preserved=last_preserved), gone
