"""A small real model, killed in the middle of a save and resumed: its weights are those of a run that was never killed.

A convolution learns scikit-learn's digits under MonitoredTrainingSession; all that is random, or in an order, comes
from the global step, and one thread computes, so that two runs are equal bit by bit.
"""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("tensorflow")
pytest.importorskip("midstride.tensorflow")
pytest.importorskip("sklearn")

import tensorflow as tf

from midstride.tensorflow import CheckpointFolder, latest_checkpoint, snapshot
from tests.frameworks.tensorflow import children
from tests.frameworks.tensorflow.training import ours, v1, wait_until

STEPS, EVERY, KILLED_IN, BATCH = 60, 10, 30, 64
TRAINED_ON = 1500


def digits() -> tuple[np.ndarray, np.ndarray]:
    from sklearn.datasets import load_digits

    loaded = load_digits()
    return loaded.images.astype(np.float32)[..., None] / 16, loaded.target.astype(np.int32)


def logits_of(images: Any) -> Any:
    """Two convolutions and a dense layer."""

    def variable(name: str, *shape: int) -> Any:
        scale = float(np.sqrt(2 / max(1, np.prod(shape[:-1]))))
        return v1.get_variable(name, shape, initializer=v1.truncated_normal_initializer(stddev=scale))

    def zeros(name: str, size: int) -> Any:
        return v1.get_variable(name, [size], initializer=v1.zeros_initializer())

    hidden = tf.nn.relu(tf.nn.conv2d(images, variable("conv1", 3, 3, 1, 8), 1, "SAME") + zeros("bias1", 8))
    hidden = tf.nn.max_pool2d(hidden, 2, 2, "SAME")
    hidden = tf.nn.relu(tf.nn.conv2d(hidden, variable("conv2", 3, 3, 8, 16), 1, "SAME") + zeros("bias2", 16))
    return tf.reshape(hidden, [-1, 4 * 4 * 16]) @ variable("dense", 4 * 4 * 16, 10) + zeros("bias3", 10)


def stop_in_the_middle_of(step: int, base: str) -> None:
    """Data and index are written then, and nothing names them yet; training goes on meanwhile."""
    real = snapshot._Writer.run

    def run(writer: Any, filename: str, *arguments: Any) -> Any:
        result = real(writer, filename, *arguments)
        if filename.endswith(f"-{step}"):
            Path(base, "saving").touch()
            wait_until(Path(base, "never").exists, "SIGKILL")
        return result

    snapshot._Writer.run = run


def learn(base: str, folder: str, optimizer: str, resource: bool, with_hook: bool, killed: bool) -> None:
    if killed:
        stop_in_the_middle_of(KILLED_IN, base)
    images, labels = digits()
    with tf.Graph().as_default(), v1.variable_scope("", use_resource=resource):
        v1.set_random_seed(1)
        step = v1.train.get_or_create_global_step()
        chosen = tf.random.stateless_uniform(
            [BATCH], seed=tf.stack([3, tf.cast(step, tf.int32)]), maxval=TRAINED_ON, dtype=tf.int32
        )
        with v1.variable_scope("model"):
            logits = logits_of(tf.gather(tf.constant(images[:TRAINED_ON]), chosen))
        loss = v1.losses.sparse_softmax_cross_entropy(tf.gather(tf.constant(labels[:TRAINED_ON]), chosen), logits)
        kinds = {"adam": v1.train.AdamOptimizer(0.01), "momentum": v1.train.MomentumOptimizer(0.1, 0.9)}
        train_op = kinds[optimizer].minimize(loss, global_step=step)
        with v1.variable_scope("model", reuse=True):
            guesses = tf.argmax(logits_of(tf.constant(images[TRAINED_ON:])), 1, output_type=tf.int32)
        right = tf.reduce_mean(tf.cast(tf.equal(guesses, labels[TRAINED_ON:]), tf.float32))
        weights = {variable.op.name: variable for variable in v1.global_variables()}
        saver = v1.train.Saver(max_to_keep=2)
        hooks = [v1.train.StopAtStepHook(last_step=STEPS)]
        if with_hook:
            hooks.append(ours(folder, save_steps=EVERY, saver=saver))
        with v1.train.MonitoredTrainingSession(
            checkpoint_dir=folder,
            hooks=hooks,
            save_checkpoint_secs=None,
            save_checkpoint_steps=None,
            save_summaries_steps=None,
            save_summaries_secs=None,
            log_step_count_steps=None,
            config=v1.ConfigProto(intra_op_parallelism_threads=1, inter_op_parallelism_threads=1),
        ) as session:
            # Without the hooks: nothing that is looked at here may count as a step.
            bare = session.run_step_fn(lambda step_context: step_context.session)
            first = int(bare.run(step))
            while not session.should_stop():
                session.run(train_op)
            learned, share = bare.run([weights, right])
        np.savez(os.path.join(base, "learned.npz"), first=first, right=share, **learned)


def learned_in(base: Path) -> dict[str, np.ndarray]:
    with np.load(base / "learned.npz") as file:
        return dict(file)


def assert_equal_bits(one: dict[str, np.ndarray], other: dict[str, np.ndarray]) -> None:
    assert one.keys() == other.keys()
    for name, value in one.items():
        assert value.dtype == other[name].dtype, name
        assert value.tobytes() == other[name].tobytes(), name


@pytest.mark.parametrize("optimizer, resource", [("adam", True), ("momentum", False)], ids=["adam", "momentum-ref"])
def test_killed_in_a_save_and_resumed_it_learns_the_same(optimizer: str, resource: bool, tmp_path: Path) -> None:
    def start(name: str, folder: str, *, with_hook: bool = True, killed: bool = False) -> tuple[Path, children.Child]:
        base = tmp_path / name
        base.mkdir()
        return base, children.start(learn, base, tmp_path / folder, optimizer, resource, with_hook, killed)

    without, plain = start("without", "folder-without", with_hook=False)
    whole, uninterrupted = start("whole", "folder-whole")
    for child in (plain, uninterrupted):
        assert child.wait() == 0, child.output

    base, child = start("killed", "folder", killed=True)
    wait_until((base / "saving").exists, "the save to be killed in")
    child.send(signal.SIGKILL)
    assert child.wait() == -signal.SIGKILL, child.output
    folder = tmp_path / "folder"
    assert latest_checkpoint(folder) == str(folder / f"model.ckpt-{KILLED_IN - EVERY}")
    assert (folder / f"model.ckpt-{KILLED_IN}.index").exists(), "or it was not in the middle"

    resumed, child = start("resumed", "folder")
    assert child.wait() == 0, child.output
    expected, got = learned_in(whole), learned_in(resumed)
    assert (expected.pop("first"), got.pop("first")) == (0, KILLED_IN - EVERY)
    assert got["global_step"] == STEPS
    assert_equal_bits(got, expected)
    assert expected["right"] > 0.8, "or nothing was learned, and equality would say little"

    unwatched = learned_in(without)
    unwatched.pop("first")
    assert_equal_bits(unwatched, expected)

    reader = tf.train.load_checkpoint(str(folder))
    saved = {name: reader.get_tensor(name) for name in reader.get_variable_to_shape_map()}
    assert_equal_bits(saved, {name: expected[name] for name in saved})
    assert len(saved) == len(expected) - 1
    assert not any(CheckpointFolder(folder).verify().values())
