"""The original's names around TensorFlow estimators: readers, columns, and hooks of sessions.

They need no TensorFlow: a session of ``tf.compat.v1`` calls any object that has a hook's methods.
"""

from __future__ import annotations

import abc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from dlrover import launched
from dlrover.original.sharding import ShardingClient
from dlrover.tensorflow.estimators.conf import (
    ConfigurationManagerInterface,
    ConfigurationManagerMeta,
)

__all__ = [
    "Column",
    "ConfigurationManagerInterface",
    "ConfigurationManagerMeta",
    "ElasticDataShardReportHook",
    "ElasticReader",
    "FileReader",
    "GlobalStepHook",
    "ReportModelInfoHook",
]

MINIBATCHES_PER_SHARD = 2


class ElasticReader(abc.ABC):
    """A reader whose records are leased in shards.

    A class of the program's own sets ``_data_nums`` in `count_data`, and returns records from
    ``read_data_by_index_range``.
    """

    def __init__(
        self,
        path: str | None = None,
        num_epochs: int = 1,
        batch_size: int = 64,
        enable_dynamic_sharding: bool = True,
    ) -> None:
        self.path = path
        self._num_epochs, self._batch_size = num_epochs, batch_size
        self.enable_dynamic_sharding = enable_dynamic_sharding
        self.data_shard_client: ShardingClient | None = None
        self._data_nums = 0
        self.count_data()
        if enable_dynamic_sharding:
            self.build_sharding_client()

    def build_sharding_client(self) -> None:
        """Lease the records from now on."""
        self.data_shard_client = ShardingClient(
            self.path or "data", self._batch_size, self._num_epochs, self._data_nums,
            num_minibatches_per_shard=MINIBATCHES_PER_SHARD,
        )  # fmt: skip

    @abc.abstractmethod
    def count_data(self) -> None:
        """Set ``_data_nums``, the number of records."""

    def read_data_by_index_range(self, start_index: int, end_index: int) -> list[Any]:
        """Return the records of a range."""
        raise NotImplementedError(
            f"{type(self).__name__} needs read_data_by_index_range(start, end)."
        )

    def iterator(self) -> Iterator[Any]:
        """Yield this worker's records; without sharding, all of them."""
        client = self.data_shard_client
        if client is None:
            for _ in range(self._num_epochs):
                yield from self.read_data_by_index_range(0, self._data_nums)
            return
        while (shard := client.fetch_shard()) is not None:
            yield from self.read_data_by_index_range(shard.start, shard.end)


class FileReader(ElasticReader):
    """A reader of the lines of a text file."""

    def __init__(  # the original's signature
        self,
        path: str,
        num_epochs: int = 1,
        batch_size: int = 64,
        enable_dynamic_sharding: bool = True,
        skip_header: bool = True,
    ) -> None:
        self.data = Path(path).read_text(encoding="utf-8").splitlines()[skip_header:]
        super().__init__(path, num_epochs, batch_size, enable_dynamic_sharding)

    def count_data(self) -> None:
        """Count the lines."""
        self._data_nums = len(self.data)

    def read_data_by_index_range(self, start_index: int, end_index: int) -> list[str]:
        """Return lines."""
        return self.data[start_index:end_index]


class Column:
    """A column of a data set: ``Column.create(name=..., dtype=..., is_sparse=..., is_label=...)``."""

    def __init__(self, **properties: Any) -> None:
        self.name = self.dtype = None
        self.is_sparse = self.is_label = False
        vars(self).update(properties)

    @classmethod
    def create(cls, **properties: Any) -> Column:
        """Return a column with these properties."""
        return cls(**properties)

    def __repr__(self) -> str:
        return "{" + ";".join(f"{key}={value}" for key, value in vars(self).items()) + "}"


class _Hook:
    """The methods that a session calls."""

    def begin(self) -> None:
        """Do nothing before the graph is complete."""

    def after_create_session(self, session: Any, coord: Any) -> None:
        """Do nothing with a new session."""

    def before_run(self, run_context: Any) -> None:
        """Ask for no tensors."""

    def after_run(self, run_context: Any, run_values: Any) -> None:
        """Do nothing after a step."""

    def end(self, session: Any) -> None:
        """Do nothing at the end."""


class ElasticDataShardReportHook(_Hook):
    """Hook that reports a batch after each step."""

    def __init__(self, sharding_client: ShardingClient) -> None:
        self._sharding_client = sharding_client

    def after_run(self, run_context: Any, run_values: Any) -> None:
        """Report the batch."""
        self._sharding_client.report_batch_done()


class GlobalStepHook(_Hook):
    """Hook that does nothing: an estimator of a configuration counts its steps by itself."""


class ReportModelInfoHook(_Hook):
    """Hook that counts steps, for the job's speed and for the detection of hangs."""

    def after_run(self, run_context: Any, run_values: Any) -> None:
        """Count a step."""
        launched.stepped()
