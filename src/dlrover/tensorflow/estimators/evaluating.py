"""The evaluator of an estimator's training: it evaluates each checkpoint, and exports the best model."""

from __future__ import annotations

import dataclasses
import logging

import tensorflow as tf

from dlrover import launched
from dlrover.errors import ConfigurationError
from dlrover.tensorflow import stored
from dlrover.tensorflow.estimators.conf import EstimatorConf
from dlrover.tensorflow.estimators.feed import BatchFeed
from dlrover.tensorflow.estimators.task import estimator_of

logger = logging.getLogger(__name__)


class Evaluator:
    """Evaluates checkpoints. The least loss is in a file beside the exports, for an evaluator that starts again.

    Raises:
        ConfigurationError: the configuration has no ``eval_set``.
    """

    def __init__(self, conf: EstimatorConf) -> None:
        if conf.eval_set is None:
            raise ConfigurationError(
                "The configuration has no eval_set, and the job has an evaluator."
            )
        self._conf, self._data = conf, dataclasses.replace(conf.eval_set, epoch=1)
        self._estimator = estimator_of(conf, tf.estimator.RunConfig(model_dir=conf.model_dir))
        served = BatchFeed(self._data, None).served
        self._exporter = tf.estimator.LatestExporter("best", served)
        self._exports = f"{conf.model_dir}/export/best"

    def run(self) -> None:
        """Evaluate each checkpoint; the job ends this process."""
        launched.imported()  # the next start is a fork that has TensorFlow
        for path in tf.train.checkpoints_iterator(self._conf.model_dir):
            self.evaluate(path)

    def evaluate(self, path: str) -> None:
        """Evaluate a checkpoint, and export its model if its loss is the least so far."""
        feed = BatchFeed(self._data, None)
        try:
            result = self._estimator.evaluate(
                feed.dataset, steps=self._conf.eval_steps, checkpoint_path=path
            )
            if result["loss"] < self._least():
                self._exporter.export(self._estimator, self._exports, path, result, False)
                stored.write(f"{self._exports}/loss", repr(float(result["loss"])).encode())
        except (ValueError, tf.errors.OpError) as error:
            if not stored.is_damage(error, path):
                raise
            logger.warning("%s is not evaluated; it is damaged, or was removed: %s", path, error)

    def _least(self) -> float:
        try:
            with tf.io.gfile.GFile(f"{self._exports}/loss") as file:
                return float(file.read())
        except (tf.errors.NotFoundError, ValueError):
            # A machine that crashes may leave a file without its content.
            return float("inf")
