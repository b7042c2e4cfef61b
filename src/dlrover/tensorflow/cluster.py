"""What a guarded training function gets: the present cluster, and its progress with checkpoints."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from typing import Any

import msgspec
import tensorflow as tf

from dlrover import launched
from dlrover._util import decoding
from dlrover.data.records import Records
from dlrover.errors import ConfigurationError
from dlrover.spec.node import CHIEF
from dlrover.tensorflow import stored
from dlrover.tensorflow.machine.options import GuardOptions
from dlrover.tensorflow.watch import ClusterChangedError, Watch

logger = logging.getLogger(__name__)
_SAME = "a training function must make the same calls in the same order each time, also those that are over"


class Present:
    """The tasks that a call of the training function works with."""

    def __init__(
        self,
        role: str,
        spec: Mapping[str, list[str]],
        options: GuardOptions,
        attempt: int = 0,
        reached: int = 0,
        began: dict[str, Any] | None = None,
    ) -> None:
        self.role = role
        """``chief``, or ``evaluator``."""
        self.spec = spec
        """Addresses by role, as for ``tf.train.ClusterSpec``."""
        self.attempt = attempt
        """Number of the call in this process, from 0."""
        self.reached = reached
        """The furthest step of the calls before."""
        self.began: dict[str, Any] = {} if began is None else began
        """By name, the state that records had in the first call of this process."""
        self.directory = options.checkpoint
        """Directory of the checkpoints."""
        self.watch: Watch | None = None
        self.progress: TrainingProgress | None = None
        self._options = options

    def strategy(self, **options: Any) -> tf.distribute.ParameterServerStrategy:
        """Return a strategy for these tasks.

        Args:
            options: those of ``tf.distribute.ParameterServerStrategy``, as ``variable_partitioner``.

        Raises:
            ConfigurationError: this is an evaluator.
        """
        if self.role != CHIEF:
            raise ConfigurationError(
                f"cluster.role is {self.role!r}, which uses no parameter servers; cluster.strategy is for the chief."
            )
        resolver = tf.distribute.cluster_resolver.SimpleClusterResolver(
            tf.train.ClusterSpec(self.spec), task_type=self.role, task_id=0, rpc_layer="grpc"
        )
        return tf.distribute.ParameterServerStrategy(resolver, **options)

    def resume(
        self,
        coordinator: Any,
        *,
        records: Records[Any] | None = None,
        **objects: Any,
    ) -> TrainingProgress:
        """Restore the latest checkpoint, if there is one, and return the progress that saves the next ones.

        Args:
            coordinator: the ``ClusterCoordinator``, or the strategy.
            records: samples that the chief reads: they continue where the checkpoint was saved.
            objects: what the checkpoint holds, as for ``tf.train.Checkpoint``: ``model=model``.

        Raises:
            ConfigurationError: `resilient` was given no directory.
        """
        if not self.directory:
            raise ConfigurationError(
                'checkpoint is ""; resume needs a directory, as in @resilient(checkpoint="out/ckpt").'
            )
        if isinstance(coordinator, tf.distribute.Strategy):
            coordinator = tf.distribute.coordinator.ClusterCoordinator(coordinator)
        self.progress = TrainingProgress(self, coordinator, self._options, records, objects)
        return self.progress

    @property
    def step(self) -> int:
        """Number of the last step; -1 if the program does not report it."""
        return self.progress.step if self.progress is not None else -1

    def close(self) -> None:
        """End the attempt: samples that were read ahead go back."""
        if self.progress is not None and self.progress.records is not None:
            self.progress.records.close()


class Fit(msgspec.Struct):
    """A call of Keras's ``fit``."""

    first: int
    """Step at which its epoch 0 begins."""
    epochs: tuple[int, int]
    """Its ``initial_epoch`` and ``epochs``."""
    build: Any = None
    """How the variables of its model are made without data; None: not known."""
    ended: bool = False
    """Whether it has ended, be it before its last epoch."""


class _State(tf.train.experimental.PythonState):  # type: ignore[misc]
    """The step, the samples and the calls of ``fit``, as a checkpoint holds them."""

    def __init__(self, progress: TrainingProgress) -> None:
        self._progress = progress
        self.found: dict[str, Any] = {}

    def serialize(self) -> bytes:
        """Return the state for a checkpoint."""
        records = self._progress.records
        data = records.state_dict() if records is not None else None
        made = self._progress
        return msgspec.msgpack.encode({"step": made.step, "records": data, "fits": made.fits})

    def deserialize(self, data: bytes) -> None:
        """Take the state from a checkpoint."""
        self.found = msgspec.msgpack.decode(data)


class TrainingProgress:
    """Steps of a training, and its checkpoints."""

    def __init__(
        self,
        cluster: Present,
        coordinator: Any,
        options: GuardOptions,
        records: Records[Any] | None,
        objects: Mapping[str, Any],
    ) -> None:
        self.step = 0
        """Steps that were scheduled, from the start of the training."""
        self.fits: list[Fit] = []
        """The calls of Keras's ``fit`` that have begun."""
        self.records = records
        self.coordinator = coordinator
        self._cluster, self._options = cluster, options
        self._state = _State(self)
        if cluster.role == CHIEF:  # an evaluator may come while the chief saves
            stored.remove_unfinished(options.checkpoint)
        self._manager = stored.manager(
            tf.train.Checkpoint(dlrover=self._state, **objects), options.checkpoint, options.keep
        )
        self._former = False
        """Whether an earlier version of DLRover saved the step: the epoch 0 of each call of ``fit`` began at step 0."""
        self._restore()
        self._restored = self.step
        launched.loaded(self.step)
        self._saved_at, self._saved_step = time.monotonic(), self.step
        self._fits_begun = 0  # in this call of the training function

    def _restore(self) -> None:
        path = stored.restore(self._manager)
        if path is not None:
            self.step = self._state.found["step"]
            if "fits" in self._state.found:
                self.fits = decoding.convert(self._state.found["fits"], list[Fit])
            else:
                self._former = self.step > 0
            logger.info("Restored step %d from %s", self.step, path)
        records, began = self.records, self._cluster.began
        if records is None:
            return
        if records.name not in began:
            began[records.name] = records.state_dict()
        state = began[records.name] if path is None else self._state.found["records"]
        if state is None:
            raise ConfigurationError(
                f"{path} has no position of records; it was saved without records."
            )
        if path is not None or self._cluster.attempt:
            records.load_state_dict(state)

    def schedule(self, function: Any, args: Any = None, kwargs: Any = None) -> Any:
        """Schedule a step as ``ClusterCoordinator.schedule`` does, and call `advance`."""
        result = self.coordinator.schedule(function, args=args, kwargs=kwargs)
        self.advance()
        return result

    def advance(self, steps: int = 1) -> None:
        """Count steps that were scheduled; save if that is due.

        Raises:
            ClusterChangedError: the cluster is to be built again; everything so far is saved.
        """
        before, self.step = self.step, self.step + steps
        repeated = max(0, min(self.step, self._cluster.reached) - before)
        for _ in range(steps - repeated):
            launched.stepped()
        watch = self._cluster.watch
        if watch is not None and (change := watch.change()).reason:
            if not change.lost:  # else only the last checkpoint is known to be whole
                self.save()
            raise ClusterChangedError(f"{change.reason}.")
        options = self._options
        late = time.monotonic() - self._saved_at >= options.every_seconds
        many = options.every_steps and self.step - self._saved_step >= options.every_steps
        if late or many:
            self.save()

    def join(self) -> None:
        """Wait for all steps, and save."""
        self.save()

    def save(self) -> None:
        """Wait for all scheduled steps and save, unless this step is saved."""
        self.coordinator.join()
        latest = self._manager.latest_checkpoint
        if self.step != self._saved_step or latest is None:
            # A save that is killed leaves the one before whole, also if both are of the same step.
            after = int(latest.rpartition("-")[2]) + 1 if latest is not None else 0
            self._manager.save(checkpoint_number=max(self.step, after))
        self._saved_at, self._saved_step = time.monotonic(), self.step

    def begin_fit(self, steps: int, epochs: tuple[int, int]) -> tuple[Fit, tuple[int, int] | None]:
        """Return the next call of ``fit``, and its next epoch and the step in it; None: nothing is left to do.

        Args:
            steps: steps of an epoch.
            epochs: ``initial_epoch`` and ``epochs``.

        Raises:
            ConfigurationError: nothing is left of the call that was restored, and this one is another.
        """
        number, self._fits_begun = self._fits_begun, self._fits_begun + 1
        known = number < len(self.fits)
        if not known:
            old = self._former and self.step == self._restored
            self.fits.append(Fit(0 if old else self.step - epochs[0] * steps, epochs))
        fit, last = self.fits[number], self._fits_begun == len(self.fits)
        place = divmod(self.step - fit.first, steps)
        left = last and place < (epochs[1], 0) and not (fit.ended and fit.epochs == epochs)
        other = not last and fit.epochs != epochs
        if known and not left and (other or self.step != self._restored):
            raise ConfigurationError(
                f"call {number + 1} of fit has initial_epoch={epochs[0]} and epochs={epochs[1]} at step {self.step}; call"
                f" {number + 1} before had {fit.epochs[0]} and {fit.epochs[1]}, and was over at step {self._restored};"
                f" {_SAME}."
            )
        if known:
            rest = f"continues at epoch {place[0]}" if left else "is over"
            logger.info("Call %d of fit, for epochs %d to %d, %s", number + 1, *epochs, rest)
        if last:
            fit.epochs, fit.ended = epochs, not left
        return fit, place if left else None

    def end_fit(self, fit: Fit) -> None:
        """Save that a call of ``fit`` has ended."""
        if not fit.ended:
            fit.ended, self._saved_step = True, -1
        self.save()

    def check_fits(self) -> None:
        """Check that the function has made all restored calls of ``fit``, if it has made any.

        Raises:
            ConfigurationError: it has not, so it may have skipped one that has not ended.
        """
        if 0 < self._fits_begun < len(self.fits):
            raise ConfigurationError(
                f"the function made {self._fits_begun} calls of fit, and {len(self.fits)} before, up to step"
                f" {self._restored}; {_SAME}."
            )

    def callback(self) -> Any:
        """Return a callback for ``fit`` of a Keras model with the same strategy: it counts and saves."""
        from dlrover.tensorflow.callback import ProgressCallback  # noqa: PLC0415 - it imports Keras

        return ProgressCallback(self)
