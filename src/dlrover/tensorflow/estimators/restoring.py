"""Which checkpoint a generation begins with: the newest of the model's directory that is whole."""

from __future__ import annotations

import logging

import tensorflow as tf

from dlrover.errors import InfrastructureError, ProtocolError
from dlrover.tensorflow import stored
from dlrover.tensorflow.estimators.conf import EstimatorConf
from dlrover.tensorflow.estimators.feed import size_of
from dlrover.tensorflow.estimators.positions import SUFFIX, beside

logger = logging.getLogger(__name__)
NAME = "model.ckpt"
"""Name that estimators give their checkpoints, before the number of the step."""


class Restoring:
    """Chooses the checkpoint that TensorFlow restores, and passes over damaged ones."""

    def __init__(self, conf: EstimatorConf) -> None:
        self._conf = conf
        self._path = ""
        self._damaged: dict[str, str] = {}
        """Checkpoints that could not be restored since the last `done`, and why."""

    def choose(self) -> bytes:
        """Let the next session restore the newest checkpoint that is whole; return what its model has learned from.

        Raises:
            InfrastructureError: there are checkpoints, and all are damaged.
            ConfigurationError: the chosen one is for more or fewer records.
        """
        directory = self._conf.model_dir
        stored.remove_unfinished(directory, NAME)
        known = stored.newest_first(directory, NAME)
        while whole := [path for path in known if path not in self._damaged]:
            self._path = whole[0]
            try:
                positions = beside(self._path)
            except ProtocolError as error:
                self._pass_over(error)
                continue
            # TensorFlow restores the newest of the list, and removes the oldest.
            order = [*whole, *(path for path in known if path in self._damaged)]
            if order != stored.listed(directory):
                tf.compat.v1.train.update_checkpoint_state(directory, order[0], order[::-1])
            if positions is None:
                return b""
            positions.check(self._path + SUFFIX, size_of(self._conf.train_set.opened()))
            return positions.acknowledged
        self._path = ""
        if known:
            raise InfrastructureError(stored.all_damaged(directory, self._damaged[known[0]]))
        return b""

    def is_damaged(self, error: BaseException) -> bool:
        """Return whether a session was not made because the checkpoint is damaged; it is passed over then."""
        known = isinstance(error, tf.errors.OpError | ValueError)
        if not (self._path and known and stored.is_damage(error, self._path)):
            return False
        self._pass_over(error)
        return True

    def done(self) -> None:
        """Note that the checkpoint is restored; from now on, those passed over are the oldest of the list."""
        self._damaged.clear()

    def _pass_over(self, error: BaseException) -> None:
        why = self._damaged[self._path] = str(error).partition("\n")[0]
        logger.warning("%s is damaged, and an older checkpoint is restored: %s", self._path, why)
