"""Keras 3 in a state of the ``Checkpointer``: models, optimizers, metrics, seed generators and variables.

For each way in which the matching could be wrong there is one that is, and the same check notices it.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import midstride as ms
from midstride.storage import MemoryStorage

tf = pytest.importorskip("tensorflow")
keras = pytest.importorskip("keras", minversion="3.0")

from midstride.keras import optimizers as keras_optimizers  # noqa: E402

ROOT = Path(__file__).parents[3]
WATCHDOG_SECONDS = 100.0


@pytest.fixture(autouse=True)
def _numbers_start_anew() -> Iterator[None]:
    """As in a new process, so that the names here are those of a script."""
    keras.utils.clear_session()
    yield
    keras.config.set_dtype_policy("float32")


def network(width: int = 4, names: tuple[str, str] = ("first", "second")) -> Any:
    inputs = keras.Input((3,))
    hidden = keras.layers.Dense(width, activation="relu", name=names[0])(inputs)
    hidden = keras.layers.BatchNormalization(name="norm")(hidden)
    hidden = keras.layers.Dropout(0.5, name="drop")(hidden)
    return keras.Model(inputs, keras.layers.Dense(2, name=names[1])(hidden))


def automatic() -> Any:
    return keras.Sequential(
        [keras.Input((3,)), keras.layers.Dense(4), keras.layers.Dropout(0.5), keras.layers.Dense(2)]
    )


def train(model: Any, optimizer: Any, steps: int = 3) -> list[float]:
    losses = []
    for step in range(steps):
        inputs = np.random.default_rng(step).standard_normal((8, 3)).astype(np.float32)
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(model(inputs, training=True) ** 2)
        optimizer.apply(tape.gradient(loss, model.trainable_variables), model.trainable_variables)
        losses.append(float(loss))
    return losses


def trained(optimizer: Any = None, model: Any = None) -> tuple[Any, Any]:
    model, optimizer = model or network(), optimizer or keras.optimizers.Adam(0.01)
    train(model, optimizer)
    return model, optimizer


def values(*holders: Any) -> list[bytes]:
    return [np.asarray(v.numpy()).tobytes() for holder in holders for v in holder.variables]


def by_path(model: Any) -> dict[str, bytes]:
    return dict(zip([v.path for v in model.variables], values(model), strict=True))


def saved(state: Any) -> MemoryStorage:
    storage = MemoryStorage()
    with ms.Checkpointer(storage) as ckpt:
        ckpt.save(1, state)
    return storage


def restore(storage: MemoryStorage, state: Any, **options: Any) -> ms.Restored:
    restored = ms.Checkpointer(storage).restore(state, **options)
    assert restored is not None
    return restored


def load_file(path: Path) -> dict[str, np.ndarray]:
    """With the library that the format comes from."""
    arrays: dict[str, np.ndarray] = pytest.importorskip("safetensors.numpy").load_file(path)
    return arrays


def script(source: str, *arguments: object, **env: str) -> str:
    search = os.pathsep.join([str(ROOT), str(ROOT / "src")])
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(source), *map(str, arguments)],
        env={**os.environ, "TF_CPP_MIN_LOG_LEVEL": "2", "PYTHONPATH": search, **env},
        capture_output=True,
        text=True,
        timeout=WATCHDOG_SECONDS,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout.strip().splitlines()[-1] if done.stdout.strip() else ""


# A whole run.


def test_a_run_goes_on_in_a_new_process_as_if_it_had_never_ended(tmp_path: Path) -> None:
    """Dense, BatchNormalization, Dropout and noise, five optimizers, Keras's own training and a loop by hand: every
    variable bit by bit, each loss and each metric, over four steps."""
    run = "from tests.frameworks.tensorflow.keras_training import main; import sys; main(*sys.argv[1:])"
    uninterrupted = json.loads(script(run, tmp_path, "save"))
    resumed = json.loads(script(run, tmp_path, "restore"))
    assert len(uninterrupted) == 7
    for name, steps in uninterrupted.items():
        assert resumed[name] == steps, name
        assert len({step[2] for step in steps}) == 4, "nothing was trained"


def test_other_tools_read_a_model_by_its_names(tmp_path: Path) -> None:
    model, optimizer = trained(model=automatic())
    with ms.Checkpointer(tmp_path) as ckpt:
        name = ckpt.save(3, {"model": model, "optimizer": optimizer}).result(60).name
    arrays = load_file(tmp_path / name / "model.safetensors")
    assert sorted(arrays) == [
        "seed_generator/seed_generator_state", "sequential/dense/bias", "sequential/dense/kernel",
        "sequential/dense_1/bias", "sequential/dense_1/kernel",
    ]  # fmt: skip
    assert {path: array.tobytes() for path, array in arrays.items()} == by_path(model)
    assert sorted(load_file(tmp_path / name / "optimizer.safetensors")) == sorted(
        ["iteration", "learning_rate"]
        + [f"{v.path}/{slot}" for v in model.trainable_variables for slot in ("momentum", "velocity")]
    )
    plain = ms.open(tmp_path).load()
    assert np.array_equal(plain["model"]["sequential/dense/kernel"], model.layers[0].kernel.numpy())
    assert int(plain["optimizer"]["iteration"]) == 3


def test_a_save_in_the_middle_of_fit_is_of_its_step() -> None:
    model = network()
    model.compile(keras.optimizers.SGD(0.1, momentum=0.9), "mse")
    kept: dict[int, list[bytes]] = {}
    storage = MemoryStorage()

    class Save(keras.callbacks.Callback):
        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            step = int(model.optimizer.iterations.numpy())
            kept[step] = values(model, model.optimizer)
            ckpt.save(step, {"model": model, "optimizer": model.optimizer})

    data = np.random.default_rng(0).standard_normal((32, 3)).astype(np.float32)
    with ms.Checkpointer(storage) as ckpt:
        model.fit(data, data[:, :2], batch_size=8, epochs=2, verbose=0, callbacks=[Save()])
    assert list(kept) == list(range(1, 9)) and len({tuple(v) for v in kept.values()}) == 8
    for step, wanted in kept.items():
        restore(storage, {"model": model, "optimizer": model.optimizer}, step=step)
        assert values(model, model.optimizer) == wanted


def test_everything_is_restored_where_it_is() -> None:
    model, optimizer = trained()
    metric, seeds, variable = keras.metrics.Mean(), keras.random.SeedGenerator(3), keras.Variable([1.0, 2.0])
    metric.update_state([1.0, 5.0])
    keras.random.normal((2,), seed=seeds)
    state = {"model": model, "optimizer": optimizer, "metrics": [metric], "seeds": seeds, "variable": variable}
    storage = saved(state)
    wanted = values(model, optimizer, metric), float(metric.result()), variable.numpy().tolist()
    handles = [v.value.handle for v in model.variables]
    draw = keras.random.normal((2,), seed=seeds).numpy().tolist()
    train(model, optimizer)
    metric.update_state([100.0])
    variable.assign([0.0, 0.0])
    restored = restore(storage, state)
    assert all(restored.state[key] is state[key] for key in ("model", "optimizer", "seeds", "variable"))
    assert restored.state["metrics"][0] is metric
    assert (values(model, optimizer, metric), float(metric.result()), variable.numpy().tolist()) == wanted
    assert all(v.value.handle is handle for v, handle in zip(model.variables, handles, strict=True))
    assert keras.random.normal((2,), seed=seeds).numpy().tolist() == draw


def test_no_later_step_shows() -> None:
    model, optimizer = trained()
    wanted = values(model, optimizer)
    with ms.Checkpointer(MemoryStorage()) as ckpt:
        ckpt.save(1, {"model": model, "optimizer": optimizer})
        train(model, optimizer)
        ckpt.wait()
        assert values(model, optimizer) != wanted
        ckpt.restore({"model": model, "optimizer": optimizer})
    assert values(model, optimizer) == wanted


def test_shared_layers_and_several_places_are_one(tmp_path: Path) -> None:
    shared = keras.layers.Dense(300, name="shared")
    inputs = keras.Input((300,))
    model = keras.Model(inputs, shared(shared(inputs)))
    part = keras.Model(inputs, shared(inputs))
    state = {"model": model, "part": part, "kernel": shared.kernel, "raw": [shared.kernel.value]}
    with ms.Checkpointer(tmp_path) as ckpt:
        name = ckpt.save(1, state).result(60).name
    assert sum(file.stat().st_size for file in (tmp_path / name).iterdir()) < 1.2 * 300 * 300 * 4
    wanted = values(model)
    shared.kernel.assign(np.zeros((300, 300)))
    ms.Checkpointer(tmp_path).restore(state)
    assert values(model) == wanted


def test_layers_of_one_name_are_told_apart_by_their_order() -> None:
    class Twice(keras.Model):
        def __init__(self) -> None:
            super().__init__(name="twice")
            self.one, self.two = keras.layers.Dense(3, name="same"), keras.layers.Dense(3, name="same")

        def call(self, x: Any) -> Any:
            return self.two(self.one(x))

    model, live = Twice(), Twice()
    for made in (model, live):
        made(np.ones((1, 3), np.float32))
    optimizer, other = keras.optimizers.SGD(0.1, momentum=0.9), keras.optimizers.SGD(0.1, momentum=0.9)
    train(model, optimizer)
    storage = saved({"model": model, "optimizer": optimizer})
    assert sorted(ms.open(storage).load()["model"]) == [
        "twice/same/bias", "twice/same/bias#2", "twice/same/kernel", "twice/same/kernel#2",
    ]  # fmt: skip
    # The optimizer knows them in another order: the model says which is which.
    other.build(live.trainable_variables[::-1])
    assert restore(storage, {"model": live, "optimizer": other}).warnings == ()
    assert values(live) == values(model)
    moments = dict(zip(map(id, live.trainable_variables[::-1]), other.momentums, strict=True))
    for mine, theirs in zip(live.trainable_variables, optimizer.momentums, strict=True):
        assert np.array_equal(moments[id(mine)].numpy(), theirs.numpy())


# Names.


def test_the_same_model_built_again_has_other_numbers_and_fits() -> None:
    model, optimizer = trained(model=automatic())
    storage = saved({"model": model, "optimizer": optimizer})
    live, other = automatic(), keras.optimizers.Adam(0.5)
    assert live.variables[0].path != model.variables[0].path
    restored = restore(storage, {"model": live, "optimizer": other})
    assert [warning.partition(":")[0] for warning in restored.warnings] == ["/model", "/optimizer"]
    assert "'sequential_1/dense_2/kernel' was filled from 'sequential/dense/kernel'" in restored.warnings[0]
    assert values(live, other) == values(model, optimizer)
    assert train(live, other) == train(model, optimizer)


def test_names_that_people_gave_are_never_taken_for_others() -> None:
    model = network(names=("block_1", "block_2"))
    storage = saved({"model": model})
    live = network(names=("block_2", "block_3"))
    before = values(live)
    with pytest.raises(ms.StateMismatch) as caught:
        restore(storage, {"model": live})
    assert "/model/block_3~1kernel: is not in the checkpoint (the checkpoint has block_1/kernel" in str(caught.value)
    assert "/model/block_1~1bias: is in the checkpoint, not in the state" in str(caught.value)
    assert values(live) == before
    live = network(names=("block_1", "fresh"))
    renamed = {f"/model/block_2~1{part}": f"/model/fresh~1{part}" for part in ("kernel", "bias")}
    assert restore(storage, {"model": live}, rename=renamed).warnings == ()
    assert values(live) == values(model)


def test_a_renamed_layer_takes_its_moments_along() -> None:
    model, optimizer = trained()
    storage = saved({"model": model, "optimizer": optimizer})
    live, other = network(names=("first", "fresh")), keras.optimizers.Adam(0.5)
    renamed = {f"/model/second~1{part}": f"/model/fresh~1{part}" for part in ("kernel", "bias")}
    restore(storage, {"model": live, "optimizer": other}, rename=renamed)
    assert values(live, other) == values(model, optimizer)


def test_all_that_does_not_fit_is_told_at_once_and_nothing_changes() -> None:
    model, optimizer = trained()
    storage = saved({"model": model, "optimizer": optimizer})
    keras.config.set_dtype_policy("float64")
    live, other = trained(model=network(width=5))
    before = values(live, other)
    with pytest.raises(ms.StateMismatch) as caught:
        restore(storage, {"model": live, "optimizer": other})
    for part in (
        "/model/first~1kernel: the checkpoint has shape [3, 4], the state wants [3, 5]",
        "/model/second~1bias: the checkpoint has dtype float32, the state wants float64 (cast=True converts it)",
        "/optimizer/first~1bias~1momentum: the checkpoint has shape [4], the state wants [5]",
    ):
        assert part in str(caught.value)
    assert values(live, other) == before


def test_a_cast_is_said() -> None:
    model = network()
    storage = saved({"model": model})
    keras.config.set_dtype_policy("bfloat16")
    live = network()
    with pytest.raises(ms.StateMismatch, match="cast=True"):
        restore(storage, {"model": live})
    restore(storage, {"model": live}, cast=True)
    for mine, theirs in zip(live.weights, model.weights, strict=True):
        assert mine.numpy().tobytes() == theirs.numpy().astype(mine.numpy().dtype).tobytes()


def test_a_part_of_a_model_if_it_is_said() -> None:
    storage = saved({"model": network()})
    live = network(names=("first", "other"))
    before = by_path(live)
    restored = restore(storage, {"model": live}, strict=False)
    assert {warning.partition(":")[0] for warning in restored.warnings} == {
        "/model/other~1kernel", "/model/other~1bias", "/model/second~1kernel", "/model/second~1bias",
    }  # fmt: skip
    after = by_path(live)
    assert {path for path in after if after[path] != before[path]} >= {"first/kernel"}
    assert after["other/kernel"] == before["other/kernel"]


# Optimizers.

OPTIMIZERS: dict[str, tuple[Callable[[], Any], set[str]]] = {
    "sgd": (lambda: keras.optimizers.SGD(0.1, momentum=0.9), {"momentum"}),
    "plain sgd": (lambda: keras.optimizers.SGD(0.1), set()),
    "average": (lambda: keras.optimizers.SGD(0.1, use_ema=True, gradient_accumulation_steps=2), {"average", "gradient_accumulator"}),
    "adam": (lambda: keras.optimizers.Adam(amsgrad=True), {"momentum", "velocity", "velocity_hat"}),
    "nadam": (keras.optimizers.Nadam, {"momentum", "velocity"}),
    "rmsprop": (lambda: keras.optimizers.RMSprop(momentum=0.1, centered=True), {"velocity", "momentum", "average_gradient"}),
    "adafactor": (keras.optimizers.Adafactor, {"r", "c", "velocity"}),
    "ftrl": (keras.optimizers.Ftrl, {"accumulator", "linear"}),
    "scaled": (lambda: keras.optimizers.LossScaleOptimizer(keras.optimizers.Adam()), {"momentum", "velocity"}),
}  # fmt: skip


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_kinds_of_optimizers(name: str) -> None:
    make, slots = OPTIMIZERS[name]
    model, optimizer = trained(make())
    storage = saved({"model": model, "optimizer": optimizer})
    keys = list(ms.open(storage).load()["optimizer"])
    assert len(keys) == len(optimizer.variables)
    assert {key.rpartition("/")[2] for key in keys if "first/kernel" in key} == slots
    live, other = network(), make()
    assert restore(storage, {"model": live, "optimizer": other}).warnings == ()
    assert values(live, other) == values(model, optimizer)
    assert train(live, other) == train(model, optimizer)
    assert values(live, other) == values(model, optimizer)


def test_optimizers_of_several_parts() -> None:
    if not hasattr(keras.optimizers, "MultiOptimizer"):
        pytest.skip("this Keras has none")

    def make() -> Any:
        kinds = keras.optimizers.OptimizerMap(
            keras.optimizers.Adam(), {"first/.*": keras.optimizers.SGD(0.1, momentum=0.9)}
        )
        return keras.optimizers.MultiOptimizer(kinds)

    model, optimizer = trained(make())
    storage = saved({"model": model, "optimizer": optimizer})
    live, other = network(), make()
    restore(storage, {"model": live, "optimizer": other})
    assert values(live, other) == values(model, optimizer)
    assert train(live, other) == train(model, optimizer)


def in_another_order() -> None:
    model, optimizer = trained()
    storage = saved({"model": model, "optimizer": optimizer})
    live, other = network(), keras.optimizers.Adam(0.5)
    order = live.trainable_variables[::-1]
    other.build(order)
    restore(storage, {"model": live, "optimizer": other})
    for slot in ("_momentums", "_velocities"):
        mine = {v.path: m.numpy().tobytes() for v, m in zip(order, getattr(other, slot), strict=True)}
        theirs = {
            v.path: m.numpy().tobytes()
            for v, m in zip(model.trainable_variables, getattr(optimizer, slot), strict=True)
        }
        assert mine == theirs


def test_parameters_in_another_order_are_mapped_by_name() -> None:
    in_another_order()


def test_matching_by_position_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        keras_optimizers, "match_names", lambda saved, live, stems: dict(zip(saved, live, strict=False))
    )
    with pytest.raises((AssertionError, ms.StateMismatch)):
        in_another_order()


def test_other_parameters_are_an_error_by_name() -> None:
    model, optimizer = trained()
    storage = saved({"model": model, "optimizer": optimizer})
    live, other = trained(model=network(names=("first", "last")))
    before = values(live, other)
    with pytest.raises(ms.StateMismatch) as caught:
        restore(storage, {"optimizer": other}, only="optimizer")
    for part in ("the checkpoint's optimizer has the parameter 'second/kernel', the live one has not",
                 "the live optimizer has the parameter 'last/kernel', the checkpoint's has not"):  # fmt: skip
        assert f"/optimizer: {part}" in str(caught.value)
    assert values(live, other) == before
    restored = restore(storage, {"optimizer": other}, only="optimizer", strict=False)
    assert any("'last/kernel'" in warning for warning in restored.warnings)
    assert int(other.iterations.numpy()) == 3
    assert other._momentums[0].numpy().tobytes() == optimizer._momentums[0].numpy().tobytes()


def test_an_optimizer_without_its_model_is_matched_by_the_paths() -> None:
    _, optimizer = trained()
    storage = saved({"optimizer": optimizer})
    live, other = network(), keras.optimizers.Adam(0.5)
    with pytest.raises(ms.StateMismatch, match=r"Adam is not built.*optimizer\.build\(model\.trainable_variables\)"):
        restore(storage, {"optimizer": other})
    assert not other.built
    other.build(live.trainable_variables[::-1])
    restore(storage, {"optimizer": other})
    assert other._momentums[-1].numpy().tobytes() == optimizer._momentums[0].numpy().tobytes()


def test_an_optimizer_is_built_with_the_model_it_was_compiled_into() -> None:
    model = network()
    model.compile(keras.optimizers.Adam(0.01), "mse")
    train(model, model.optimizer)
    storage = saved({"model": model, "copy": network(), "optimizer": model.optimizer})
    live, copy, loose = network(), network(), keras.optimizers.Adam()
    with pytest.raises(ms.StateMismatch, match="no one model in the state"):
        restore(storage, {"model": live, "copy": copy, "optimizer": loose})
    live.compile(keras.optimizers.Adam(0.5), "mse")
    restore(storage, {"model": live, "copy": copy, "optimizer": live.optimizer})
    assert values(live, live.optimizer) == values(model, model.optimizer)
    assert train(live, live.optimizer) == train(model, model.optimizer)


def test_an_optimizer_that_has_not_made_a_step() -> None:
    model, optimizer = network(), keras.optimizers.Adam(0.01)
    storage = saved({"model": model, "optimizer": optimizer})
    assert not optimizer.built
    live, other = network(), keras.optimizers.Adam(0.5)
    restore(storage, {"model": live, "optimizer": other})
    assert not other.built and float(other.learning_rate.numpy()) == float(optimizer.learning_rate.numpy())
    assert train(live, other) == train(model, optimizer)
    with pytest.raises(ms.StateMismatch, match="was saved before its first step"):
        restore(storage, {"model": live, "optimizer": other})


def test_another_kind_of_optimizer_is_an_error() -> None:
    model, optimizer = trained(keras.optimizers.SGD(0.1, momentum=0.9))
    storage = saved({"model": model, "optimizer": optimizer})
    live, other = trained()
    with pytest.raises(ms.StateMismatch, match="/optimizer/first~1kernel~1velocity: is not in the checkpoint"):
        restore(storage, {"model": live, "optimizer": other})


def test_a_learning_rate_that_was_changed_comes_back() -> None:
    model, optimizer = trained()
    optimizer.learning_rate = 0.125
    storage = saved({"model": model, "optimizer": optimizer})
    optimizer.learning_rate = 0.5
    restore(storage, {"model": model, "optimizer": optimizer})
    assert float(optimizer.learning_rate.numpy()) == 0.125


# What is not built, and what cannot be saved.


class Lazy(keras.Model):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.outer = keras.layers.Dense(4), keras.layers.Dense(2)

    def call(self, inputs: Any) -> Any:
        return self.outer(self.inner(inputs))


@pytest.mark.parametrize("make", [Lazy, lambda: keras.Sequential([keras.layers.Dropout(0.5), keras.layers.Dense(2)])])
def test_a_model_that_is_not_built_is_refused_both_ways(make: Callable[[], Any]) -> None:
    storage = MemoryStorage()
    ckpt = ms.Checkpointer(storage)
    model = make()
    with pytest.raises(
        ms.UnsupportedState, match=r"^/nets/0: .* has no weights yet\. Nothing was written\. Call build"
    ):
        ckpt.save(1, {"nets": [model]})
    assert ckpt.restore() is None
    model(np.ones((1, 3), np.float32))
    ckpt.save(1, {"nets": [model]})
    ckpt.close()
    live = make()
    with pytest.raises(ms.StateMismatch, match="(has|have) no (weights|variables) yet.*run it once on a batch"):
        restore(storage, {"nets": [live]})
    live(np.zeros((2, 3), np.float32))
    restore(storage, {"nets": [live]})
    assert values(live) == values(model)


def test_a_model_of_which_a_part_is_not_built_names_it() -> None:
    class Halves(keras.Model):
        def __init__(self) -> None:
            super().__init__(name="halves")
            self.one, self.two = keras.layers.Dense(2, name="one"), keras.layers.Dense(2, name="two")

    model, live = Halves(), Halves()
    for part in (model.one, model.two, live.one):
        part.build((None, 2))
    storage = saved({"model": model})  # never built itself: its parts are called one by one
    with pytest.raises(ms.StateMismatch, match="layers of the Halves 'halves' have no weights yet: two"):
        restore(storage, {"model": live})


def test_a_metric_that_was_never_used() -> None:
    class Late(keras.metrics.Metric):
        def update_state(self, value: Any) -> None:
            if not self.variables:
                self.total = self.add_weight(name="total", initializer="zeros")
            self.total.assign_add(value)

        def result(self) -> Any:
            return self.total

    metric, live = Late(name="late"), Late(name="late")
    metric.update_state(3.0)
    storage = saved({"metric": metric})
    with pytest.raises(ms.StateMismatch, match="/metric: the Late 'late' has no variables yet. Use it once before"):
        restore(storage, {"metric": live})
    live.update_state(1.0)
    restore(storage, {"metric": live})
    assert float(live.result()) == 3


def test_a_symbolic_tensor_is_refused() -> None:
    with pytest.raises(ms.UnsupportedState, match="^/x: a KerasTensor"):
        ms.Checkpointer(MemoryStorage()).save(1, {"x": keras.Input((3,))})


def test_what_a_layer_derives_from_its_variables_is_made_anew() -> None:
    def made(scale: float) -> Any:
        layer = keras.layers.Normalization(name="norm")
        layer.adapt(np.random.default_rng(0).standard_normal((100, 3)) * scale)
        return layer

    layer, live = made(10.0), made(1.0)
    restore(saved({"layer": layer}), {"layer": live})
    data = np.ones((1, 3), np.float32)
    assert np.array_equal(layer(data), live(data))


def test_objects_of_keras_2_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    from midstride.keras import adapter

    source = Path(adapter.__file__).read_text()
    monkeypatch.setattr(keras, "__version__", "2.15.0")
    with pytest.raises(ms.UnsupportedState, match="objects of Keras 2.15.0 cannot be saved"):
        exec(compile(source, "adapter", "exec"), {"__name__": "adapter"})


# Backends and devices.


def test_a_backend_that_keeps_state_elsewhere_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    model, optimizer = trained()
    storage = saved({"model": model})
    monkeypatch.setattr(keras.config, "backend", lambda: "jax")
    for value in (model, optimizer, model.variables[0]):
        with pytest.raises(ms.UnsupportedState, match="^/it: on the jax backend"):
            ms.Checkpointer(MemoryStorage()).save(1, {"it": value})
    with pytest.raises(ms.StateMismatch, match="/model: on the jax backend"):
        restore(storage, {"model": model})


def test_on_the_torch_backend(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    source = """
        import sys
        import keras, numpy as np, torch
        import midstride as ms
        from safetensors.torch import load_file

        def made():
            model = keras.Sequential([
                keras.Input((5,)), keras.layers.Dense(7), keras.layers.BatchNormalization(),
                keras.layers.Dropout(0.3, seed=3), keras.layers.Dense(2),
            ])
            model.compile(keras.optimizers.Adam(0.01), "mse")
            return model

        data = np.random.default_rng(0).standard_normal((64, 5)).astype("float32")
        def fit(model):
            return model.fit(data, data[:, :2], batch_size=16, epochs=2, verbose=0, shuffle=False).history

        model, live = made(), made()
        fit(model)
        pointers = [v.value.data_ptr() for v in live.variables]
        with ms.Checkpointer(sys.argv[1]) as ckpt:
            name = ckpt.save(8, {"model": model, "optimizer": model.optimizer, "kernel": model.layers[0].kernel}).result(60).name
            fitted = fit(model)
            restored = ckpt.restore({"model": live, "optimizer": live.optimizer, "kernel": live.layers[0].kernel})
        assert restored.state["kernel"] is live.layers[0].kernel
        assert [v.value.data_ptr() for v in live.variables] == pointers
        assert torch.equal(load_file(f"{sys.argv[1]}/{name}/model.safetensors")["sequential/dense/kernel"], live.layers[0].kernel.value)
        assert fit(live) == fitted
        assert "tensorflow" not in sys.modules
        print("alike")
    """
    assert script(source, tmp_path, KERAS_BACKEND="torch") == "alike"


def test_variables_that_are_mirrored_on_several_devices(tmp_path: Path) -> None:
    source = """
        import sys
        import keras, numpy as np, tensorflow as tf
        import midstride as ms
        tf.config.set_logical_device_configuration(
            tf.config.list_physical_devices("CPU")[0], [tf.config.LogicalDeviceConfiguration()] * 2)
        strategy = tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"])

        def made():
            with strategy.scope():
                model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(2), keras.layers.BatchNormalization()])
                model.compile(keras.optimizers.Adam(), "mse")
                own = tf.Variable([1.0, 2.0]), tf.Variable(
                    5.0, synchronization=tf.VariableSynchronization.ON_READ, aggregation=tf.VariableAggregation.MEAN)
            return model, own

        data = np.random.default_rng(0).standard_normal((32, 3)).astype("float32")
        def fit(model):
            return model.fit(data, data[:, :2], epochs=2, verbose=0, shuffle=False).history

        (model, own), (live, mine) = made(), made()
        fit(model)
        with ms.Checkpointer(sys.argv[1]) as ckpt:
            ckpt.save(8, {"model": model, "optimizer": model.optimizer, "own": own})
            fitted = fit(model)
            mine[0].assign([0.0, 0.0]); mine[1].assign(0.0)
            restored = ckpt.restore({"model": live, "optimizer": live.optimizer, "own": mine})
        assert restored.state["own"][0] is mine[0]
        for replica in (0, 1):
            assert mine[0].values[replica].numpy().tolist() == [1, 2] and float(mine[1].values[replica]) == 5
        assert len(live.optimizer.variables[2].value.values) == 2
        assert fit(live) == fitted
        print("alike")
    """
    assert script(source, tmp_path) == "alike"


def test_the_guide_runs_as_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    data = np.random.default_rng(0).standard_normal((64, 3)).astype(np.float32)
    names: dict[str, Any] = {"inputs": data, "targets": data[:, :2], "make_model": network}
    text = (ROOT / "docs" / "guides" / "keras.md").read_text()
    for block in re.findall(r"^```python\n(.*?)^```", text, re.M | re.S):
        exec(compile(block, "keras.md", "exec"), names)
    assert names["restored"].step == 4
