"""``AsyncCheckpointSaverHook``: checkpoints of a ``MonitoredSession``, written while it trains on."""

from __future__ import annotations

import contextlib
import os
import time
import weakref
from collections.abc import Sequence
from typing import Any, Literal

import tensorflow as tf
from tensorflow.python.framework import meta_graph
from tensorflow.python.training import training_util

from midstride.errors import Deadline
from midstride.info import CheckpointInfo
from midstride.limits import EXIT_SECONDS, STORAGE_SECONDS
from midstride.listeners import Listener
from midstride.telemetry import Statistics
from midstride.tensorflow import durable, leftovers, rewriting, state_file
from midstride.tensorflow.folder import STATE_FILE
from midstride.tensorflow.metrics import count_blocked, count_saved, count_written
from midstride.tensorflow.saves import Saves
from midstride.tensorflow.snapshot import Snapshot, Snapshotter
from midstride.triggers import OnSignal, Watch

_v1 = tf.compat.v1
_log = _v1.logging

_SKIP_AFTER_SECONDS = 0.1
"""How long a save that is due waits for the one that is running before it is put off."""


class AsyncCheckpointSaverHook(_v1.train.CheckpointSaverHook):  # type: ignore[misc, name-defined]
    """Saves checkpoints every N steps or seconds, on a thread of its own, in TensorFlow's format.

    Takes the place of ``CheckpointSaverHook`` and of TensorFlow's former hook of this name: the same
    arguments, the same files. The state is that of one moment, whatever training does meanwhile; a
    checkpoint is durable before the state file names it and before an older one is deleted.

    ``before_save`` of a listener is called on the training thread, ``after_save`` on the writer's,
    when the session may be closed already. What fails in the background is raised by the next step.
    """

    def __init__(
        self,
        checkpoint_dir: str,
        save_secs: float | None = None,
        save_steps: int | None = None,
        saver: Any = None,
        checkpoint_basename: str = "model.ckpt",
        scaffold: Any = None,
        listeners: Sequence[Any] | None = None,
        save_graph_def: bool = True,
        *,
        snapshot: Literal["auto", "handles", "copy", "blocking"] = "auto",
        busy: Literal["skip", "wait"] = "skip",
        blocking: bool = False,
        align: bool = False,
        on_signal: OnSignal | None = None,
        max_failures: int = 0,
    ) -> None:
        """The first eight arguments are those of ``CheckpointSaverHook``.

        listeners: ``CheckpointSaverListener``s, and Midstride's own.
        snapshot: how the state is captured. "handles" holds the buffers of resource variables, which are copied
            beside training, or by their next update if that comes first; "copy" copies everything at once;
            "blocking" does both, capture and write, before training goes on; "auto" is the first of these
            that is possible.
        busy: what becomes of a save that is due while one is being written: put off, or waited for.
        blocking: write before training goes on, as ``CheckpointSaverHook`` does; for tests.
        align: save at multiples of ``save_steps``, also after a restart from a step that is none.
        on_signal: when this signal arrives (SIGTERM, before a machine is taken away), the step that runs is
            finished and saved, and training is asked to stop.
        max_failures: failed saves in a row that are tolerated without raising.
        """
        if saver is not None and scaffold is not None:
            raise ValueError("You cannot provide both saver and scaffold.")
        if busy not in ("skip", "wait"):
            raise ValueError(f"busy must be 'skip' or 'wait', not {busy!r}")
        if snapshot not in ("auto", "handles", "copy", "blocking"):
            raise ValueError(f"snapshot must be 'auto', 'handles', 'copy' or 'blocking', not {snapshot!r}")
        if align and save_steps is None:
            raise ValueError("align=True keeps saves at multiples of save_steps, which was not given")
        checkpoint_dir = os.fspath(checkpoint_dir)
        save_path = os.path.join(checkpoint_dir, checkpoint_basename)
        _log.info("Create AsyncCheckpointSaverHook saving to path\n%s", save_path)
        # Subclasses and Estimators know these by name.
        self._saver = saver
        self._checkpoint_dir = checkpoint_dir
        self._save_path = save_path
        self._scaffold = scaffold
        self._timer = _v1.train.SecondOrStepTimer(every_secs=save_secs, every_steps=save_steps)
        self._listeners = list(listeners or [])
        self._steps_per_run = 1
        self._save_graph_def = save_graph_def
        self._summary_writer: Any = None
        self._global_step_tensor: Any = None
        self._last_checkpoint_step: int | None = None
        if self._listeners:
            _log.info(" with %d listener(s).", len(self._listeners))

        self._basename = os.path.basename(save_path)
        # Where files are written: the worker does it when the script may be in another folder for a while.
        self._relative = durable.is_local(save_path) and not os.path.isabs(save_path)
        self._place = os.path.abspath(save_path) if self._relative else save_path
        self._folder = os.path.dirname(self._place)
        self._ending = False
        self._put_off = False
        self._how, self._busy, self._blocking = snapshot, busy, blocking
        self._every = save_steps if align else None
        self._on_signal = on_signal
        self._signal: Watch | None = None
        self._session: weakref.ref[Any] | None = None
        self._snapshotter: Snapshotter | None = None
        self._last_write_began = time.perf_counter()
        self._state_seen: bytes | None = None
        self._warned = False
        self._saves = Saves(
            what=checkpoint_dir,
            max_failures=max_failures,
            listeners=lambda: [item for item in self._listeners if isinstance(item, Listener)],
            may_pass=durable.may_pass,
            what_is_safe=lambda: durable.what_is_safe(self._folder),
        )

    # What TensorFlow calls.

    def begin(self) -> None:
        durable.make_folder(self._checkpoint_dir)
        if "[" in self._checkpoint_dir:
            _log.warning(
                "%s: TensorFlow takes [ in a path for a pattern when it restores, and finds no checkpoint there. "
                "Choose a folder without, or move the checkpoints before they are restored",
                self._checkpoint_dir,
            )
        self._ending = False
        self._summary_writer = _v1.summary.FileWriterCache.get(self._checkpoint_dir)
        self._global_step_tensor = training_util._get_or_create_global_step_read()
        if self._global_step_tensor is None:
            raise RuntimeError("Global step should be created to use CheckpointSaverHook.")
        self._snapshotter = None
        self._state_seen = self._state_file()
        self._saves.begin_anew()
        self._saves.open()
        if self._on_signal is not None:
            if self._signal is not None:
                self._signal.close()
            self._session = None
            self._signal = self._on_signal.watch(self._in_session)
        for listener in self._tensorflow_listeners():
            listener.begin()

    def after_create_session(self, session: Any, coord: Any) -> None:
        self._session = weakref.ref(session)
        step = int(session.run(self._global_step_tensor))
        # First: what it sweeps has the names of what is written from here on.
        self._ready(session)
        if self._blocking:
            self._describe_graph(session.graph, step)
        else:
            self._saves.run(lambda: self._describe_graph(session.graph, step))
        if not self._trigger(session, step):
            # After a recovery the last save may have been of a later step: the one that was put off is due anyway.
            self._timer.reset()
        if self._blocking:
            self._saves.check()

    def before_run(self, run_context: Any) -> Any:
        return _v1.train.SessionRunArgs(self._global_step_tensor)

    def after_run(self, run_context: Any, run_values: Any) -> None:
        # It is read beside the train op, so it may be of before it: it tells only whether a save may be due.
        if self._timer.should_trigger_for_step(run_values.results + self._steps_per_run):
            self._trigger_if_due(run_context.session)
        if self._signal is not None and self._signal.observe(run_values.results):
            self._signal.taken(run_values.results)
            self._save_and_stop(run_context.session)
        self._saves.check()
        if self._saves.stop_requested:
            run_context.request_stop()

    def _trigger_if_due(self, session: Any) -> None:
        # One that was put off stays due, and is put off again without a run of the session at every step.
        if self._put_off and self._busy == "skip" and self._saves.busy(0):
            self._skip(time.perf_counter())
            return
        step = int(session.run(self._global_step_tensor))
        if self._timer.should_trigger_for_step(step):
            self._trigger(session, step)

    def _save_and_stop(self, session: Any) -> None:
        _log.info("A signal arrived: this step is saved, and training is asked to stop.")
        self._saves.request_stop()
        # Now, and not only in end(), which does not come where the loop does not ask whether to stop.
        self._saves.wait()
        step = int(session.run(self._global_step_tensor))
        if step != self._last_checkpoint_step:
            self._save(session, step)
            self._saves.wait()

    def _in_session(self) -> bool:
        # A session that an exception has left is closed, and no end() tells of it.
        session = None if self._session is None else self._session()
        return self._session is None or not (session is None or getattr(session, "_closed", False))

    def end(self, session: Any) -> None:
        _log.info("Waiting for any pending checkpoints to finish.")
        _log.info("Waiting for any pending write_graph to finish.")
        hangs = False
        try:
            self._saves.wait(stall_seconds=EXIT_SECONDS)
            last_step = int(session.run(self._global_step_tensor))
            if last_step != self._last_checkpoint_step:
                self._ending = True
                self._save(session, last_step)
            for listener in self._tensorflow_listeners():
                listener.end(session, last_step)
        except Deadline:
            hangs = True
            raise
        finally:
            if self._snapshotter is not None:
                self._snapshotter.forget_session()
            if self._signal is not None:
                self._signal.close()
                self._signal = None
            self._saves.close(wait=not hangs)

    def _set_steps_per_run(self, steps_per_run: int) -> None:
        self._steps_per_run = steps_per_run

    # What users call.

    def wait(self, timeout: float | None = None) -> None:
        """Wait until what is being written is durable, listeners were told, and ``graph.pbtxt`` is there.

        Raises ``Deadline`` (a ``TimeoutError``) after ``timeout`` seconds, or when nothing progresses. A
        failure is raised by the next step, not here.
        """
        self._saves.wait(timeout)

    def statistics(self) -> Statistics:
        """Counts and durations since this hook was made; ``snapshot`` says how the state is captured."""
        return self._saves.statistics()

    # A save.

    def _trigger(self, session: Any, step: int) -> bool:
        """Save now, if nothing is being written; whether it was begun. A save that is put off stays due."""
        began = time.perf_counter()
        # One that stays due is only looked for: waiting at every step would slow training down to the disk's pace.
        if self._saves.busy(0 if self._put_off else _SKIP_AFTER_SECONDS):
            if self._busy == "skip":
                if not self._put_off:
                    _log.info("Saver thread still in progress, skipping checkpoint.")
                self._put_off = True
                self._skip(began)
                return False
            self._saves.wait()
        self._put_off = False
        self._triggered_at(step)
        _log.info("Triggering checkpoint. %s", step)
        self._save(session, step)
        return True

    def _skip(self, began: float) -> None:
        self._saves.recorder.add(saves_skipped=1)
        count_blocked(time.perf_counter() - began)
        self._saves.raise_if_stalled()

    def _triggered_at(self, step: int) -> None:
        self._timer.update_last_triggered_step(step if self._every is None else step - step % self._every)

    def _save(self, session: Any, step: int) -> bool:
        """Subclasses know it by this signature. Returns whether a listener has asked to stop."""
        _log.info("Saving checkpoints for %d into %s.", step, self._save_path)
        began = self._saves.begin(step)
        try:
            for listener in self._tensorflow_listeners():
                listener.before_save(session, step)
            snapshotter = self._ready(session)
            snapshot = snapshotter.take(session)
        except BaseException as error:
            self._saves.give_up(step, error)
            raise
        if self._saves.statistics().snapshot != snapshotter.mode:
            _log.info("Checkpoints of %s: %s.", self._checkpoint_dir, snapshotter.reason)
            self._saves.recorder.set(snapshot=snapshotter.mode)
        if snapshot.step is not None and snapshot.step != step:
            # Other workers, or a listener, have trained on since.
            step = snapshot.step
            self._triggered_at(step)
        count_saved(began - self._last_write_began)
        self._last_write_began = began
        here = self._blocking or self._ending or snapshot.blocking

        def write() -> CheckpointInfo:
            if not here:
                snapshot.settle()  # training goes on beside it, and its updates are the cheaper for it
            with durable.sole_writer(self._folder):
                return self._write(snapshot, step)

        self._saves.start(
            step,
            began,
            write,
            here=here,
            progress=lambda: durable.written_bytes(self._place),
            afterwards=lambda: self._saved(session, step, began),
            release=snapshot.drop,
        )
        count_blocked(time.perf_counter() - began)
        return self._saves.stop_requested

    def _ready(self, session: Any) -> Snapshotter:
        """What takes snapshots, made before the first; then also what an earlier run left is seen to."""
        if self._snapshotter is None:
            saver = self._get_saver()
            self._warn_of_another_saver()
            with durable.sole_writer(self._folder, STORAGE_SECONDS):
                leftovers.sweep(self._folder, self._basename)
                state_file.recall(saver, self._folder)
            if self._relative:
                saver._save_relative_paths = True
                known = [(os.path.abspath(path), made) for path, made in saver._last_checkpoints]
                saver.set_last_checkpoints_with_time(known)
            self._snapshotter = Snapshotter(session.graph, saver, self._how, step=self._global_step_tensor)
            _log.info("Checkpoints of %s: %s.", self._checkpoint_dir, self._snapshotter.reason)
            self._saves.recorder.set(snapshot=self._snapshotter.mode)
        return self._snapshotter

    def _write(self, snapshot: Snapshot, step: int) -> CheckpointInfo:
        began = time.perf_counter()
        saver, written, made = self._get_saver(), "", None

        def place(path: str) -> str:
            nonlocal written, made
            written, made = path, rewriting.place_aside(path)
            if made is None:
                leftovers.note_unfinished(self._folder, self._basename, [path])
            return made or path

        info = None
        try:
            path = snapshot.write(self._place, step, write_meta_graph=self._save_graph_def, place=place)
            if path is not None:  # a saver of nothing writes nothing
                if made is not None:
                    rewriting.move_in(saver, made, path)
                info = durable.make_durable(path, step)
                self._warn_of_another_saver()
                try:
                    state_file.announce(saver, path, basename=self._basename)
                finally:
                    self._state_seen = self._state_file()
        except BaseException:
            if written:
                with contextlib.suppress(Exception):
                    leftovers.forget(saver, written, basename=self._basename)
            raise
        seconds = time.perf_counter() - began
        _log.info("Checkpoint actual writing time: (%.3f sec)", seconds)
        _log.info("Checkpoint finished for %d into %s.", step, self._save_path)
        self._last_checkpoint_step = step
        return info or durable.without_digests(path or self._save_path, step)

    def _saved(self, session: Any, step: int, began: float) -> None:
        log = _v1.SessionLog(status=_v1.SessionLog.CHECKPOINT, checkpoint_path=self._save_path)
        self._summary_writer.add_session_log(log, step)
        self._summary_writer.flush()
        count_written(time.perf_counter() - began)
        for listener in self._tensorflow_listeners():
            if listener.after_save(session, step):
                _log.info("A CheckpointSaverListener requested that training be stopped. listener: %s", listener)
                self._saves.request_stop()

    def _describe_graph(self, graph: Any, step: int) -> None:
        try:
            graph_def = graph.as_graph_def(add_shapes=True)
            if self._save_graph_def:
                with durable.sole_writer(self._folder):
                    training_util.write_graph(graph_def, self._folder, "graph.pbtxt")
            with graph.as_default():
                saver = self._get_saver()
                saver_def = saver.saver_def if saver else None
                meta_graph_def = meta_graph.create_meta_graph_def(graph_def=graph_def, saver_def=saver_def)
            self._summary_writer.add_graph(graph)
            self._summary_writer.add_meta_graph(meta_graph_def)
        except BaseException as error:
            self._saves.failed(step, error)

    def _tensorflow_listeners(self) -> list[Any]:
        return [item for item in self._listeners if not isinstance(item, Listener)]

    def _state_file(self) -> bytes | None:
        try:
            with tf.io.gfile.GFile(os.path.join(self._folder, STATE_FILE), "rb") as file:
                content: bytes = file.read()
                return content
        except tf.errors.OpError:
            return None

    def _warn_of_another_saver(self) -> None:
        if self._state_file() != self._state_seen and not self._warned:
            self._warned = True
            _log.warning(
                "Another saver writes checkpoints into %s: each deletes what it does not keep, and the state file is "
                "that of whoever came last. MonitoredTrainingSession adds one of its own unless it is given "
                "save_checkpoint_secs=None and save_checkpoint_steps=None.",
                self._checkpoint_dir,
            )
