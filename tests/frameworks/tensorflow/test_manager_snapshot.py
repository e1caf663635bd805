"""What ``CheckpointManager`` writes is the state of the moment of ``save()``, whatever training does meanwhile."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("tensorflow")
pytest.importorskip("midstride.tensorflow")

import tensorflow as tf

from midstride.tensorflow import object_snapshot
from midstride.tensorflow.object_snapshot import ObjectSnapshot
from tests.frameworks.tensorflow import children
from tests.frameworks.tensorflow.objects import (
    KIND,
    KINDS,
    Gate,
    Kind,
    content,
    numbered,
    ours,
)

of_each_kind = pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)


def lazy(monkeypatch: pytest.MonkeyPatch) -> None:
    """Broken: what TensorFlow gathers is not resolved before the write."""
    monkeypatch.setattr(object_snapshot, "_resolve", lambda key, part, item, shared: item)


def not_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    """Broken: what is no variable is not copied."""
    monkeypatch.setattr(object_snapshot, "_copy", lambda tensor: tensor)


def as_they_are(monkeypatch: pytest.MonkeyPatch) -> None: ...


def save_while_training(kind: Kind, base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    objects = kind.make()
    checkpoint = tf.train.Checkpoint(**objects)
    checkpoint.save_counter.assign(1)
    checkpoint.write(str(base / "then" / "ckpt-1"))
    checkpoint.save_counter.assign(0)
    gate = Gate(monkeypatch)
    with ours(checkpoint, str(base / "ours"), 3) as manager:
        manager.save()
        gate.wait_until_held()
        for _ in range(3):
            kind.train(objects)
        checkpoint.late = tf.Variable("made after the save")
        checkpoint.save_counter.assign(55)
        gate.open()
    now = content(base / "ours")
    del now["checkpoint"]
    assert now == content(base / "then")
    with ours(checkpoint, str(base / "later"), 3) as manager:
        manager.save()
    assert content(base / "later")["ckpt-56.index"] != now["ckpt-1.index"], "or training changed nothing"


@of_each_kind
def test_it_is_of_the_moment_of_the_call(kind: Kind, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_while_training(kind, tmp_path, monkeypatch)


@pytest.mark.parametrize(
    "kind, broken",
    [("variables", lazy), ("module", lazy), ("keras", lazy), ("generator", lazy), ("tables", not_copied)],
    ids=lambda value: getattr(value, "__name__", value),
)
def test_a_broken_snapshot_is_noticed(
    kind: str, broken: Callable[[pytest.MonkeyPatch], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    broken(monkeypatch)
    with pytest.raises(AssertionError):
        save_while_training(KIND[kind], tmp_path, monkeypatch)


@tf.function
def _in_a_graph(variable: Any) -> None:
    variable.assign_add(tf.ones_like(variable))
    variable.scatter_nd_update([[0]], [9.0])


@tf.function(jit_compile=True)
def _compiled(variable: Any) -> None:
    variable.assign_add(tf.ones_like(variable))


def _slot(variable: Any) -> Any:
    return tf.Variable(tf.ones_like(variable))


UPDATES: dict[str, Callable[[Any], Any]] = {
    "assign": lambda v: v.assign(tf.zeros_like(v)),
    "assign_add": lambda v: v.assign_add(tf.ones_like(v)),
    "scattered": lambda v: v.scatter_nd_update([[0], [3]], [9.0, 8.0]),
    "sparse": lambda v: v.scatter_add(tf.IndexedSlices(tf.constant([5.0]), tf.constant([1]))),
    "sliced": lambda v: v[0:2].assign([7.0, 7.0]),
    "dense optimizer": lambda v: tf.raw_ops.ResourceApplyMomentum(
        var=v.handle, accum=_slot(v).handle, lr=0.1, grad=tf.ones_like(v), momentum=0.9
    ),
    "sparse optimizer": lambda v: tf.raw_ops.ResourceSparseApplyAdagrad(
        var=v.handle, accum=_slot(v).handle, lr=0.1, grad=tf.constant([1.0]), indices=tf.constant([0])
    ),
    "in a graph": _in_a_graph,
    "compiled": _compiled,
}


def address(tensor: Any) -> int:
    return int(np.frombuffer(memoryview(tensor), np.uint8).ctypes.data)


def held(snapshot: ObjectSnapshot, key: str) -> Any:
    """The tensor that a snapshot has under a key."""
    [spec] = [items[key][""] for items in snapshot._gathered.values() if key in items]
    return spec.tensor


@pytest.mark.parametrize("update", UPDATES.values(), ids=UPDATES)
@pytest.mark.parametrize("before", [0, 2], ids=["fresh", "updated before"])
def test_no_update_writes_into_a_held_buffer(update: Callable[[Any], Any], before: int) -> None:
    variable = tf.Variable(tf.random.uniform([5000], seed=1))
    for _ in range(before):
        update(variable)
    expected = variable.numpy().copy()
    snapshot = ObjectSnapshot(tf.train.Checkpoint(variable=variable))
    tensor = held(snapshot, "variable/.ATTRIBUTES/VARIABLE_VALUE")
    assert address(tensor) == address(tf.raw_ops.ReadVariableOp(resource=variable.handle, dtype=tf.float32))
    for _ in range(3):
        update(variable)
    variable.assign_sub(tf.ones([5000]))
    assert np.array_equal(tensor.numpy(), expected)


@pytest.mark.parametrize(
    "make",
    [
        lambda: tf.constant([1.0, 2.0]),
        lambda: tf.constant(["a", "b"]),
        lambda: tf.constant([1, 2], tf.bfloat16),
        lambda: tf.constant(True),
        lambda: tf.cast([1.0, 2.0], tf.dtypes.experimental.float8_e5m2),
        lambda: tf.bitcast(tf.constant([1, 2], tf.uint8), tf.qint8),
    ],
    ids=["float32", "string", "bfloat16", "bool", "float8", "qint8"],
)
def test_what_is_no_variable_is_copied(make: Callable[[], Any]) -> None:
    value = make()

    class Holder(tf.__internal__.tracking.Trackable):
        def _serialize_to_tensors(self) -> dict[str, Any]:
            return {"value": value}

        def _restore_from_tensors(self, restored: Any) -> None: ...

    copy = held(ObjectSnapshot(tf.train.Checkpoint(holder=Holder())), "holder/.ATTRIBUTES/value")
    assert copy.dtype == value.dtype and np.array_equal(copy.numpy(), value.numpy())
    if value.dtype.name == "float32":
        assert address(copy) != address(value)


def test_its_buffers_go_with_the_save(tmp_path: Path) -> None:
    checkpoint, _ = numbered()
    with ours(checkpoint, str(tmp_path), 3) as manager:
        snapshots = []
        original = ObjectSnapshot.write
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(ObjectSnapshot, "write", lambda self, *rest: (snapshots.append(self), original(self, *rest)))
            manager.save()
            manager.sync()
    assert snapshots[0]._gathered is None
    with pytest.raises(RuntimeError, match="dropped"):
        snapshots[0].write(str(tmp_path / "x"))


def test_keras_model_is_saved_again_and_again(tmp_path: Path) -> None:
    """TensorFlow's own ``enable_async`` raises at the second save of a Keras 3 model. Ours does not care for it."""
    objects = KIND["keras"].make()
    options = tf.train.CheckpointOptions(enable_async=True)
    expected = []
    with ours(tf.train.Checkpoint(**objects), str(tmp_path), None) as manager:
        for _ in range(4):
            KIND["keras"].train(objects)
            expected.append([weight.tolist() for weight in objects["model"].get_weights()])
            manager.save(options=options)
    for path, weights in zip(manager.checkpoints, expected, strict=True):
        fresh = KIND["keras"].make()
        tf.train.Checkpoint(**fresh).restore(path).assert_consumed()
        assert [weight.tolist() for weight in fresh["model"].get_weights()] == weights


def _mirrored(base: str) -> None:
    cpus = tf.config.list_physical_devices("CPU")
    tf.config.set_logical_device_configuration(cpus[0], [tf.config.LogicalDeviceConfiguration()] * 2)
    strategy = tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"])
    with strategy.scope():
        written = tf.Variable([1.0, 2.0])
        summed = tf.Variable(
            0.0, synchronization=tf.VariableSynchronization.ON_READ, aggregation=tf.VariableAggregation.SUM
        )
        model = tf.keras.Sequential([tf.keras.Input((3,)), tf.keras.layers.Dense(1)])
        model.compile(optimizer="adam", loss="mse")

    @tf.function
    def step() -> None:
        def update() -> None:
            replica = tf.distribute.get_replica_context()
            total = replica.all_reduce("sum", tf.ones([2]))
            written.assign_add(total)
            summed.assign_add(1.0)

        strategy.run(update)

    def train(_: Any) -> None:
        step()
        model.fit(np.ones((4, 3), np.float32), np.ones((4, 1), np.float32), verbose=0)

    def make() -> dict[str, Any]:
        train(None)
        return {"written": written, "summed": summed, "model": model, "optimizer": model.optimizer}

    patch = pytest.MonkeyPatch()
    save_while_training(Kind("mirrored", make, train), Path(base), patch)
    checkpoint = tf.train.Checkpoint(**make())
    checkpoint.restore(os.path.join(base, "ours", "ckpt-1")).assert_consumed()
    assert written.numpy().tolist() == [3.0, 4.0] and float(summed.read_value()) == 2.0
    os._exit(0)


def test_mirrored_variables(tmp_path: Path) -> None:
    child = children.run(_mirrored, tmp_path)
    assert child.wait() == 0, child.output


class _FilesOfItsOwn(tf.Module):
    def __init__(self) -> None:
        super().__init__()
        self.value = 1.0


def test_objects_that_write_their_own_files_are_written_before_training_goes_on(tmp_path: Path) -> None:
    from tensorflow.python.saved_model import registration

    def save(trackables: dict[str, Any], file_prefix: Any) -> list[Any]:
        for one in trackables.values():
            Path(file_prefix.numpy().decode()).write_text(str(one.value))
        return []

    with contextlib.suppress(ValueError):  # registered by an earlier run of this test
        registration.register_checkpoint_saver(
            "Midstride",
            "FilesOfItsOwn",
            predicate=lambda one: isinstance(one, _FilesOfItsOwn),
            save_fn=save,
            restore_fn=lambda trackables, merged_prefix: None,
        )
    module = _FilesOfItsOwn()
    with ours(tf.train.Checkpoint(module=module), str(tmp_path), 3) as manager:
        path = manager.save()
        assert manager.latest_checkpoint == path
        assert manager.statistics().snapshot == "blocking"
        [own] = tmp_path.glob("ckpt-1-*FilesOfItsOwn")
        assert own.read_text() == "1.0"


# What TensorFlow does not promise


def test_private_names_of_tensorflow_are_what_the_snapshot_takes_them_for() -> None:
    from tensorflow.python.checkpoint.functional_saver import MultiDeviceSaver
    from tensorflow.python.eager import context
    from tensorflow.python.training.saving.saveable_object import SaveSpec

    variable = tf.Variable(1.0)
    checkpoint = tf.train.Checkpoint(variable=variable)
    gathered, feeds, registered, graph = checkpoint._saver._gather_serialized_tensors()
    assert feeds is None, "in eager mode"
    assert not registered
    assert {child.local_name for child in graph.nodes[0].children} == {"variable"}
    [item] = gathered[variable].values()
    assert isinstance(item, SaveSpec) and callable(item._tensor), "a variable is read when it is written"
    assert (item.name, item.slice_spec) == (next(iter(gathered[variable])), "")
    assert tf.DeviceSpec.from_string(item.device).device_type == "CPU" and item.dtype == tf.float32
    assert SaveSpec(lambda: None, "", "name", tf.float32, item.device).tensor is None, "no value: nothing is saved"
    assert MultiDeviceSaver(gathered, registered).save
    assert list(gathered[None]) == ["_CHECKPOINTABLE_OBJECT_GRAPH"]
    assert tf.__internal__.ops.is_resource_variable(variable)
    assert not tf.__internal__.ops.is_resource_variable(KIND["tables"].make()["numbers"])
    with tf.Graph().as_default(), context.eager_mode():
        assert tf.executing_eagerly()
    context.async_wait()
