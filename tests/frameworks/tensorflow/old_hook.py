"""An imitation of the asynchronous checkpoint hook that TensorFlow used to have, one defect at a time.

``imitate("D3")`` is a hook with the defect D3 and no other; ``imitate()`` has none, and shows that the test of each
defect can be passed. It is no substitute for the real thing: it knows plain variables only, copies them slowly, and
loads the copy into a second session over the same graph.

| defect | what the switch does |
|---|---|
| D1 | the thread does not enter the graph, so it is in eager mode and sees an empty default graph |
| D2 | graph.pbtxt is made from the default graph of the thread that writes it |
| D3 | the answers of ``after_save`` are dropped |
| D4 | what is raised on the thread is dropped |
| D5 | the step counts as saved once its save has begun |
| D6, D8, D18 | one cause: the thread reads the variables from the training session, while that trains, is closed, or is replaced |
| D7 | the timer counts a skipped save as made; skips are not counted |
| D9 | the order of TensorFlow's saver: nothing is synced, the state file comes before .meta, deletion before both |
| D10 | nothing is swept at the start |
| D11 | waits have no limit |
| D12 | the global step is read by a run of its own after every step |
| D13 | ``before_save`` is called on the thread |
| D14 | .meta is serialised anew for every save |
| D15 | the summary writer is not flushed |
| D16 | there is no argument ``save_graph_def`` |
| D17 | one clock of "training time saved" for all hooks of the process |
| D19 | a new thread for every save |

Import this only after ``pytest.importorskip("tensorflow")``.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import tensorflow as tf
from tensorflow.python.framework import meta_graph
from tensorflow.python.saved_model.pywrap_saved_model import metrics

v1 = tf.compat.v1

LABEL = "async_checkpoint_v1"
DEADLINE_SECONDS = 60.0
SKIP_AFTER_SECONDS = 0.1


def imitate(*defects: str) -> Callable[..., OldHook]:
    """A maker of hooks that have these defects."""
    kind = WithoutSaveGraphDef if "D16" in defects else OldHook

    def make(*arguments: Any, **options: Any) -> OldHook:
        hook = kind(*arguments, **options)
        hook.defects = frozenset(defects)
        return hook

    return make


class OldHook(v1.train.CheckpointSaverHook):
    """See the module."""

    defects: frozenset[str] = frozenset()
    _shared_clock: float | None = None

    def __init__(
        self,
        checkpoint_dir: str,
        save_secs: float | None = None,
        save_steps: int | None = None,
        saver: Any = None,
        checkpoint_basename: str = "model.ckpt",
        scaffold: Any = None,
        listeners: Any = None,
        save_graph_def: bool = True,
    ) -> None:
        super().__init__(
            checkpoint_dir, save_secs, save_steps, saver, checkpoint_basename, scaffold, listeners, save_graph_def
        )
        self._steps_per_run = 1
        self._last_checkpoint_step: int | None = None
        self._worker = ThreadPoolExecutor(max_workers=1, thread_name_prefix="imitation")
        self._running: Future[None] | None = None
        self._graph_file: Future[None] | None = None
        self._untold: BaseException | None = None
        self._asked_to_stop = False
        self._meta: bytes | None = None
        self._counts = dict.fromkeys(("saves_begun", "saves_committed", "saves_failed", "saves_skipped"), 0)
        self._own_clock = time.perf_counter()
        if OldHook._shared_clock is None:
            OldHook._shared_clock = self._own_clock

    # What a session calls

    def begin(self) -> None:
        super().begin()
        self._graph = v1.get_default_graph()
        if "D10" not in self.defects:
            self._sweep()

    def after_create_session(self, session: Any, coord: Any) -> None:
        step = int(session.run(self._global_step_tensor))
        if self._save_graph_def:
            self._graph_file = self._start(self._write_graph)
        graph_def, saver_def = self._graph.as_graph_def(add_shapes=True), self._get_saver().saver_def
        self._summary_writer.add_graph(self._graph)
        self._summary_writer.add_meta_graph(meta_graph.create_meta_graph_def(graph_def=graph_def, saver_def=saver_def))
        self._save(session, step)
        self._timer.update_last_triggered_step(step)

    def after_run(self, run_context: Any, run_values: Any) -> None:
        self._raise_untold()
        if self._asked_to_stop:
            run_context.request_stop()
        session, one_behind = run_context.session, run_values.results
        if "D12" not in self.defects and not self._timer.should_trigger_for_step(one_behind + self._steps_per_run):
            return
        step = int(session.run(self._global_step_tensor))
        if self._timer.should_trigger_for_step(step):
            begun = self._save(session, step)
            if begun or "D7" in self.defects:
                self._timer.update_last_triggered_step(step)

    def end(self, session: Any) -> None:
        self.wait()
        step = int(session.run(self._global_step_tensor))
        if self._last_checkpoint_step != step:
            self._save(session, step)
            self.wait()
        for listener in self._listeners:
            listener.end(session, step)
        self._raise_untold()

    # What ours has besides

    def wait(self, timeout: float | None = None) -> None:
        limit = None if "D11" in self.defects else DEADLINE_SECONDS if timeout is None else timeout
        for pending in (self._running, self._graph_file):
            if pending is not None:
                pending.exception(limit)

    def statistics(self) -> SimpleNamespace:
        return SimpleNamespace(**self._counts)

    # Saving

    def _save(self, session: Any, step: int) -> bool:
        """Whether a save was begun."""
        if self._running is not None:
            with contextlib.suppress(TimeoutError):
                self._running.exception(SKIP_AFTER_SECONDS)
            if not self._running.done():
                if "D7" not in self.defects:
                    self._counts["saves_skipped"] += 1
                return False
        if "D13" not in self.defects:
            self._tell_before_save(session, step)
        source = session if self.defects & {"D6", "D8", "D18"} else self._copy_of(session)
        if "D5" in self.defects:
            self._last_checkpoint_step = step
        self._counts["saves_begun"] += 1
        self._running = self._start(lambda: self._write_and_keep_errors(source, session, step))
        return True

    def _tell_before_save(self, session: Any, step: int) -> None:
        for listener in self._listeners:
            listener.before_save(session, step)

    def _copy_of(self, session: Any) -> Any:
        """A session of its own that holds the values of this moment."""
        with self._graph.as_default():
            variables = v1.global_variables()
            values = session.run(variables)
            private = v1.Session(graph=self._graph)
            for variable, value in zip(variables, values, strict=True):
                initializer = variable.initializer
                private.run(initializer, {initializer.inputs[1]: value})
        return private

    def _start(self, work: Callable[[], None]) -> Future[None]:
        if "D19" not in self.defects:
            return self._worker.submit(work)
        done: Future[None] = Future()

        def run() -> None:
            try:
                done.set_result(work())
            except BaseException as error:
                done.set_exception(error)

        threading.Thread(target=run, daemon=True).start()
        return done

    def _write_and_keep_errors(self, source: Any, session: Any, step: int) -> None:
        try:
            with contextlib.nullcontext() if "D1" in self.defects else self._graph.as_default():
                self._write(source, session, step)
            self._counts["saves_committed"] += 1
        except BaseException as error:
            if "D4" not in self.defects:
                self._untold = error
            self._counts["saves_failed"] += 1
        finally:
            if source is not session:
                source.close()

    def _write(self, source: Any, session: Any, step: int) -> None:
        started = time.perf_counter()
        if "D13" in self.defects:
            self._tell_before_save(session, step)
        self._write_files(source, step)
        self._last_checkpoint_step = step
        log = v1.SessionLog(status=v1.SessionLog.CHECKPOINT, checkpoint_path=self._save_path)
        self._summary_writer.add_session_log(log, step)
        if "D15" not in self.defects:
            self._summary_writer.flush()
        answers = [listener.after_save(session, step) for listener in self._listeners]
        self._asked_to_stop = any(answers) and "D3" not in self.defects
        since = OldHook._shared_clock if "D17" in self.defects else self._own_clock
        metrics.AddTrainingTimeSaved(api_label=LABEL, microseconds=max(0, int((started - since) * 1e6)))
        OldHook._shared_clock = self._own_clock = started

    def _raise_untold(self) -> None:
        error, self._untold = self._untold, None
        if error is not None:
            raise RuntimeError("a checkpoint could not be written; earlier ones are untouched") from error

    # Files

    def _write_files(self, source: Any, step: int) -> None:
        saver, with_meta = self._get_saver(), self._save_graph_def
        if "D9" in self.defects:
            saver.save(source, self._save_path, global_step=step, write_meta_graph=with_meta)
            return
        anew = with_meta and "D14" in self.defects
        prefix = saver.save(source, self._save_path, global_step=step, write_meta_graph=anew, write_state=False)
        if with_meta and not anew:
            if self._meta is None:
                self._meta = saver.export_meta_graph().SerializeToString()
            Path(f"{prefix}.meta").write_bytes(self._meta)
        folder = Path(self._checkpoint_dir)
        for file in folder.glob(f"{Path(prefix).name}.*"):
            sync(file)
        saver._RecordLastCheckpoint(prefix)
        state = v1.train.generate_checkpoint_state_proto(str(folder), prefix, saver.last_checkpoints)
        fresh = folder / "checkpoint.fresh"
        fresh.write_text(str(state))
        sync(fresh)
        os.replace(fresh, folder / "checkpoint")
        sync(folder)
        saver._MaybeDeleteOldCheckpoints()

    def _write_graph(self) -> None:
        graph = v1.get_default_graph() if "D2" in self.defects else self._graph
        v1.train.write_graph(graph.as_graph_def(add_shapes=True), self._checkpoint_dir, "graph.pbtxt")

    def _sweep(self) -> None:
        base = Path(self._save_path)
        for left in base.parent.glob(f"{base.name}-*.tempstate*"):
            left.unlink()
        for left in base.parent.glob(f"{base.name}-*_temp"):
            shutil.rmtree(left)


class WithoutSaveGraphDef(OldHook):
    """D16: seven arguments, as it had them."""

    def __init__(
        self,
        checkpoint_dir: str,
        save_secs: float | None = None,
        save_steps: int | None = None,
        saver: Any = None,
        checkpoint_basename: str = "model.ckpt",
        scaffold: Any = None,
        listeners: Any = None,
    ) -> None:
        super().__init__(checkpoint_dir, save_secs, save_steps, saver, checkpoint_basename, scaffold, listeners)


def sync(path: Path) -> None:
    """fsync of a file or a folder."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
