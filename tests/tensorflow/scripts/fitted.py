"""Fits a Keras model with parameter servers; ``fitted.py OUT EPOCHS STEPS``. Its files are those of counted.py."""

import json
import os
import sys
import time
from pathlib import Path

os.environ["TF_USE_LEGACY_KERAS"] = "1"
import tensorflow as tf

from dlrover.tensorflow import resilient

OUT, EPOCHS, STEPS = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
SPARES = int(sys.argv[4]) if len(sys.argv) > 4 else 0


class Notes(tf.keras.callbacks.Callback):
    """Writes each step's time."""

    def __init__(self) -> None:
        super().__init__()
        self._supports_tf_logs = True

    def on_train_batch_end(self, batch, logs=None) -> None:
        self.model._cluster_coordinator.join()
        note("step", batch)
        time.sleep(0 if (OUT / "hurry").exists() else 0.05)


def samples(context):
    def example(seed):
        x = tf.random.stateless_uniform([32, 8], [7, seed])
        noise = tf.random.stateless_normal([32, 1], [8, seed], stddev=0.1)
        return x, tf.reduce_sum(x * tf.range(8.0), 1, keepdims=True) + noise

    return tf.data.Dataset.range(10_000).shuffle(1000).repeat().map(example)


@resilient(checkpoint=OUT / "ckpt", every_seconds=0.5, spares=SPARES)
def train(cluster) -> None:
    strategy = cluster.strategy()
    with strategy.scope():
        model = made()
    progress = cluster.resume(strategy, model=model)
    note("begin", progress.step, cluster.spec)
    data = tf.keras.utils.experimental.DatasetCreator(samples)
    callbacks = [progress.callback(), Notes()]
    model.fit(data, epochs=EPOCHS, steps_per_epoch=STEPS, callbacks=callbacks, verbose=0)
    end = {
        "steps": progress.step,
        "iterations": int(model.optimizer.iterations.numpy()),
        "loss": loss(model.get_weights()),
        "undisturbed": undisturbed(),
    }
    (OUT / "end").write_text(json.dumps(end))


def made():
    tf.keras.utils.set_random_seed(1)
    model = tf.keras.Sequential([tf.keras.layers.Dense(16, "relu"), tf.keras.layers.Dense(1)])
    model.compile(tf.keras.optimizers.Adam(0.02), "mse")
    return model


def loss(weights) -> float:
    model = made()
    model.build([None, 8])
    model.set_weights(weights)
    x, y = next(iter(samples(None).unbatch().batch(8192)))
    return float(tf.reduce_mean((model(x) - y) ** 2))


def undisturbed() -> float:
    """The loss after the same steps in this process alone."""
    model = made()
    model.fit(samples(None).take(EPOCHS * STEPS), verbose=0)
    return loss(model.get_weights())


def note(*what) -> None:
    with (OUT / "notes").open("a") as file:
        print(json.dumps([time.time(), *what]), file=file)


train()
