"""A ``tf.data.Dataset`` whose samples are distributed to all workers of a job during training."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import tensorflow as tf

from dlrover.data.records import Records
from dlrover.errors import ConfigurationError
from dlrover.spec.requests.shards import Span

__all__ = ["dataset"]


def dataset(
    records: Records[Any],
    signature: Any,
    *,
    batch_size: int | None = None,
    prepare: Callable[..., Any] | None = None,
    prefetch: int = 2,
) -> tf.data.Dataset:
    """Return a dataset that yields the rest of the epoch of ``records`` on each iteration.

    A sample counts as learned when the training receives it, not when it is read ahead. So pass all sample
    processing here and do not append ``prefetch``, ``shuffle`` or ``batch``: samples that these read ahead
    would count as learned. To shuffle, use ``shuffle=True`` of `Records`. Save ``records`` in the
    checkpoint, together with the model.

    Args:
        records: the samples: numbers, strings, arrays, or dicts and tuples of them.
        signature: the type of one sample: ``tf.TensorSpec``, or dicts and tuples of them.
        batch_size: samples per batch; the last batch of an epoch may have fewer. None: no batching.
        prepare: function for ``Dataset.map`` that makes an example from a sample; runs in parallel.
        prefetch: number of examples or batches to read ahead.

    Raises:
        ConfigurationError: ``prefetch`` or ``batch_size`` is out of range.
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
    options.experimental_optimization.inject_prefetch = False  # would read ahead after the counting
    return found.map(reading.counted).with_options(options)


class _Reading:
    """Reads ahead and counts the samples that the training receives."""

    def __init__(self, records: Records[Any]) -> None:
        self._records = records
        self._lock = threading.Lock()
        self._ahead: deque[Span] = deque()
        """Spans that were read but have not reached the training."""
        self._over = False

    def __call__(self) -> Iterator[tuple[tuple[int, int, int], Any]]:
        """Yield one epoch, in a TensorFlow thread."""
        self._over = False
        try:
            for place, sample in self._records.read_ahead():
                with self._lock:
                    self._ahead.append(place)
                yield (place.partition, place.start, place.stop), sample
            with self._lock:
                self._over = True
                self._end_epoch()
        finally:
            if not self._over:  # the training left the loop early
                with self._lock:
                    self._records.leave_all()
                    self._ahead.clear()

    def counted(self, places: tf.Tensor, sample: Any) -> Any:
        """Return the sample after it has been counted."""
        noted = tf.py_function(self._note, [places], [])
        with tf.control_dependencies([noted] if noted is not None else []):
            return tf.nest.map_structure(tf.identity, sample)

    def _note(self, places: tf.Tensor) -> None:
        spans = [Span(*place) for place in places.numpy().reshape(-1, 3).tolist()]
        with self._lock:
            self._records.acknowledge(spans)
            for _ in spans:
                self._ahead.popleft()
            self._end_epoch()

    def _end_epoch(self) -> None:
        if self._over and not self._ahead:
            self._records.end_epoch()
