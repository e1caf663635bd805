"""What the tests of the TensorFlow manager save: objects of each kind, how training changes them, and what is on disk.

Import this only after ``pytest.importorskip("tensorflow")``.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from midstride.tensorflow import object_snapshot
from tests.frameworks.tensorflow.training import WATCHDOG_SECONDS


def ours(*arguments: Any, **options: Any) -> Any:
    """Our manager. Skips the test where the TensorFlow room is not installed."""
    room = pytest.importorskip("midstride.tensorflow")
    return room.CheckpointManager(*arguments, **options)


# What is saved


@dataclass(frozen=True)
class Kind:
    """``make`` gives the objects of a checkpoint by name, ``train`` changes all of them in place."""

    name: str
    make: Callable[[], dict[str, Any]]
    train: Callable[[dict[str, Any]], None]


def _make_variables() -> dict[str, Any]:
    return {
        "matrix": tf.Variable(tf.reshape(tf.range(12.0), [3, 4])),
        "halves": tf.Variable([1.0, 2.0], dtype=tf.bfloat16),
        "words": tf.Variable(["a", "bc"]),
        "flags": tf.Variable([True, False]),
        "counts": [tf.Variable(1), {"deep": tf.Variable([1, 2], dtype=tf.int8)}],
        "growing": tf.Variable([1.0], shape=[None]),
        "complex": tf.Variable(1.0 + 2.0j),
    }


def _train_variables(objects: dict[str, Any]) -> None:
    objects["matrix"].scatter_nd_update([[0, 0]], [99.0])
    objects["matrix"].assign_add(tf.ones([3, 4]))
    objects["halves"].assign_sub(tf.ones([2], tf.bfloat16))
    objects["words"].assign(["longer than it was", "b"])
    objects["flags"][0].assign(False)
    objects["counts"][0].assign(7)
    objects["counts"][1]["deep"].assign_add(tf.ones([2], tf.int8))
    objects["growing"].assign([3.0, 4.0, 5.0])
    objects["complex"].assign(0.0)


class _Nested(tf.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = [tf.Variable(tf.ones([2, 2])), tf.Variable(0.5)]

    @tf.function
    def train(self) -> None:
        for variable in self.inner:
            variable.assign_add(tf.ones_like(variable))


def _make_keras() -> dict[str, Any]:
    keras = tf.keras
    keras.utils.set_random_seed(7)
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(4, activation="relu"), keras.layers.Dense(1)])
    model.compile(optimizer=keras.optimizers.Adam(0.1), loss="mse")
    _train_keras({"model": model})
    return {"model": model, "optimizer": model.optimizer}


def _train_keras(objects: dict[str, Any]) -> None:
    objects["model"].train_on_batch(np.ones((8, 3), np.float32), np.ones((8, 1), np.float32))


def _make_tables() -> dict[str, Any]:
    words = tf.lookup.experimental.MutableHashTable(tf.string, tf.int64, -1)
    numbers = tf.lookup.experimental.DenseHashTable(tf.int64, tf.int64, -1, -1, -2)
    words.insert(["a"], tf.constant([1], tf.int64))  # more would be exported in any order
    numbers.insert(tf.constant([5, 6], tf.int64), tf.constant([7, 8], tf.int64))
    return {"words": words, "numbers": numbers}


def _train_tables(objects: dict[str, Any]) -> None:
    objects["words"].insert(["a", "c"], tf.constant([9, 3], tf.int64))
    objects["numbers"].insert(tf.constant([5], tf.int64), tf.constant([0], tf.int64))


def _make_iterators() -> dict[str, Any]:
    made = {
        "plain": iter(tf.data.Dataset.range(20).batch(2)),
        "shuffled": iter(tf.data.Dataset.range(20).shuffle(5, seed=3)),
    }
    _train_iterators(made)
    return made


def _train_iterators(objects: dict[str, Any]) -> None:
    for iterator in objects.values():
        next(iterator)


class _Python(tf.train.experimental.PythonState):
    def __init__(self) -> None:
        self.value = "before"

    def serialize(self) -> str:
        return self.value

    def deserialize(self, string_value: str) -> None:
        self.value = tf.compat.as_str(string_value)


KINDS = [
    Kind("variables", _make_variables, _train_variables),
    Kind("module", lambda: {"module": _Nested()}, lambda objects: objects["module"].train()),
    Kind("keras", _make_keras, _train_keras),
    Kind("tables", _make_tables, _train_tables),
    Kind("iterators", _make_iterators, _train_iterators),
    Kind(
        "generator",
        lambda: {"generator": tf.random.Generator.from_seed(5)},
        lambda objects: objects["generator"].normal([3]),
    ),
    Kind("python", lambda: {"python": _Python()}, lambda objects: setattr(objects["python"], "value", "after")),
]
KIND = {kind.name: kind for kind in KINDS}


def numbered(value: float = 0.0, floats: int = 50) -> tuple[tf.train.Checkpoint, list[tf.Variable]]:
    """A checkpoint of three variables, all elements of which are ``value``."""
    variables = [tf.Variable(tf.fill([floats], value)) for _ in range(3)]
    return tf.train.Checkpoint(variables=variables), variables


def fill(variables: list[tf.Variable], value: float) -> None:
    for variable in variables:
        variable.assign(tf.fill(variable.shape, value))


# What is on disk


def content(folder: Path) -> dict[str, bytes]:
    """The bytes of all files, by name; without the digests, which TensorFlow's manager does not write."""
    files = [file for file in sorted(folder.rglob("*")) if file.is_file() and not file.name.endswith(".midstride.json")]
    return {str(file.relative_to(folder)): file.read_bytes() for file in files}


def tensors(path: str | Path) -> dict[str, Any]:
    """The values in a checkpoint, as lists; without the object graph, and without those that only TensorFlow can hold."""
    reader = tf.train.load_checkpoint(str(path))
    dtypes = reader.get_variable_to_dtype_map()
    names = [name for name, dtype in dtypes.items() if dtype != tf.variant and not name.startswith("_CHECKPOINTABLE")]
    return {name: np.asarray(reader.get_tensor(name)).tolist() for name in names}


def values(path: str | Path) -> set[float]:
    """All distinct elements of the variables of ``numbered``."""
    return {value for name, all in tensors(path).items() if name.startswith("variables/") for value in all}


# Writes that a test controls


class Gate:
    """Holds the next write until ``go``; those after it are free."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._held, self._go = threading.Event(), threading.Event()
        write = object_snapshot.ObjectSnapshot.write

        def gated(snapshot: Any, *arguments: Any) -> None:
            if not self._held.is_set():
                self._held.set()
                assert self._go.wait(WATCHDOG_SECONDS), "the test never let this write go"
            write(snapshot, *arguments)

        monkeypatch.setattr(object_snapshot.ObjectSnapshot, "write", gated)

    def wait_until_held(self) -> None:
        assert self._held.wait(WATCHDOG_SECONDS), "nothing is being written"

    def open(self) -> None:
        self._go.set()


def failing(monkeypatch: pytest.MonkeyPatch, *errors: BaseException) -> None:
    """The next writes fail with these, once part of the bytes is on disk."""
    left = list(errors)
    write = object_snapshot.ObjectSnapshot.write

    def fail(snapshot: Any, path: str, options: Any) -> None:
        if left:
            temporary = Path(f"{path}_temp")
            temporary.mkdir(exist_ok=True)
            Path(temporary, "part-00000-of-00001.data-00000-of-00001").write_bytes(b"x" * 1000)
            raise left.pop(0)
        write(snapshot, path, options)

    monkeypatch.setattr(object_snapshot.ObjectSnapshot, "write", fail)
