"""A small real model in training, as a script: saved half way, or restored there, and then trained to the end.

    python -m tests.frameworks.tensorflow.keras_training FOLDER save|restore

Prints a digest of every variable, the losses and the metric of each step of the second half.
"""

from __future__ import annotations

import hashlib
import json
import sys
from typing import Any

import keras
import numpy as np
import tensorflow as tf

import midstride as ms

HALF, END = 4, 8


def network() -> Any:
    inputs = keras.Input((20,))
    hidden = keras.layers.Dense(16, activation="relu")(inputs)
    hidden = keras.layers.BatchNormalization()(hidden)
    hidden = keras.layers.Dropout(0.3)(hidden)
    hidden = keras.layers.Dense(8, activation="relu", name="narrow")(hidden)
    hidden = keras.layers.GaussianNoise(0.1)(hidden)
    return keras.Model(inputs, keras.layers.Dense(3)(hidden))


OPTIMIZERS = {
    "adam": lambda: keras.optimizers.AdamW(0.01, amsgrad=True, clipnorm=1.0),
    "sgd": lambda: keras.optimizers.SGD(
        keras.optimizers.schedules.ExponentialDecay(0.1, 3, 0.7), momentum=0.9, nesterov=True, use_ema=True
    ),
    "nadam": lambda: keras.optimizers.Nadam(0.01, gradient_accumulation_steps=2),
    "adafactor": keras.optimizers.Adafactor,
    "scaled": lambda: keras.optimizers.LossScaleOptimizer(keras.optimizers.RMSprop(0.01), dynamic_growth_steps=3),
}


def batch(step: int) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(step)
    labels = rng.integers(0, 3, 32)
    return (rng.standard_normal((32, 20)) + labels[:, None]).astype(np.float32), labels


def digest(variables: list[Any]) -> str:
    content = hashlib.sha256()
    for variable in variables:
        content.update(np.asarray(variable.numpy()).tobytes())
    return content.hexdigest()


class Compiled:
    """Trained by Keras."""

    def __init__(self, optimizer: Any) -> None:
        self.model = network()
        self.model.compile(optimizer, keras.losses.SparseCategoricalCrossentropy(from_logits=True))
        self.optimizer = self.model.optimizer
        self.seen = keras.metrics.SparseCategoricalAccuracy()

    def step(self, number: int) -> float:
        inputs, labels = batch(number)
        self.model.reset_metrics()  # the loss that is given is a mean since then
        loss = self.model.train_on_batch(inputs, labels)
        self.seen.update_state(labels, self.model(inputs))
        return float(loss)


class ByHand:
    """Trained by a loop of one's own, in the number format of the day."""

    def __init__(self, optimizer: Any) -> None:
        keras.config.set_dtype_policy("mixed_bfloat16")
        self.model, self.optimizer = network(), optimizer
        keras.config.set_dtype_policy("float32")
        self.seen = keras.metrics.Mean()
        self.train = tf.function(self._train)

    def _train(self, inputs: Any, labels: Any) -> Any:
        with tf.GradientTape() as tape:
            logits = self.model(inputs, training=True)
            loss = tf.reduce_mean(keras.losses.sparse_categorical_crossentropy(labels, logits, from_logits=True))
        gradients = tape.gradient(loss, self.model.trainable_variables)
        self.optimizer.apply(gradients, self.model.trainable_variables)
        self.seen.update_state(loss)
        return loss

    def step(self, number: int) -> float:
        return float(self.train(*batch(number)))


def main(folder: str, what: str) -> None:
    keras.utils.set_random_seed({"save": 1, "restore": 99}[what])
    tf.config.experimental.enable_op_determinism()
    told: dict[str, Any] = {}
    for kind in (Compiled, ByHand):
        for name in OPTIMIZERS if kind is Compiled else ("adam", "scaled"):
            run = kind(OPTIMIZERS[name]())
            state = {"model": run.model, "optimizer": run.optimizer, "metrics": [run.seen]}
            with ms.Checkpointer(f"{folder}/{kind.__name__}-{name}") as ckpt:
                if what == "save":
                    for number in range(HALF):
                        run.step(number)
                    ckpt.save(HALF, state)
                else:
                    restored = ckpt.restore(state)
                    assert restored is not None and (restored.step, restored.warnings) == (HALF, ())
            told[f"{kind.__name__} {name}"] = [
                [run.step(number).hex(), float(run.seen.result()).hex(), digest(run.model.variables), digest(run.optimizer.variables)]
                for number in range(HALF, END)
            ]  # fmt: skip
    print(json.dumps(told))


if __name__ == "__main__":
    main(*sys.argv[1:])
