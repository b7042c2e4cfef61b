"""The checkpoints of a training's directory: the newest that is whole is restored."""

from __future__ import annotations

import logging
import re

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
    listed(directory)  # the manager refuses an empty list
    return tf.train.CheckpointManager(checkpoint, directory, keep)


def restore(managed: tf.train.CheckpointManager) -> str | None:
    """Restore the newest checkpoint that is whole, and return its path; None if there is none.

    Raises:
        InfrastructureError: there are some, and all are damaged.
    """
    why = ""
    for path in newest_first(managed.directory):
        try:
            # Keras makes variables when they are first used; they get their values then.
            managed.checkpoint.restore(path).assert_existing_objects_matched()
        except (IndexError, tf.errors.OpError) as error:
            if not is_damage(error, path):
                raise
            why = str(error).partition("\n")[0]
            logger.warning("%s is damaged, and an older checkpoint is restored: %s", path, why)
            continue
        return path
    if why:
        raise InfrastructureError(all_damaged(managed.directory, why))
    return None


def is_damage(error: BaseException, path: str) -> bool:
    """Return whether an error of restoring a checkpoint means that its files are not what was written."""
    return isinstance(error, DAMAGED) or not (isinstance(error, AWAY) or _opens(path))


def all_damaged(directory: str, why: str) -> str:
    """Return the error for a directory without a whole checkpoint."""
    return f"No checkpoint in {directory} can be read ({why}); restore its files, or remove it to train from the beginning."


def listed(directory: str) -> list[str]:
    """Return the checkpoints that a directory lists, the newest first; remove a list that is empty.

    A machine that crashes may leave such a list, and TensorFlow refuses the directory then.
    """
    try:
        state = tf.train.get_checkpoint_state(directory)
    except ValueError:
        tf.io.gfile.remove(tf.io.gfile.join(directory, "checkpoint"))
        return []
    if state is None:
        return []
    return [
        *dict.fromkeys((state.model_checkpoint_path, *reversed(state.all_model_checkpoint_paths)))
    ]


def remove_unfinished(directory: str, name: str = "ckpt") -> None:
    """Remove what saves that did not come to their end have left, which may be as large as a checkpoint."""
    unfinished = re.compile(rf"{re.escape(name)}-\d+_temp/?")
    for found in filter(unfinished.fullmatch, _names(directory)):
        logger.info("Removing %s of %s, which was not saved to its end", found, directory)
        tf.io.gfile.rmtree(tf.io.gfile.join(directory, found))


def newest_first(directory: str, name: str = "ckpt") -> list[str]:
    """Return the checkpoints that a directory lists; if it lists none, those whose files are there, as ``NAME-30.index``."""
    found = map(re.compile(rf"{re.escape(name)}-(\d+)\.index").fullmatch, _names(directory))
    numbers = sorted((int(match[1]) for match in found if match), reverse=True)
    return listed(directory) or [
        tf.io.gfile.join(directory, f"{name}-{number}") for number in numbers
    ]


def write(path: str, content: bytes) -> None:
    """Write a file, so that its path has all of the content or what was there before."""
    with tf.io.gfile.GFile(f"{path}.new", "wb") as file:
        file.write(content)
    tf.io.gfile.rename(f"{path}.new", path, overwrite=True)


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
