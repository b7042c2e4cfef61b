"""Calls ``fit`` three times while the cluster is lost twice, and prints each step once; ``refitted.py OUT``."""

import contextlib
import os
import sys

os.environ["TF_USE_LEGACY_KERAS"] = "1"
import tensorflow as tf

from dlrover.errors import ConfigurationError
from dlrover.tensorflow import resilient
from dlrover.tensorflow.watch import ClusterChangedError

LOSSES = [4, 9]
"""Steps after which the cluster is lost."""


class Notes(tf.keras.callbacks.Callback):
    """Prints each step, and loses the cluster."""

    def __init__(self, fit, progress) -> None:
        super().__init__()
        self._supports_tf_logs = True
        self.fit, self.progress = fit, progress

    def on_epoch_begin(self, epoch, logs=None) -> None:
        self.epoch = epoch

    def on_train_batch_end(self, batch, logs=None) -> None:
        sys.stdout.write(f"step {self.progress.step}: {self.fit} {self.epoch} {batch}\n")
        if LOSSES and self.progress.step == LOSSES[0]:
            raise ClusterChangedError(f"step {LOSSES.pop(0)} loses ps 0.")

    def on_epoch_end(self, epoch, logs=None) -> None:
        self.model.stop_training = (self.fit, epoch) == ("short", 1)


@resilient(checkpoint=sys.argv[1], every_steps=1)
def train(cluster) -> None:
    strategy = cluster.strategy()
    with strategy.scope():
        model = tf.keras.Sequential([tf.keras.layers.Dense(1)])
        model.compile("sgd", "mse")
    progress = cluster.resume(strategy, model=model)
    data = tf.keras.utils.experimental.DatasetCreator(samples)
    for fit, first, epochs in (("short", 0, 5), ("again", 0, 2), ("later", 2, 3)):
        callbacks = [progress.callback(), Notes(fit, progress)]
        options = {"initial_epoch": first, "epochs": epochs, "steps_per_epoch": 3}
        model.fit(data, callbacks=callbacks, verbose=0, **options)
    sys.stdout.write(f"end {progress.step}: {int(model.optimizer.iterations.numpy())}\n")
    for steps in (None, -1):
        with contextlib.suppress(ConfigurationError):
            model.fit(samples(None).take(7), steps_per_epoch=steps, callbacks=[progress.callback()])
            raise AssertionError(steps)


def samples(context):
    return tf.data.Dataset.from_tensors((tf.ones([4, 2]), tf.ones([4, 1]))).repeat()


train()
