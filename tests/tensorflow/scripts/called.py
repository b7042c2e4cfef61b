"""Calls ``fit`` in several ways and loses the cluster once in each, and prints what became of it; ``called.py OUT``."""

import multiprocessing
import os
import sys
from functools import partial
from pathlib import Path

os.environ["TF_USE_LEGACY_KERAS"] = "1"
import msgspec
import numpy as np
import tensorflow as tf

from dlrover.errors import ConfigurationError
from dlrover.tensorflow import resilient
from dlrover.tensorflow.watch import ClusterChangedError

OUT = Path(sys.argv[1])
keras = tf.keras


class Loss(keras.callbacks.Callback):
    """Loses the cluster at a step."""

    def __init__(self, progress, at) -> None:
        super().__init__()
        self._supports_tf_logs = True
        self.progress, self.at = progress, at

    def on_train_batch_end(self, batch, logs=None) -> None:
        if self.progress.step == self.at:
            raise ClusterChangedError(f"step {self.at} loses ps 0.")


class First(keras.layers.Layer):
    """Takes one of several inputs."""

    def call(self, inputs):
        return inputs["x"]


class Own(keras.Model):
    """A model whose variables are made by its first call."""

    def __init__(self, prepare) -> None:
        super().__init__()
        self.prepare, self.dense = prepare, keras.layers.Dense(1)

    def call(self, inputs):
        return self.dense(self.prepare(inputs))


def of_any_rank(inputs):
    return tf.raw_ops.PlaceholderWithDefault(input=inputs, shape=tf.TensorShape(None))


def samples(inputs, *, shaped=True):
    def made(context):
        data = tf.data.Dataset.from_tensors((inputs, tf.ones([4, 1]))).repeat()
        return data if shaped else data.map(lambda x, y: (of_any_rank(x), y))

    return keras.utils.experimental.DatasetCreator(made)


def guarded(name, train, every_steps=1) -> None:
    """Print what a training returns, or why it fails."""
    try:
        result = resilient(checkpoint=OUT / name, every_steps=every_steps)(train)()
    except ConfigurationError as error:
        result = error
    sys.stdout.write(f"{name}: {result}\n")
    sys.stdout.flush()


def prepared(cluster, *makers):
    strategy = cluster.strategy()
    with strategy.scope():
        models = [make() for make in makers]
        for model in models:
            model.compile("sgd", "mse")
    named = {f"model{number}": model for number, model in enumerate(models)}
    return models, cluster.resume(strategy, **named)


def lost_behind(name, *made) -> None:
    """Fit models, lose the cluster, and print the shapes of what they learned."""

    def train(cluster):
        models, progress = prepared(cluster, *(make for make, _ in made))
        for model, (_, data) in zip(models, made, strict=True):
            callbacks = [progress.callback()]
            model.fit(data, epochs=1, steps_per_epoch=np.int64(2), verbose=0, callbacks=callbacks)
        if not cluster.attempt:
            raise ClusterChangedError("All steps are done.")
        return progress.step, [tuple(w.shape) for model in models for w in model.weights]

    guarded(name, train, every_steps=2)


def called(name, calls, at, make=None) -> None:
    """Make calls of ``fit`` that depend on the step, as ``(below, initial_epoch, epochs)``, and lose the cluster."""

    def train(cluster):
        (model,), progress = prepared(cluster, make or dense)
        for below, first, epochs in calls:
            if progress.step < below:
                callbacks = [progress.callback(), Loss(progress, 0 if cluster.attempt else at)]
                options = {"steps_per_epoch": 2, "verbose": 0, "callbacks": callbacks}
                model.fit(samples(x), initial_epoch=first, epochs=epochs, **options)
        return progress.step

    guarded(name, train)


def followed(name) -> None:
    """Call ``fit`` before and after a loop of other steps, where the first call depends on the step."""

    def train(cluster):
        (model,), progress = prepared(cluster, dense)
        for below in (4, 99):
            if progress.step < below:
                options = {"steps_per_epoch": 2, "verbose": 0, "callbacks": [progress.callback()]}
                model.fit(samples(x), epochs=2, **options)
            while progress.step < 8:
                progress.advance()
                if progress.step == 6 and not cluster.attempt:
                    raise ClusterChangedError("step 6 loses ps 0.")
        return progress.step

    guarded(name, train)


def dense():
    return keras.Sequential([keras.layers.Dense(1)])


def shaped():
    return keras.Sequential([keras.layers.InputLayer([2]), keras.layers.Dense(1)])


class Evaluate(keras.callbacks.Callback):
    """Evaluates the model before ``fit``, which gives it another History."""

    def on_train_begin(self, logs=None) -> None:
        self.model.evaluate(samples(x), steps=1, verbose=0)


class Stop(keras.callbacks.Callback):
    """Ends ``fit`` before its last epoch, and changes the weights then, as EarlyStopping does."""

    def on_epoch_end(self, epoch, logs=None) -> None:
        self.model.stop_training = epoch == 1

    def on_train_end(self, logs=None) -> None:
        if self.model.stop_training:
            self.model.set_weights([tf.fill(weight.shape, 7.0) for weight in self.model.weights])


def stopped(name, epochs) -> None:
    """Let a callback end ``fit``, lose the cluster, and print the step and a weight."""

    def train(cluster):
        (model,), progress = prepared(cluster, dense)
        options = {"epochs": epochs, "steps_per_epoch": 2, "verbose": 0}
        model.fit(samples(x), callbacks=[Evaluate(), progress.callback(), Stop()], **options)
        if not cluster.attempt:
            raise ClusterChangedError("ps 0 is lost behind fit.")
        return progress.step, round(float(model.weights[1][0]), 2)

    guarded(name, train)


def listed(name) -> None:
    """Call ``fit`` with a list of callbacks that has no History, lose the cluster, and print where it continues."""

    def train(cluster):
        (model,), progress = prepared(cluster, dense)
        began, data = progress.step, samples(x)
        callbacks = keras.callbacks.CallbackList
        for epochs, made in ((1, list), (3, partial(callbacks, model=model, epochs=3, steps=2))):
            options = {"epochs": epochs, "steps_per_epoch": 2, "verbose": 0}
            model.fit(data, callbacks=made([progress.callback()]), **options)
        if not cluster.attempt:
            raise ClusterChangedError("ps 0 is lost behind fit.")
        return began

    guarded(name, train, every_steps=0)


def former(name, step) -> None:
    """Leave a checkpoint as those before the version that knows of several calls."""

    class State(tf.train.experimental.PythonState):
        def serialize(self):
            return msgspec.msgpack.encode({"step": step, "records": None})

        def deserialize(self, value):
            raise AssertionError

    def train(cluster):
        with cluster.strategy().scope():
            model = shaped()
            model.compile("sgd", "mse")
        checkpoint = tf.train.Checkpoint(dlrover=State(), model0=model)
        tf.train.CheckpointManager(checkpoint, OUT / name, 3).save(checkpoint_number=step)

    guarded(name, train)


x, wide = np.ones([4, 2], np.float32), np.ones([4, 3], np.float32)
several = {"x": x, "scalar": np.float32(1)}
keys = np.zeros([4], np.int32)
CASES = [
    (lost_behind, "a dict", (lambda: keras.Sequential([First(), keras.layers.Dense(1)]), samples(several))),
    (lost_behind, "own with a dict", (lambda: Own(lambda inputs: inputs["x"]), samples(several))),
    (lost_behind, "integers", (lambda: Own(lambda keys: tf.gather(wide, keys)), samples(keys))),
    (lost_behind, "any rank", (lambda: Own(lambda inputs: tf.reshape(inputs, [4, 2])), samples(x, shaped=False))),
    (lost_behind, "two models", (dense, samples(x)), (dense, samples(wide))),
    (called, "no warm-up", [(4, 0, 2), (99, 2, 6)], 7),
    (called, "alike", [(4, 0, 2), (99, 0, 2)], 7),
    (called, "warm-up alone", [(4, 0, 2)], 4),
    (followed, "followed"),
    (former, "former", 7),
    (called, "former", [(99, epoch, epoch + 1) for epoch in range(5)], 8, shaped),
    (called, "longer", [(99, 0, 2)], 3),
    (called, "longer", [(99, 0, 4)], 7),
    (stopped, "stopped", 5),
    (stopped, "stopped", 5),
    (stopped, "stopped", 3),
    (listed, "listed"),
]  # fmt: skip
for case, *arguments in CASES:  # each in a process of its own, with servers of its own
    process = multiprocessing.get_context("fork").Process(target=case, args=arguments)
    process.start()
    process.join()
    if process.exitcode:
        sys.exit(f"{arguments[0]} ends with {process.exitcode}")
