"""``CheckpointManager``: checkpoints of a ``tf.train.Checkpoint``, written while training goes on."""

from __future__ import annotations

import contextlib
import copy
import inspect
import logging
import operator
import os
import time
from collections.abc import Callable, Iterable
from types import TracebackType
from typing import Any, Literal, Self

import tensorflow as tf

from midstride import exit_guard
from midstride.errors import SaveError
from midstride.info import CheckpointInfo
from midstride.listeners import Listener
from midstride.telemetry import Statistics
from midstride.tensorflow import durable, leftovers, state_file
from midstride.tensorflow.folder import CheckpointFolder
from midstride.tensorflow.kept import Kept
from midstride.tensorflow.object_snapshot import ObjectSnapshot
from midstride.tensorflow.saves import Saves

_log = logging.getLogger("midstride")


class CheckpointManager(tf.train.CheckpointManager):  # type: ignore[misc]
    """Saves a ``tf.train.Checkpoint`` again and again, on a thread of its own, and deletes old checkpoints.

    Takes the place of ``tf.train.CheckpointManager``: the same arguments, the same files, and either goes on in the
    folder of the other. ``save()`` takes the state of that moment and returns; a checkpoint is durable before the
    state file names it and before an older one is deleted, and only then ``latest_checkpoint`` and ``checkpoints``
    have it. What fails in the background is raised once, by the next ``save()``, ``sync()``, ``wait()`` or ``close()``.

    Use it as a context manager, or call ``close()``: else a save that runs at the end of the process is still
    finished, and its failure ends the process non-zero. Methods are called from one thread, the training thread.
    """

    def __init__(
        self,
        checkpoint: Any,
        directory: str | os.PathLike[str],
        max_to_keep: int | None,
        keep_checkpoint_every_n_hours: float | None = None,
        checkpoint_name: str = "ckpt",
        step_counter: Any = None,
        checkpoint_interval: int | None = None,
        init_fn: Callable[[], Any] | None = None,
        last_checkpoint_step: int | None = None,
        *,
        busy: Literal["wait", "skip"] = "wait",
        blocking: bool = False,
        max_failures: int = 0,
        listeners: Iterable[Listener] = (),
    ) -> None:
        """The first nine arguments are those of ``tf.train.CheckpointManager``. Nothing is written yet.

        busy: what becomes of a save while one is being written: it waits, or is put off and returns None.
        blocking: write before ``save()`` returns; for tests.
        max_failures: failed saves in a row that ``save()`` tolerates without raising.
        listeners: told of every save, on the writer's thread when it is durable.
        """
        if busy not in ("wait", "skip"):
            raise ValueError(f"busy must be 'wait' or 'skip', not {busy!r}")
        _refuse_graph_mode("CheckpointManager")
        super().__init__(
            checkpoint,
            directory,
            max_to_keep,
            keep_checkpoint_every_n_hours=keep_checkpoint_every_n_hours,
            checkpoint_name=checkpoint_name,
            step_counter=step_counter,
            checkpoint_interval=checkpoint_interval,
            init_fn=init_fn,
        )
        self._name = checkpoint_name
        self._keep, self._keep_hours = max_to_keep, keep_checkpoint_every_n_hours
        self._counter, self._initialize = step_counter, init_fn
        self._when_busy, self._in_foreground = busy, blocking
        self._kept = Kept.read(self.directory, time.time())
        self._begun_at_step = self._saved_at_step = last_checkpoint_step
        # A training script that changes its folder must not take the checkpoints along.
        self._started_in = "" if os.path.isabs(self.directory) else os.getcwd()
        self._in_doubt: set[str] = set()
        """Those whose files are being written over."""
        self._swept = self._closed = False
        told = tuple(listeners)
        self._saves = Saves(
            what=os.fspath(self.directory),
            max_failures=max_failures,
            listeners=lambda: told,
            may_pass=durable.may_pass,
            what_is_safe=lambda: durable.what_is_safe(self._on_disk(self.directory)),
        )

    # What there is.

    @property
    def latest_checkpoint(self) -> str | None:
        """The prefix of the newest checkpoint that is durable, to be restored; None if there is none."""
        return self._kept.latest

    @property
    def checkpoints(self) -> list[str]:
        """The checkpoints that are durable, oldest first, without those that are kept for good by the hour.

        As TensorFlow's own, it does not look whether somebody else has deleted some meanwhile.
        """
        return [path for path in self._kept.active if path not in self._in_doubt]

    def statistics(self) -> Statistics:
        """Counts and durations since this manager was made, from any thread."""
        return self._saves.statistics()

    # Saving.

    def save(self, checkpoint_number: Any = None, check_interval: bool = True, options: Any = None) -> str | None:
        """Take the state as it is now, to be written in the background; return the prefix of its files.

        The arguments are those of ``tf.train.CheckpointManager.save``. The checkpoint can be restored when ``sync()``
        has returned, or when ``latest_checkpoint`` has it. None: it is too early by ``checkpoint_interval``, or a save
        is being written and ``busy`` is "skip". ``experimental_write_callbacks`` of the options are called on the
        writer's thread, when the checkpoint is durable.

        Raises what makes the state impossible to take, and an earlier save's failure, once this save has been begun.
        """
        _refuse_graph_mode("save()")
        if self._closed:
            raise SaveError("save(): this CheckpointManager is closed")
        path = None
        if self._is_due(check_interval) and not self._is_put_off():
            path = self._save(checkpoint_number, options)
        self._saves.check()
        return path

    def _is_due(self, check_interval: bool) -> bool:
        if self.checkpoint_interval is None:
            return True
        step = _whole(self._counter)
        # One that failed does not count, so that the next may be of the same step.
        last = self._begun_at_step if self._saves.busy(0) else self._saved_at_step
        if last is None:
            return True
        return step != last and not (check_interval and step < last + self.checkpoint_interval)

    def _is_put_off(self) -> bool:
        if self._saves.busy(0):
            if self._when_busy == "skip":
                self._saves.recorder.add(saves_skipped=1)
                self._saves.raise_if_stalled()
                return True
            self._saves.wait()
        return False

    def _save(self, checkpoint_number: Any, options: Any) -> str:
        counter = self.checkpoint.save_counter
        counter.assign_add(1)
        number = _whole(counter if checkpoint_number is None else checkpoint_number)
        path = f"{os.path.join(self.directory, self._name)}-{number}"
        step = None if self.checkpoint_interval is None else _whole(self._counter)
        options = copy.copy(options) or tf.train.CheckpointOptions()
        self._saves.open()
        began = self._saves.begin(number)
        snapshot = ObjectSnapshot(self.checkpoint)
        self._saves.recorder.set(snapshot="blocking" if snapshot.blocking else "handles")
        self._begun_at_step = step
        prefix = self._on_disk(os.path.join(self.directory, self._name))

        def write() -> CheckpointInfo:
            with durable.sole_writer(self._on_disk(self.directory)):
                return self._write(snapshot, path, number, step, options)

        self._saves.start(
            number,
            began,
            write,
            here=self._in_foreground or snapshot.blocking,
            progress=lambda: durable.written_bytes(prefix),
            afterwards=lambda: self._finish(path, options),
            release=snapshot.drop,
        )
        return path

    # On the writer's thread.

    def _write(
        self, snapshot: ObjectSnapshot, path: str, number: int, step: int | None, options: Any
    ) -> CheckpointInfo:
        place = self._on_disk(path)
        folder, prefix = os.path.split(place)
        basename = prefix.rpartition("-")[0]
        for needed in (self._on_disk(self.directory), folder):
            durable.make_folder(needed)
        if not self._swept:
            leftovers.sweep(folder, basename)
            self._swept = True
        before = self._kept
        replaces = tf.io.gfile.exists(f"{place}.index")
        if replaces:
            self._begin_to_replace(path)
        try:
            snapshot.write(place, options)
            info = durable.make_durable(place, number)
        except BaseException:
            # What was not finished would fill the disk: nobody else would ever delete it.
            with contextlib.suppress(Exception):
                leftovers.sweep(folder, basename)
                if not replaces:
                    leftovers.delete(place)
                elif not any(CheckpointFolder(folder).problems(prefix)):
                    self._announce(before)  # it failed before it touched the one that was there
                    self._in_doubt.discard(path)
            raise
        self._announce(self._kept.with_newest(path, time.time()))
        self._in_doubt.discard(path)
        self._saved_at_step = step
        return info

    def _begin_to_replace(self, path: str) -> None:
        """Before files are written over: a kill in between must not leave that checkpoint named as the newest."""
        self._in_doubt.add(path)
        self._announce(self._kept.with_oldest(path))
        if path == self._kept.latest:
            _log.warning("%s is the only checkpoint, and is written over: until that is done there is none", path)

    def _announce(self, kept: Kept) -> None:
        if kept != self._kept:
            state_file.replace(
                self._on_disk(self.directory),
                self._on_disk(kept.latest or ""),
                [self._on_disk(path) for path in kept.active],
                relative=True,
                timestamps=list(kept.active.values()),
                last_preserved=kept.last_preserved,
            )
            self._kept = kept

    def _finish(self, path: str, options: Any) -> None:
        try:
            for callback in options.experimental_write_callbacks or ():
                callback(*[path][: len(inspect.signature(callback).parameters)])
        finally:
            self._delete_old()

    def _delete_old(self) -> None:
        kept, gone = self._kept.cut(self._keep, self._keep_hours)
        with durable.sole_writer(self._on_disk(self.directory)):
            for path in gone:
                leftovers.delete(self._on_disk(path))
            # The state file has named them until now, so that a manager after a kill deletes what is left.
            self._announce(kept)

    def _on_disk(self, path: str) -> str:
        return os.path.join(self._started_in, path) if durable.is_local(path) else path

    # Waiting, restoring, the end.

    def restore_or_initialize(self) -> str | None:
        """Restore the newest checkpoint, once what is being written has ended; else call ``init_fn``, if there is one.

        Returns the prefix of the checkpoint, None if there was none. What failed is raised by the next call of another
        method.
        """
        _refuse_graph_mode("restore_or_initialize()")
        self._saves.wait()
        latest = self.latest_checkpoint
        if latest is not None:
            self.checkpoint.restore(self._on_disk(latest))
            if self.checkpoint_interval is not None:
                self._saved_at_step = _whole(self._counter)
        elif self._initialize is not None:
            self._initialize()
        return latest

    def sync(self) -> None:
        """Wait until what is being written is durable; raise if it, or a save before it, failed."""
        self.wait()

    def wait(self, timeout: float | None = None) -> None:
        """The same, with a limit in seconds. ``Deadline`` (a ``TimeoutError``) after it, or when nothing progresses."""
        self._saves.wait(timeout)
        self._saves.check(tolerated=0)

    def close(self, timeout: float | None = None) -> None:
        """Finish what is being written, end the thread, and raise a failure that nobody was told of. Idempotent."""
        self._closed = True
        self._saves.close(timeout)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        exit_guard.leave(self.close, error)


def _refuse_graph_mode(what: str) -> None:
    if not tf.executing_eagerly():
        raise RuntimeError(
            f"{what} needs TensorFlow's eager mode; here a graph is being built, or eager mode is off. Call it outside "
            "of tf.function. For sessions there is midstride.tensorflow.AsyncCheckpointSaverHook"
        )


def _whole(number: Any) -> int:
    """Of an integer, a variable or a tensor."""
    return operator.index(number.numpy() if hasattr(number, "numpy") else number)
