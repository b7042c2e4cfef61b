"""Positions in the data, in a file beside each checkpoint of an estimator: ``model.ckpt-100.records``."""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Callable
from typing import Any

import tensorflow as tf

from dlrover import launched
from dlrover.data.records import Records
from dlrover.data.services import connect
from dlrover.errors import InfrastructureError
from dlrover.spec.requests import Unanswered
from dlrover.spec.requests.shards import LookShards, ShardReply
from dlrover.tensorflow import stored
from dlrover.tensorflow.estimators.session import ClusterMember
from dlrover.tensorflow.machine.plan import Positions, positions_of
from dlrover.tensorflow.watch import ClusterChangedError

logger = logging.getLogger(__name__)
SUFFIX = ".records"


def beside(checkpoint: str) -> Positions | None:
    """Return the positions that belong to a checkpoint; None if it has none.

    Raises:
        ProtocolError: the file is damaged.
    """
    try:
        with tf.io.gfile.GFile(checkpoint + SUFFIX, "rb") as file:
            return positions_of(file.read())
    except tf.errors.NotFoundError:
        logger.warning("%s has no positions: the data are read from their beginning", checkpoint)
        return None


class PositionSaver(tf.compat.v1.train.CheckpointSaverListener):  # type: ignore[misc]
    """Lets the others pause while the chief saves, and writes the positions before the checkpoint.

    A step is saved twice only at the positions of the first time: after a loss, the training goes on from its
    newest checkpoint. So a file that is written before a crash is right for the checkpoint that is there.
    """

    def __init__(self, member: ClusterMember, model_dir: str, alive: Callable[[int], bool]) -> None:
        self._member, self._directory, self._alive = member, model_dir, alive

    def before_save(self, session: Any, global_step_value: int) -> None:
        """Count what was made, and write the positions."""
        member = self._member
        if member.lost:  # the batches ended before the data did, and the chief may have begun anew
            raise ClusterChangedError("a parameter server was lost.")
        launched.saving(int(global_step_value))
        member.made()
        if member.step >= 0:  # else no worker has a session yet
            member.pause_others(session, self._alive)
        records = member.feed.records
        if records is None:
            return
        acknowledged = self._acknowledged(records) if member.step >= 0 else member.plan.base
        known = Positions(records.name, len(records.source), acknowledged)
        path = f"{self._directory}/model.ckpt-{global_step_value}{SUFFIX}"
        stored.write(path, known.packed())

    def _acknowledged(self, records: Records[int]) -> bytes:
        records.flush()
        with contextlib.closing(connect()) as service:
            reply = service.ask(LookShards(records.name))
        if isinstance(reply, ShardReply):
            return reply.packed
        why = (reply.away or reply.refused) if isinstance(reply, Unanswered) else "no reply"
        raise InfrastructureError(f"The master does not tell what was read: {why}")

    def after_save(self, session: Any, global_step_value: int) -> None:
        """Let the others go on; remove the positions of checkpoints that are gone."""
        if self._member.step >= 0 and not self._member.stopped:
            self._member.go_on(session)
        state = tf.train.get_checkpoint_state(self._directory)
        # Names alone: a path of the model's directory may be written in several ways.
        paths = state.all_model_checkpoint_paths if state else ()
        kept = {f"{os.path.basename(path)}{SUFFIX}" for path in paths}
        for path in tf.io.gfile.glob(os.path.join(self._directory, f"model.ckpt-*{SUFFIX}")):
            if os.path.basename(path) not in kept:
                tf.io.gfile.remove(path)
