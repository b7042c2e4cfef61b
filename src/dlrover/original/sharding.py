"""The original's sharding clients, on the shards that `dlrover.data` leases."""

from __future__ import annotations

import json
import logging
import multiprocessing
import os
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from dlrover.data.machine.order import Shuffled
from dlrover.data.records import Records
from dlrover.errors import ConfigurationError
from dlrover.spec.requests.shards import Span

logger = logging.getLogger(__name__)

TRAINING = 0
"""The type of tasks that train."""
_PACKED = ("acknowledged", "base", "settled")
"""Fields of a state that are bytes."""
KINDS = ("", "text", "table")
"""Accepted kinds of storage. ``text`` shuffles records; the others shuffle shards."""


@dataclass(frozen=True)
class Shard:
    """A range of records to train on."""

    name: str
    start: int
    end: int
    indices: list[int] = field(default_factory=list)
    """The records, if they are not those of the range."""


class ShardingClient:
    """Shards of a dataset, each leased to one worker, and to another one if that dies before it reports.

    Records count once `report_batch_done` has reported them.

    Args:
        dataset_name: distinguishes the datasets of a job.
        batch_size: records that `report_batch_done` reports.
        num_epochs: number of times that each record is leased; 0 or less: endlessly.
        dataset_size: number of records.
        shuffle: use another order in each epoch.
        task_type: has no effect.
        num_minibatches_per_shard: batches in a shard.
        storage_type: ``text`` to shuffle records (`Shard.indices` has them); else shards are shuffled.
    """

    def __init__(  # noqa: PLR0913 - the original's signature
        self,
        dataset_name: str,
        batch_size: int,
        num_epochs: int,
        dataset_size: int,
        shuffle: bool = False,
        task_type: Any = TRAINING,
        num_minibatches_per_shard: int = 10,
        storage_type: str = "",
    ) -> None:
        if storage_type not in KINDS:
            raise ConfigurationError(
                f"storage_type is {storage_type!r}; it must be one of {', '.join(map(repr, KINDS))}. For a stream, use"
                " dlrover.data.ElasticDataset with the address of its broker."
            )
        self._name, self._batch_size = dataset_name, batch_size
        self._size, self._epochs = dataset_size, max(0, num_epochs)
        self._shard = max(1, batch_size * num_minibatches_per_shard)
        self._by_record = shuffle and storage_type == "text"
        self._by_shard = shuffle and not self._by_record
        self._records: Records[int] = self._made()
        self._parts = self._fetched()
        self._lock = threading.RLock()
        self._pending: deque[Span] = deque()
        """Records of each shard that was fetched and not reported yet, oldest first."""
        self._base = 0

    def _made(self) -> Records[int]:
        return Records(
            range(self._size), name=self._name, epochs=self._epochs, shard=self._shard, shuffle=self._by_record
        )  # fmt: skip

    # ---- shards

    def fetch_shard(self) -> Shard | None:
        """Return the next shard, or a part of one; None if all epochs are over for this worker."""
        # Whoever has records to report must come to that; others wait for what a dead worker may leave.
        self._records._patient = not self._pending  # noqa: SLF001
        found = next(self._parts, None)
        if found is None:
            return None
        shard, span = found
        with self._lock:
            self._pending.append(span)
        return shard

    def _fetched(self) -> Iterator[tuple[Shard, Span]]:
        records = self._records
        for _ in records.until_end():
            for part in records.parts():
                rest: Any = part
                while rest is not None:
                    span = rest.span
                    piece, rest = rest.cut(self._shard - span.start % self._shard)
                    yield self._shard_of(piece.span, piece.items), piece.span
            records.end_epoch()

    def _shard_of(self, span: Span, items: Sequence[int]) -> Shard:
        if self._by_record:
            return Shard(self._name, span.start, span.stop, list(items))
        start = span.start
        full = self._size // self._shard  # an incomplete last shard stays the last
        if self._by_shard and start // self._shard < full:
            order = Shuffled(full, 0, span.partition)
            start = order.record(start // self._shard) * self._shard + start % self._shard
        return Shard(self._name, start, start + span.stop - span.start)

    # ---- reports

    def report_batch_done(
        self, batch_size: int | None = None, err_msg: str = "", task_ids: Sequence[int] = ()
    ) -> bool:
        """Report the oldest fetched records as trained on; return True if a shard is complete.

        With ``err_msg``, the records are read again instead, here or elsewhere.
        """
        left, completed = batch_size or self._batch_size, False
        with self._lock:
            if err_msg:
                self.report_all_task_error(err_msg)
                return False
            while left > 0 and self._pending:
                span = self._pending[0]
                count = min(left, span.stop - span.start)
                self._records.acknowledge([Span(span.partition, span.start, span.start + count)])
                left -= count
                if span.start + count == span.stop:
                    self._pending.popleft()
                    completed = True
                else:
                    self._pending[0] = Span(span.partition, span.start + count, span.stop)
        return completed

    def report_all_task_error(self, err_msg: str) -> None:
        """Give back all records that were fetched and not reported."""
        with self._lock:
            logger.warning("Records of %s are read again: %s", self._name, err_msg)
            self._records.put_back(self._pending)
            self._pending.clear()

    # ---- checkpoints

    def get_shard_checkpoint(self) -> str:
        """Return what this worker has reported, as JSON; each rank saves its own."""
        state = self._records.state_dict()
        return json.dumps({**state, **{key: state[key].hex() for key in _PACKED}})

    def restore_shard_from_checkpoint(self, shard_checkpoint: str | Sequence[str]) -> bool:
        """Continue from a checkpoint of one worker, or from those of all ranks that saved; return True."""
        texts = [shard_checkpoint] if isinstance(shard_checkpoint, str) else shard_checkpoint
        states = [json.loads(text) for text in texts]
        for state in states:
            for key in state.keys() & set(_PACKED):  # an earlier version has not all of them
                state[key] = bytes.fromhex(state[key])
        with self._lock:
            self._records.load_rank_states(states)
            self._pending.clear()
            self._parts = self._fetched()
        return True

    def reset_dataset(self) -> None:
        """Read the dataset from its beginning."""
        with self._lock:
            self._records.close()
            self._base += 1
            self._name = f"{self._name.partition(' again ')[0]} again {self._base}"
            self._records, self._parts = self._made(), iter(())
            self._parts = self._fetched()
            self._pending.clear()

    def get_minibatch_count_per_epoch(self) -> int:
        """Return the number of whole batches of an epoch."""
        return self._size // self._batch_size

    def get_total_sample_num(self) -> int:
        """Return the records of all epochs."""
        return self._size * self._epochs


class IndexShardingClient(ShardingClient):
    """A sharding client that hands out the numbers of single records, also to forked processes of a data loader.

    ``num_workers`` has no effect: any number of processes may ask.
    """

    def __init__(self, *args: Any, num_workers: int = 1, **options: Any) -> None:
        super().__init__(*args, **options)
        self._filling = 0
        """Number of the thread that fills the queue; it ends when there is a later one."""
        self._begin()

    def _begin(self) -> None:
        context = multiprocessing.get_context("fork")
        self._queue = context.SimpleQueue()
        self._room = context.Semaphore(self._shard)
        self._filling += 1
        self._thread: threading.Thread | None = None

    def _fill(self, number: int) -> None:
        while number == self._filling and (shard := self.fetch_shard()) is not None:
            for index in shard.indices or range(shard.start, shard.end):
                self._room.acquire()
                self._queue.put(index)
        self._queue.put(None)

    def start(self) -> None:
        """Begin to fetch; before processes that ask are forked."""
        if self._thread is None and os.getpid() == self._records._pid:  # noqa: SLF001
            self._thread = threading.Thread(
                target=self._fill, args=(self._filling,), name="dlrover-indices", daemon=True
            )
            self._thread.start()

    def fetch_sample_index(self) -> int:
        """Return the number of the next record.

        Raises:
            StopIteration: all epochs are over for this worker.
        """
        self.start()
        index = self._queue.get()
        if index is None:
            self._queue.put(None)  # for the next one who asks
            raise StopIteration
        self._room.release()
        return int(index)

    def restore_shard_from_checkpoint(self, shard_checkpoint: str | Sequence[str]) -> bool:
        """Continue from a checkpoint, with an empty queue."""
        self._begin()
        return super().restore_shard_from_checkpoint(shard_checkpoint)


class ElasticDataset:
    """A dataset of ATorch: the program's own class reads one sample, by its number.

    Use it with ``DataLoader(dataset, batch_size=...)``, and report each batch.

    Args:
        name: distinguishes the datasets of a job.
        dataset_size: number of samples.
        batch_size: samples of a batch.
        epochs: number of epochs.
        shuffle: use another order in each epoch.
        num_minibatches_per_shard: batches in a shard.
    """

    def __init__(
        self,
        name: str,
        dataset_size: int,
        batch_size: int,
        epochs: int,
        shuffle: bool = False,
        num_minibatches_per_shard: int = 2,
    ) -> None:
        self._shard_client = IndexShardingClient(
            name, batch_size, epochs, dataset_size, shuffle, TRAINING, num_minibatches_per_shard, "text"
        )  # fmt: skip

    def __len__(self) -> int:
        """Return the samples of all epochs; a worker gets fewer."""
        self._shard_client.start()  # a loader asks for the length before it forks
        return self._shard_client.get_total_sample_num()

    def __getitem__(self, _: int) -> Any:
        return self.read_sample(self._shard_client.fetch_sample_index())

    def __getitems__(self, indices: Sequence[int]) -> list[Any]:
        """Return the samples of a batch; fewer, if no more are left.

        Raises:
            StopIteration: none are left.
        """
        samples: list[Any] = []
        try:
            for index in indices:
                samples.append(self[index])  # noqa: PERF401 - what was read so far counts
        except StopIteration:
            if not samples:
                raise
        return samples

    def read_sample(self, index: int) -> Any:
        """Return the sample with a number; the program's class says how."""
        raise NotImplementedError(f"{type(self).__name__} needs a method read_sample(index).")

    def report_batch_done(self, batch_size: int | None = None) -> None:
        """Report a batch as trained on."""
        self._shard_client.report_batch_done(batch_size)

    def state_dict(self) -> dict[str, str]:
        """Return what this worker has reported."""
        return {"shards": self._shard_client.get_shard_checkpoint()}

    def load_state_dict(self, state: dict[str, str]) -> None:
        """Continue from a saved state."""
        self._shard_client.restore_shard_from_checkpoint(state["shards"])


class SimpleElasticDataset(ElasticDataset):
    """An `ElasticDataset` whose samples a function reads."""

    def __init__(
        self,
        name: str,
        data_process_fn: Callable[[int], Any],
        dataset_size: int,
        batch_size: int,
        epochs: int,
        shuffle: bool = False,
        num_minibatches_per_shard: int = 2,
    ) -> None:
        super().__init__(name, dataset_size, batch_size, epochs, shuffle, num_minibatches_per_shard)
        self.data_process_fn = data_process_fn

    def read_sample(self, index: int) -> Any:
        """Return the sample with a number."""
        return self.data_process_fn(index)
