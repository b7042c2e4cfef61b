"""A Keras callback that saves a training's progress, and lets ``fit`` continue from it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import tensorflow as tf

from dlrover.errors import ConfigurationError

if TYPE_CHECKING:
    from dlrover.tensorflow.cluster import TrainingProgress


class ProgressCallback(tf.keras.callbacks.Callback):  # type: ignore[misc]
    """Counts the steps of ``fit`` in a `TrainingProgress`."""

    def __init__(self, progress: TrainingProgress) -> None:
        super().__init__()
        self._progress = progress
        self._supports_tf_logs = True  # without it, Keras would wait for each step's result
        self._first = 0  # step at which epoch 0 begins
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
        """Return the epoch and the step in it that come next.

        Raises:
            ConfigurationError: ``fit`` was given no number of steps.
        """
        if self.params["steps"] is None:
            raise ConfigurationError(
                "steps_per_epoch is not known; with the callback of a TrainingProgress, fit needs a number."
            )
        self._first, over = self._progress.begin_fit(initial_epoch * steps_per_epoch)
        place = divmod(self._progress.step - self._first, steps_per_epoch)
        if not over and place < (self.params["epochs"], 0):
            return place
        if not self.model.built and self._progress.build:
            # Keras asks for the variables at the end, and no step makes them.
            self.model.build_from_config(self._progress.build)
        return self.params["epochs"], 0

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        """Note the epoch."""
        self._epoch = epoch

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """Count the steps."""
        self._progress.build = self._progress.build or self.model.get_build_config()
        done = self._first + self._epoch * self.params["steps"] + batch + 1
        self._progress.advance(done - self._progress.step)

    def on_train_end(self, logs: Any = None) -> None:
        """Save."""
        self.model._training_state = None  # noqa: SLF001
        self._progress.save()
