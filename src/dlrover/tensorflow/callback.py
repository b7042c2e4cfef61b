"""A Keras callback that saves a training's progress, and lets ``fit`` continue from it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import tensorflow as tf

if TYPE_CHECKING:
    from dlrover.tensorflow.cluster import TrainingProgress


class ProgressCallback(tf.keras.callbacks.Callback):  # type: ignore[misc]
    """Counts the steps of ``fit`` in a `TrainingProgress`."""

    def __init__(self, progress: TrainingProgress) -> None:
        super().__init__()
        self._progress = progress
        self._supports_tf_logs = True  # without it, Keras would wait for each step's result
        self._epoch = 0

    def on_train_begin(self, logs: Any = None) -> None:
        """Continue at the progress: Keras asks for the first step as after its own BackupAndRestore."""
        self.model._training_state = self  # noqa: SLF001

    def maybe_load_initial_counters_from_ckpt(
        self,
        steps_per_epoch: int,
        initial_epoch: int,
        mode: str = "",
    ) -> tuple[int, int]:
        """Return the epoch and the step in it that come next."""
        return (
            divmod(self._progress.step, steps_per_epoch)
            if self._progress.step
            else (initial_epoch, 0)
        )

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        """Note the epoch."""
        self._epoch = epoch

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """Count the steps."""
        done = self._epoch * self.params["steps"] + batch + 1
        self._progress.advance(done - self._progress.step)

    def on_train_end(self, logs: Any = None) -> None:
        """Save."""
        self.model._training_state = None  # noqa: SLF001
        self._progress.save()
