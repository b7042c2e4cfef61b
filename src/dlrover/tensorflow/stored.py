"""The checkpoints of a training's directory: the newest that is whole is restored."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator

import tensorflow as tf

from dlrover.errors import InfrastructureError

logger = logging.getLogger(__name__)
DAMAGED = (tf.errors.DataLossError, tf.errors.OutOfRangeError, IndexError)
"""Errors of files that are not what was written; others say so only in their text."""
AWAY = (
    tf.errors.AbortedError, tf.errors.CancelledError, tf.errors.DeadlineExceededError,
    tf.errors.PermissionDeniedError, tf.errors.ResourceExhaustedError, tf.errors.UnavailableError,
)  # fmt: skip
"""Errors of a storage, or of a server, that may answer later: an older checkpoint would lose steps."""


def manager(
    checkpoint: tf.train.Checkpoint, directory: str, keep: int
) -> tf.train.CheckpointManager:
    """Return a manager of a directory, which keeps ``keep`` checkpoints."""
    try:
        tf.train.get_checkpoint_state(directory)
    except ValueError:  # the list of checkpoints is empty, as a machine that crashes may leave it
        tf.io.gfile.remove(tf.io.gfile.join(directory, "checkpoint"))
    return tf.train.CheckpointManager(checkpoint, directory, keep)


def restore(managed: tf.train.CheckpointManager) -> str | None:
    """Restore the newest checkpoint that is whole, and return its path; None if there is none.

    Raises:
        InfrastructureError: there are some, and all are damaged.
    """
    why = ""
    for path in _newest_first(managed):
        try:
            # Keras makes variables when they are first used; they get their values then.
            managed.checkpoint.restore(path).assert_existing_objects_matched()
        except AWAY:
            raise
        except (*DAMAGED, tf.errors.OpError) as error:
            if not isinstance(error, DAMAGED) and _opens(path):
                raise
            why = str(error).partition("\n")[0]
            logger.warning("%s is damaged, and an older checkpoint is restored: %s", path, why)
            continue
        return path
    if why:
        raise InfrastructureError(
            f"No checkpoint in {managed.directory} can be read ({why}); restore its files, or remove it to train from the"
            " beginning."
        )
    return None


def _newest_first(managed: tf.train.CheckpointManager) -> Iterator[str]:
    """Yield the checkpoints that the directory lists; if it lists none, those whose files are there."""
    known = [*managed.checkpoints, *filter(None, [managed.latest_checkpoint])]
    if not known:
        names = map(re.compile(r"ckpt-(\d+)\.index").fullmatch, _names(managed.directory))
        numbers = sorted(int(name[1]) for name in names if name)
        known = [tf.io.gfile.join(managed.directory, f"ckpt-{number}") for number in numbers]
    yield from dict.fromkeys(reversed(known))


def _names(directory: str) -> list[str]:
    return tf.io.gfile.listdir(directory) if tf.io.gfile.isdir(directory) else []


def _opens(path: str) -> bool:
    """Return whether all files of a checkpoint are there, and the one that lists its values is whole."""
    parts = tf.io.gfile.glob(f"{path}.data-*-of-*")
    try:
        tf.train.load_checkpoint(path)
    except tf.errors.OpError:
        return False
    return {int(part.rpartition("-of-")[2]) for part in parts} == {len(parts)}
