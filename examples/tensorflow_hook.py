"""A small convolution learns handwritten digits in a ``MonitoredTrainingSession``, and can be killed at any moment.

    python examples/tensorflow_hook.py --run runs/digits --steps 300 --every 50

Run it again with the same arguments, or with more steps, and it goes on where the newest checkpoint left it. Each batch
is a function of the global step, so the end is the same, bit for bit, however often it was interrupted.
"""

from __future__ import annotations

import argparse

import numpy as np
import tensorflow as tf

import midstride as ms
from midstride.tensorflow import AsyncCheckpointSaverHook, latest_checkpoint

v1 = tf.compat.v1


def digits() -> tuple[np.ndarray, np.ndarray]:
    """Images (count, 8, 8) with values 0 to 16, and what they show; without scikit-learn, ten fixed patterns."""
    try:
        from sklearn.datasets import load_digits
    except ImportError:
        labels = np.arange(1797, dtype=np.int32) % 10
        return np.random.default_rng(0).integers(0, 17, (10, 8, 8), np.uint8)[labels], labels
    found = load_digits()
    return found.images.astype(np.uint8), found.target.astype(np.int32)


def model(images: tf.Tensor) -> tf.Tensor:
    """From images (batch, 8, 8) to logits (batch, 10)."""
    filters = v1.get_variable("filters", [3, 3, 1, 32], initializer=v1.glorot_uniform_initializer(seed=1))
    kernel = v1.get_variable("kernel", [6 * 6 * 32, 10], initializer=v1.glorot_uniform_initializer(seed=2))
    bias = v1.get_variable("bias", [10], initializer=v1.zeros_initializer())
    seen = tf.nn.relu(tf.nn.conv2d(tf.cast(images, tf.float32)[..., None] / 16, filters, 1, "VALID"))
    return tf.reshape(seen, [-1, 6 * 6 * 32]) @ kernel + bias


def train(run: str, total: int, every: int) -> None:
    tf.config.experimental.enable_op_determinism()
    print("the newest checkpoint in which every byte is what was written:", latest_checkpoint(run))
    with tf.Graph().as_default():
        step = v1.train.get_or_create_global_step()
        images, labels = digits()
        batch = tf.random.stateless_uniform([64], [1609, step], 0, len(labels), tf.int64)
        logits = model(tf.gather(images, batch))
        losses = tf.nn.sparse_softmax_cross_entropy_with_logits(tf.gather(labels, batch), logits)
        loss = tf.reduce_mean(losses)
        train_op = v1.train.AdamOptimizer(3e-3).minimize(loss, step)

        hook = AsyncCheckpointSaverHook(run, save_steps=every, align=True, on_signal=ms.OnSignal())
        # It restores from the same folder. The two None switch TensorFlow's own saver off: the hook is there.
        with v1.train.MonitoredTrainingSession(
            checkpoint_dir=run, hooks=[hook], save_checkpoint_secs=None, save_checkpoint_steps=None
        ) as session:
            start = int(session.run_step_fn(lambda step_context: step_context.session.run(step)))
            print(f"at step {start}", flush=True)
            for number in range(start + 1, total + 1):
                if session.should_stop():
                    break
                _, loss_now = session.run([train_op, loss])
                if number % every == 0:
                    print(f"step {number}: loss {loss_now:.4f}", flush=True)
    done = hook.statistics()
    print(f"{done.saves_committed} checkpoints, {done.saves_skipped} put off, held up for {done.stall_seconds:.3f} s")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--run", default="runs/digits", help="the folder for checkpoints")
    parser.add_argument("--steps", type=int, default=300, help="train until this step")
    parser.add_argument("--every", type=int, default=50, help="steps from one checkpoint to the next")
    arguments = parser.parse_args()
    train(arguments.run, arguments.steps, arguments.every)
