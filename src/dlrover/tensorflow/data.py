"""A ``tf.data.Dataset`` whose samples are dealt to all workers of a job while they train."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import tensorflow as tf

from dlrover.errors import ConfigurationError
from dlrover.sharding.records import Records
from dlrover.spec.shards import Span

__all__ = ["dataset"]


def dataset(
    records: Records[Any],
    signature: Any,
    *,
    batch_size: int | None = None,
    prepare: Callable[..., Any] | None = None,
    prefetch: int = 2,
) -> tf.data.Dataset:
    """The rest of the epoch of ``records``, each time it is iterated.

    A sample counts as learned from when the training gets it, not when it is read ahead. So say here what is
    to be done with the samples, and add no ``prefetch``, ``shuffle`` or ``batch`` behind: what these read
    ahead would count. Deal in another order with ``shuffle=True`` of `Records`. ``records`` belongs into the
    checkpoint, beside the model.

    Args:
        records: the samples, as numbers, strings, arrays, or dicts and tuples of them.
        signature: what one sample is: ``tf.TensorSpec``, or dicts and tuples of them.
        batch_size: samples in a batch; the last one of an epoch may have fewer. None: no batches.
        prepare: makes an example of a sample, as a function for ``Dataset.map``; in parallel.
        prefetch: examples or batches that are read ahead.

    Raises:
        ConfigurationError: a number is not accepted.
    """
    if prefetch < 0 or (batch_size is not None and batch_size < 1):
        raise ConfigurationError(
            f"prefetch is {prefetch} and batch_size {batch_size}; they must be at least 0 and 1."
        )
    reading = _Reading(records)
    place = tf.TensorSpec([3], tf.int64)
    found = tf.data.Dataset.from_generator(reading, output_signature=(place, signature))
    if prepare is not None:
        found = found.map(
            lambda place, sample: (place, prepare(sample)),
            num_parallel_calls=tf.data.AUTOTUNE,
            deterministic=True,
        )
    if batch_size is not None:
        found = found.batch(batch_size)
    found = found.prefetch(prefetch) if prefetch else found
    options = tf.data.Options()
    options.deterministic = True
    options.experimental_optimization.inject_prefetch = False  # it would be behind the counting
    return found.map(reading.counted).with_options(options)


class _Reading:
    """Reads ahead, and counts what the training gets."""

    def __init__(self, records: Records[Any]) -> None:
        self._records = records
        self._lock = threading.Lock()
        self._ahead: deque[Span] = deque()
        """Read, and not yet with the training."""
        self._over = False

    def __call__(self) -> Iterator[tuple[tuple[int, int, int], Any]]:
        """One epoch, in a thread of TensorFlow."""
        self._over = False
        try:
            for place, sample in self._records.read_ahead():
                with self._lock:
                    self._ahead.append(place)
                yield (place.lane, place.start, place.stop), sample
            with self._lock:
                self._over = True
                self._end_epoch()
        finally:
            if not self._over:  # the training has left the loop
                with self._lock:
                    self._records.put_back(self._ahead)
                    self._ahead.clear()

    def counted(self, places: tf.Tensor, sample: Any) -> Any:
        """The sample, once it counts."""
        noted = tf.py_function(self._note, [places], [])
        with tf.control_dependencies([noted] if noted is not None else []):
            return tf.nest.map_structure(tf.identity, sample)

    def _note(self, places: tf.Tensor) -> None:
        spans = [Span(*place) for place in places.numpy().reshape(-1, 3).tolist()]
        with self._lock:
            self._records.handed_out(spans)
            for _ in spans:
                self._ahead.popleft()
            self._end_epoch()

    def _end_epoch(self) -> None:
        if self._over and not self._ahead:
            self._records.end_epoch()
