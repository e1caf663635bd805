"""One training loop under ``MonitoredTrainingSession`` with one way of saving, measured, in a process of its own.

``bench_tensorflow.py`` starts it. Its argument is a ``Task`` as JSON; the last line that it prints is what it measured.

The model is a stack of dense layers with Adam, all resource variables. Two elements of each variable have a gradient
that is always 1, so that their values tell, in every variable and both slots of it, after how many steps they were
read: a checkpoint is torn if two of them tell different steps, and mislabelled if they tell another than its name.
"""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from tests.frameworks.tensorflow.old_hook import OldHook, imitate  # noqa: E402

from midstride.tensorflow import AsyncCheckpointSaverHook  # noqa: E402
from midstride.tensorflow.snapshot import Snapshot  # noqa: E402

v1 = tf.compat.v1

RATE, BETA1, BETA2, EPSILON = 1e-3, 0.9, 0.999, 1e-8
OLD_DEFECTS = ("D3", "D4", "D5", "D6", "D7", "D8", "D9", "D10", "D11", "D12", "D13", "D14", "D15", "D17", "D18", "D19")
"""All but those with which it would write nothing (D1), an empty graph (D2), or refuse an argument (D16)."""


@dataclass(frozen=True)
class Task:
    """What to run. ``layers`` of ``width`` squared; a save is due at every ``every``-th step."""

    way: str
    folder: str
    width: int
    layers: int
    batch: int
    warm_steps: int
    steps: int
    every: int
    settle_each_step: bool
    """For counts that are the same in every run: wait for the save before the next step."""


@dataclass
class Measured:
    """Of the steps after the warm ones. Times in seconds; those of saves are of each save that was begun and ended."""

    way: str
    synced: bool
    state_bytes: int = 0
    step_seconds: list[float] = field(default_factory=list)
    trigger_seconds: list[float] = field(default_factory=list)
    stall_seconds: list[float] = field(default_factory=list)
    durable_seconds: list[float] = field(default_factory=list)
    loop_seconds: float = 0.0
    last_wait_seconds: float = 0.0
    cpu_seconds: float = 0.0
    """Of the loop and the wait for the last save, all threads; the bare writer's process too."""
    saves: int = 0
    skipped: int = 0
    snapshot: str = ""
    good: int = 0
    torn: int = 0
    mislabelled: int = 0
    checkpoint_bytes: int = 0
    """Of the smallest data file."""
    window: tuple[float, float] = (0.0, 0.0)
    """When the measured steps began, and when the last save had ended; by ``perf_counter``."""


# The model.


def build(task: Task) -> Any:
    """Return the train op, in the default graph."""
    with v1.variable_scope("", use_resource=True):
        step = v1.train.get_or_create_global_step()
        value = tf.constant(np.random.default_rng(0).standard_normal((task.batch, task.width), np.float32))
        for number in range(task.layers):
            weight = v1.get_variable(f"dense{number}/kernel", initializer=_initial((task.width, task.width)))
            bias = v1.get_variable(f"dense{number}/bias", initializer=_initial((task.width,)))
            value = tf.nn.tanh(value @ weight + bias)
        loss = tf.reduce_mean(tf.square(value - 0.5))
        optimizer = v1.train.AdamOptimizer(RATE, BETA1, BETA2, EPSILON)
        pairs = [(_marked(gradient, 1.0), variable) for gradient, variable in optimizer.compute_gradients(loss)]
        return optimizer.apply_gradients(pairs, global_step=step)


def _initial(shape: tuple[int, ...]) -> Callable[[], Any]:
    deviation = 1.0 / shape[0] ** 0.5
    return lambda: _marked(tf.random.stateless_normal(shape, seed=(1, len(shape)), stddev=deviation), 0.0)


def _marked(tensor: Any, value: float) -> Any:
    """With ``value`` as its first and its last element."""
    shape = tensor.shape.as_list()
    places = [[0] * len(shape), [length - 1 for length in shape]]
    return tf.tensor_scatter_nd_update(tensor, places, [value, value])


def marks(steps: int) -> dict[str, np.ndarray]:
    """What a marked element of a parameter, of its slots, and what Adam's powers are after 0 to ``steps`` steps."""
    found = {name: np.zeros(steps + 1, np.float64) for name in ("parameter", "Adam", "Adam_1", "beta1", "beta2")}
    found["beta1"][:], found["beta2"][:] = BETA1 ** np.arange(1, steps + 2), BETA2 ** np.arange(1, steps + 2)
    parameter = first = second = 0.0
    for number in range(1, steps + 1):
        rate = RATE * (1 - BETA2**number) ** 0.5 / (1 - BETA1**number)
        first += (1 - first) * (1 - BETA1)
        second += (1 - second) * (1 - BETA2)
        parameter -= rate * first / (second**0.5 + EPSILON)
        found["parameter"][number], found["Adam"][number], found["Adam_1"][number] = parameter, first, second
    return found


def steps_told_by(path: str, most: int) -> set[int]:
    """All steps that the values of a checkpoint belong to: one, if it is of one moment."""
    expected, told = marks(most), set()
    reader = tf.train.load_checkpoint(path)
    for name in reader.get_variable_to_shape_map():
        value = reader.get_tensor(name)
        if name == "global_step":
            told.add(int(value))
            continue
        kind = next((k for k in ("beta1", "beta2") if name.startswith(k)), name.rpartition("/")[2])
        table = expected.get(kind, expected["parameter"])
        for element in (value.flat[0], value.flat[-1]):
            told.add(int(np.argmin(np.abs(table - element))))
    return told


# The ways of saving.


class BareWriter(v1.train.SessionRunHook):
    """Tells another process to write as many bytes as the state has, at the steps at which the hooks save."""

    def __init__(self, task: Task, nbytes: int) -> None:
        command = [sys.executable, str(Path(__file__).parent / "bare_writer.py"), task.folder, str(nbytes)]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self._every = task.every
        self._answers = threading.Thread(target=self._hear, daemon=True)
        self._changed = threading.Condition()
        self._running = True  # until it says that it is ready
        self._last = self._step = 0
        self.finished: list[float] = []
        self.skipped = 0
        self.cpu_seconds = 0.0
        self._answers.start()

    def _hear(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            with self._changed:
                self.finished.append(0.0 if line == "ready\n" else float(line))
                self._running = False
                self._changed.notify_all()

    def after_run(self, run_context: Any, run_values: Any) -> None:
        self._step += 1
        if self._step < self._last + self._every:
            return
        with self._changed:
            if not self._changed.wait_for(lambda: not self._running, 0.1):
                self.skipped += 1
                return
        self._save(run_context.session, self._step)

    def _save(self, session: Any, step: int) -> None:
        assert self._process.stdin is not None
        self._last, self._running = step, True
        self._process.stdin.write("write\n")
        self._process.stdin.flush()

    def wait(self) -> None:
        with self._changed:
            self._changed.wait_for(lambda: not self._running)

    def end(self, session: Any) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._answers.join()
        self._process.wait()
        self.cpu_seconds = self.finished.pop()


def make_hook(task: Task, scaffold: Any, nbytes: int, listener: Any) -> Any:
    """The hook of the task's way; None without checkpoints."""
    if task.way == "bare writer":
        return BareWriter(task, nbytes)
    kinds: dict[str, Callable[..., Any]] = {
        "plain hook": v1.train.CheckpointSaverHook,
        "old hook": imitate(*OLD_DEFECTS),
        "ours": AsyncCheckpointSaverHook,
        "ours, copy": lambda *a, **o: AsyncCheckpointSaverHook(*a, **o, snapshot="copy"),
        "ours, held": AsyncCheckpointSaverHook,
    }
    if task.way == "ours, held":
        Snapshot.settle = lambda snapshot: None  # type: ignore[method-assign]
    make = kinds.get(task.way)
    return make and make(task.folder, save_steps=task.every, scaffold=scaffold, listeners=[listener])


class Watch(v1.train.CheckpointSaverListener):
    """Notes, of any of the hooks, when a save was triggered and how long that took, and when it was done."""

    def __init__(self) -> None:
        self.triggered: dict[int, float] = {}
        self.calls: dict[int, float] = {}
        """Seconds in the method that takes the snapshot; the plain hook writes there too."""
        self.stalls: dict[int, float] = {}
        """Seconds that the hook held that step up; with the wait for the save before it."""
        self.done: dict[int, float] = {}
        self._refused = 0

    def after_save(self, session: Any, global_step_value: Any) -> None:
        self.done[int(global_step_value)] = time.perf_counter()

    def follow(self, hook: Any) -> None:
        """From now on."""
        save, after_run = hook._save, hook.after_run
        steps: list[int] = []

        def timed_save(session: Any, step: int, *rest: Any, **options: Any) -> Any:
            began = time.perf_counter()
            answer = save(session, step, *rest, **options)
            # What the imitation of the old hook returns is whether it began; the others call this only when they do.
            if isinstance(hook, OldHook) and not answer:
                self._refused += 1
            else:
                self.calls[int(step)] = time.perf_counter() - began
                steps.append(int(step))
            return answer

        def timed_after_run(run_context: Any, run_values: Any) -> None:
            began = time.perf_counter()
            after_run(run_context, run_values)
            while steps:
                step = steps.pop()
                self.triggered[step], self.stalls[step] = began, time.perf_counter() - began

        hook._save, hook.after_run = timed_save, timed_after_run

    def skipped(self, hook: Any) -> int:
        """Steps at which a save was due and not begun, so far."""
        if isinstance(hook, BareWriter):
            return hook.skipped
        return self._refused + (hook.statistics().saves_skipped if isinstance(hook, AsyncCheckpointSaverHook) else 0)


# The loop.


def measure(task: Task) -> Measured:
    """Train, save, and read the checkpoints back."""
    measured = Measured(task.way, synced=task.way.startswith(("bare", "ours")))
    watch = Watch()
    with tf.Graph().as_default():
        train_op = build(task)
        variables = v1.global_variables()
        measured.state_bytes = sum(v.shape.num_elements() * v.dtype.size for v in variables)
        # All are kept, so that all can be read back.
        scaffold = v1.train.Scaffold(saver=v1.train.Saver(max_to_keep=0))
        hook = make_hook(task, scaffold, measured.state_bytes, watch)
        wait = getattr(hook, "wait", lambda: None)
        if hook is not None:
            watch.follow(hook)
        with v1.train.MonitoredTrainingSession(
            checkpoint_dir=task.folder, scaffold=scaffold, hooks=[hook] if hook else [], log_step_count_steps=None,
            save_checkpoint_secs=None, save_checkpoint_steps=None, save_summaries_secs=None, save_summaries_steps=None,
        ) as session:  # fmt: skip
            for _ in range(task.warm_steps):
                session.run(train_op)
                if task.settle_each_step:
                    wait()
            wait()
            run_loop(task, measured, session, train_op, wait, lambda: watch.skipped(hook) if hook else 0)
    take_saves(task, measured, watch, hook)
    read_back(task, measured)
    return measured


def run_loop(
    task: Task, measured: Measured, session: Any, train_op: Any, wait: Callable[[], None], skipped: Callable[[], int]
) -> None:
    print("measuring", flush=True)  # from here on the parent looks at our memory
    skipped_before, cpu_before, began = skipped(), time.process_time(), time.perf_counter()
    for _ in range(task.steps):
        step_began = time.perf_counter()
        session.run(train_op)
        if task.settle_each_step:
            wait()
        measured.step_seconds.append(time.perf_counter() - step_began)
    trained = time.perf_counter()
    measured.loop_seconds = trained - began
    wait()
    ended = time.perf_counter()
    measured.last_wait_seconds = ended - trained
    measured.cpu_seconds = time.process_time() - cpu_before
    measured.skipped = skipped() - skipped_before
    measured.window = (began, ended)
    print("measured", flush=True)


def take_saves(task: Task, measured: Measured, watch: Watch, hook: Any) -> None:
    """The saves that were triggered within the window, and ended in it, since it was waited for them."""
    began, ended = measured.window
    if isinstance(hook, BareWriter):
        steps = sorted(watch.triggered)
        watch.done = dict(zip(steps, hook.finished[1:], strict=True))
        measured.cpu_seconds += hook.cpu_seconds * sum(began <= watch.triggered[s] for s in steps) / max(1, len(steps))
    if isinstance(hook, AsyncCheckpointSaverHook):
        measured.snapshot = hook.statistics().snapshot
    for step, triggered in watch.triggered.items():
        if began <= triggered <= ended:
            measured.trigger_seconds.append(watch.calls[step])
            measured.stall_seconds.append(watch.stalls[step])
            if step in watch.done:
                measured.saves += 1
                measured.durable_seconds.append(watch.done[step] - triggered)


def read_back(task: Task, measured: Measured) -> None:
    """Every checkpoint of the run, the first and the last, which lie outside the window, too."""
    sizes = []
    for index in sorted(Path(task.folder).glob("model.ckpt-*.index")):
        path, named = str(index.with_suffix("")), int(index.stem.rpartition("-")[2])
        told = steps_told_by(path, task.warm_steps + task.steps + 1)
        measured.good += told == {named}
        measured.torn += len(told) > 1
        measured.mislabelled += len(told) == 1 and told != {named}
        sizes.append(sum(file.stat().st_size for file in index.parent.glob(f"{index.stem}.data-*")))
    measured.checkpoint_bytes = min(sizes, default=0)


def main() -> None:
    task = Task(**json.loads(sys.argv[1]))
    print(json.dumps(asdict(measure(task)) | {"tensorflow": tf.__version__}), flush=True)


if __name__ == "__main__":
    main()
