"""A Keras callback that saves a training's progress, and lets ``fit`` continue from it."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import msgspec
import tensorflow as tf

from dlrover.errors import ConfigurationError

if TYPE_CHECKING:
    from dlrover.tensorflow.cluster import Fit, TrainingProgress

logger = logging.getLogger(__name__)


class ProgressCallback(tf.keras.callbacks.Callback):  # type: ignore[misc]
    """Counts the steps of ``fit`` in a `TrainingProgress`."""

    def __init__(self, progress: TrainingProgress) -> None:
        super().__init__()
        self._progress = progress
        self._supports_tf_logs = True  # without it, Keras would wait for each step's result
        self._fit: Fit
        self._steps = 0  # of an epoch
        self._epoch = 0
        self._history: Any = None

    def set_model(self, model: Any) -> None:
        """Note the History beside this callback, which a call of ``evaluate`` replaces in the model."""
        super().set_model(model)
        self._history = model.history

    def on_train_begin(self, logs: Any = None) -> None:
        """Continue at the progress: Keras asks for the first step as after its own BackupAndRestore."""
        self.model._training_state = self  # noqa: SLF001
        # Keras's History ends last: the end is saved with what other callbacks change then, as EarlyStopping does.
        # The model may have one of an earlier ``fit``: a CallbackList of the program's own need not have any.
        beside = self._history is not None and self._history.params is self.params
        (self._history if beside else self).on_train_end = self._end

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
        self._steps = math.ceil(steps_per_epoch)  # NumPy's numbers cannot be saved
        epochs = int(self.params["epochs"])
        self._fit, place = self._progress.begin_fit(self._steps, (int(initial_epoch), epochs))
        if place is None and not self.model.built and self._fit.build:
            self._build()
        return place or (epochs, 0)

    def _build(self) -> None:
        """Make the variables, for which Keras asks at the end of ``fit``: no step does so."""
        try:
            self.model.build_from_config(self._fit.build)
        except Exception as error:  # noqa: BLE001 - of the model's own code; the model may do without
            logger.warning("%s has no variables before it is called: %s", self.model.name, error)

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        """Note the epoch."""
        self._epoch = epoch

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """Count the steps."""
        self._fit.build = self._fit.build or _build_config(self.model)
        done = self._fit.first + self._epoch * self._steps + batch + 1
        self._progress.advance(int(done) - self._progress.step)

    def _end(self, logs: Any = None) -> None:
        self.model._training_state = None  # noqa: SLF001
        self._progress.end_fit(self._fit)


def _build_config(model: Any) -> Any:
    """Return a model's ``get_build_config`` as MessagePack has it; None if it has something else."""
    try:
        return msgspec.msgpack.decode(
            msgspec.msgpack.encode(model.get_build_config(), enc_hook=_plain)
        )
    except TypeError:
        return None


def _plain(value: Any) -> Any:
    if isinstance(value, tf.TensorShape):
        return value.as_list() if value.rank is not None else None
    if isinstance(value, Mapping):  # Keras wraps what a model has as an attribute
        return dict(value)
    raise TypeError(value)
