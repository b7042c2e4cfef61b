"""The records of a reader as batches: each is dealt to one worker and counts once the worker has made its step."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any

import tensorflow as tf

from dlrover.data.machine.spans import Part
from dlrover.data.records import Readers, Records
from dlrover.spec.requests.shards import Span
from dlrover.tensorflow.estimators.conf import DataSet

BATCHES_PER_SHARD = 2
"""As in the original."""
AHEAD = 2
"""Batches that are read and parsed ahead."""
TEXT = tf.TensorSpec([None], tf.string)


class BatchFeed:
    """Batches for one session.

    Args:
        data: the reader and its columns.
        readers: how the records are dealt; None: this process reads all of them.
        waits_for_others: end only when all records count, since those of a worker that dies come back.
    """

    def __init__(
        self, data: DataSet, readers: Readers | None, *, waits_for_others: bool = False
    ) -> None:
        self._data, self._reader = data, data.opened()
        self._waits_for_others = waits_for_others
        self._size = size_of(self._reader)
        self.records: Records[int] | None = None
        if readers is not None and getattr(self._reader, "enable_dynamic_sharding", True):
            self.records = Records(
                range(self._size),
                name=str(getattr(self._reader, "path", None) or "data"),
                epochs=data.epoch,
                shard=data.batch_size * BATCHES_PER_SHARD,
            )
            self.records.join(readers)
        first = list(self._reader.read_data_by_index_range(0, 1))
        self._is_text = not first or isinstance(first[0], str | bytes)
        self._changed = threading.Condition()
        self._unlearned: deque[list[Span]] = deque()
        """Places of each batch that was read and whose step was not made, oldest first."""
        self._closed = False

    def dataset(self) -> tf.data.Dataset:
        """Return the batches as features and labels; without label columns, as features."""
        types = tuple(tf.TensorSpec([None], of) for of in self._types())
        signature = TEXT if self._is_text else types
        found = tf.data.Dataset.from_generator(self._batches, output_signature=signature)
        return found.map(self._parsed).prefetch(AHEAD)

    def begin(self) -> None:
        """Begin to read; until then, the master knows the readers of an earlier generation."""
        if self.records is not None:
            self.records.acknowledge(())

    def served(self) -> Any:
        """Return what receives the features of a model that serves."""
        v1 = tf.compat.v1
        features = {
            column.name: v1.sparse_placeholder(column.dtype, [None, None])
            if column.is_sparse
            else v1.placeholder(column.dtype, [None])
            for column in self._data.columns
            if not column.is_label
        }
        return tf.estimator.export.build_raw_serving_input_receiver_fn(features)()

    def learned(self) -> None:
        """Count the oldest batch: its step is made."""
        with self._changed:
            if self.records is None or not self._unlearned:
                return
            self.records.acknowledge(self._unlearned.popleft())
            self._changed.notify_all()

    def flush(self) -> None:
        """Wait until the master knows all that counts."""
        if self.records is not None:
            self.records.flush()

    def close(self) -> None:
        """End the batches: what was not learned is dealt again."""
        with self._changed:
            self._closed = True
            self._unlearned.clear()
            self._changed.notify_all()
        if self.records is not None:
            self.records.close()

    # ---- reading, in a thread of TensorFlow

    def _batches(self) -> Iterator[Any]:
        size, step = self._size, self._data.batch_size
        if self.records is None:
            for _ in range(self._data.epoch):
                for start in range(0, size, step):
                    yield self._batch([Span(0, start, min(size, start + step))])
            return
        for epoch in self.records.until_end():
            yield from self._epoch(
                self.records, last=epoch == self._data.epoch - 1 and self._waits_for_others
            )
            self.records.end_epoch()

    def _epoch(self, records: Records[int], *, last: bool) -> Iterator[Any]:
        """Yield this worker's batches; if this is the ``last`` epoch, also those that dead workers leave behind."""
        patient, found = False, True
        while found and not self._closed:
            batch: list[Span] = []
            found, room = False, self._data.batch_size
            records._patient = patient  # noqa: SLF001
            for part in records.parts():
                found = True
                rest: Part | None = part
                records._patient = False  # noqa: SLF001 - others may wait for the records of this batch
                while rest is not None:
                    piece, rest = rest.cut(room)
                    batch.append(piece.span)
                    room -= len(piece.items)
                    if not room:
                        yield self._batch(batch)
                        batch, room = [], self._data.batch_size
            if batch:
                yield self._batch(batch)
            if not last:
                return
            with self._changed:
                self._changed.wait_for(lambda: self._closed or not self._unlearned)
            patient, found = True, found or not patient

    def _batch(self, spans: list[Span]) -> Any:
        read = self._reader.read_data_by_index_range
        records = [record for span in spans for record in read(span.start, span.stop)]
        with self._changed:
            if self.records is not None and not self._closed:
                self._unlearned.append(spans)
        return records if self._is_text else tuple(map(list, zip(*records, strict=True)))

    def _types(self) -> list[Any]:
        """Return the types of the columns in a record: values that blanks separate are a text."""
        columns = self._data.columns
        return [tf.string if column.is_sparse else column.dtype for column in columns]

    def _parsed(self, *batch: Any) -> Any:
        columns = self._data.columns
        values: Sequence[Any] = batch
        if self._is_text:
            defaults = [tf.constant([""] if of == "string" else [0], of) for of in self._types()]
            values = tf.io.decode_csv(batch[0], defaults, field_delim=self._data.field_delim)
        found = {
            column.name: _sparse(value, column.dtype) if column.is_sparse else value
            for column, value in zip(columns, values, strict=True)
        }
        labels = {column.name: found.pop(column.name) for column in columns if column.is_label}
        if not labels:
            return found
        return found, labels if len(labels) > 1 else next(iter(labels.values()))


def size_of(reader: Any) -> int:
    """Return a reader's number of records."""
    return int(reader._data_nums)  # noqa: SLF001 - the original's name in readers


def _sparse(texts: Any, dtype: str) -> Any:
    """Return the values of texts that separate them by blanks, as a sparse tensor."""
    found = tf.strings.split(texts).to_sparse()
    if tf.as_dtype(dtype) == tf.string:
        return found
    return tf.sparse.map_values(tf.strings.to_number, found, tf.as_dtype(dtype))
