"""A configuration in the original's manner: a linear model that counts each record. OUT is the folder of its files."""

import json
import os
import time
from pathlib import Path

import numpy as np
import tensorflow as tf

from dlrover.trainer.tensorflow.reader.file_reader import FileReader
from dlrover.trainer.tensorflow.util.column_info import Column

OUT = Path(os.environ["OUT"])
TABLE = OUT / "table.csv"
FEATURES = ("a", "b", "c", "d")
V1 = tf.compat.v1


class Linear(tf.estimator.Estimator):
    def __init__(self, model_dir, config=None, params=None):
        super().__init__(self.model_fn, model_dir=model_dir, config=config, params=params)

    def model_fn(self, features, labels, mode, params):
        inputs = tf.stack([features[name] for name in FEATURES], 1)
        weights = V1.get_variable("weights", [len(FEATURES), 1])
        outputs = tf.reshape(inputs @ weights, [-1])
        if mode == tf.estimator.ModeKeys.PREDICT:
            return tf.estimator.EstimatorSpec(mode, predictions=outputs)
        loss = tf.reduce_mean((outputs - labels) ** 2)
        if mode == tf.estimator.ModeKeys.EVAL:
            return tf.estimator.EstimatorSpec(mode, loss=loss)
        seen = V1.get_variable("seen", [params["records"]], initializer=tf.zeros_initializer())
        ones = tf.ones_like(labels)
        counted = seen.scatter_add(tf.IndexedSlices(ones, tf.cast(features["number"], tf.int64)))
        optimizer = V1.train.GradientDescentOptimizer(params["rate"])
        made = optimizer.minimize(loss, global_step=V1.train.get_global_step())
        return tf.estimator.EstimatorSpec(
            mode, loss=loss, train_op=tf.group(made, counted), training_hooks=[Notes(weights, seen)]
        )


class Notes(tf.estimator.SessionRunHook):
    """Writes down sessions and steps, and what the chief has at the end."""

    def __init__(self, weights, seen):
        self.values = weights, seen
        described = json.loads(os.environ["TF_CONFIG"])
        self.task, self.cluster = described["task"], described["cluster"]

    def after_create_session(self, session, coord):
        self.number = V1.train.get_global_step()
        kind = "begin" if self.task["type"] == "chief" else "worker"
        note(kind, int(session.run(self.number)), self.cluster, os.getpid(), self.task["index"])

    def before_run(self, run_context):
        return V1.train.SessionRunArgs(self.number)

    def after_run(self, run_context, run_values):
        note("step", int(run_values.results), self.task["type"], os.getpid())
        time.sleep(0 if (OUT / "hurry").exists() else 0.05)

    def end(self, session):
        if self.task["type"] != "chief":
            return
        weights, seen, steps = session.run([*self.values, self.number])
        table = np.loadtxt(TABLE, delimiter=",", skiprows=1)
        wrong = {int(i): int(count) for i, count in enumerate(seen) if count != Conf.epoch}
        loss = float(np.mean((table[:, 1:5] @ weights[:, 0] - table[:, 5]) ** 2))
        end = {"steps": int(steps), "wrong": wrong, "loss": loss}
        (OUT / "end").write_text(json.dumps(end))


def note(*what):
    with (OUT / "notes").open("a") as file:
        print(json.dumps([time.time(), *what]), file=file)


COLUMNS = (
    Column.create(name="number", dtype="int32"),
    *(Column.create(name=name, dtype="float32") for name in FEATURES),
    Column.create(name="y", dtype="float32", is_label=True),
)


class Conf:
    classifier_class = Linear
    model_dir = str(OUT / "model")
    batch_size = 10
    epoch = 2
    save_steps = 40
    keep_checkpoint_max = 3
    params = {"rate": 0.02, "records": int(os.environ.get("RECORDS", "3000"))}  # noqa: RUF012
    train_set = {"reader": FileReader(str(TABLE)), "columns": COLUMNS}  # noqa: RUF012
    eval_set = {"reader": FileReader(str(TABLE)), "columns": COLUMNS}  # noqa: RUF012
