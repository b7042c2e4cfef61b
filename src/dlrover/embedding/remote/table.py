"""Tables on the embedding servers of this process's job."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np

from dlrover import launched
from dlrover.embedding.remote.client import TIMEOUT, ServerGroup
from dlrover.embedding.remote.directory import JobDirectory
from dlrover.embedding.remote.saving import TableCheckpoints
from dlrover.embedding.table import HashTable, as_gradients, as_words, like
from dlrover.errors import ConfigurationError
from dlrover.spec.requests.placement import MAX_NAME


class RemoteTable:
    """A table whose rows lie on the job's embedding servers; what it has of `HashTable`'s methods does the same.

    A request waits for a server that starts, comes back or moves, as long as `ServerGroup` says.

    Args:
        group: Connections to the servers.
        name: Name of the table in the job.
        made: An empty table with the options.

    Raises:
        ConfigurationError: The table is open with other options.
    """

    def __init__(self, group: ServerGroup, name: str, made: HashTable) -> None:
        self.name, self.dim, self.options = name, made.dim, made.options
        self._group = group
        self._number = group.open(name, made.options.json())

    def lookup(self, keys: Any) -> Any:
        """Return rows of keys, ``(n, dim)`` float32; a key that is admitted now gets a row, others read zeros."""
        return self._rows(keys, insert=True)

    def peek(self, keys: Any) -> Any:
        """Return rows of keys, ``(n, dim)`` float32; missing ones read zeros. This is no use of a row."""
        return self._rows(keys, insert=False)

    def _rows(self, keys: Any, *, insert: bool) -> Any:
        words = as_words(keys).view(np.int64)
        return like(self._group.rows(self._number, self.dim, words, insert=insert), keys)

    def update(self, keys: Any, gradients: Any) -> None:
        """Apply gradients ``(n, dim)`` to the rows of keys, each once, whatever fails on the way."""
        words = as_words(keys).view(np.int64)
        given = as_gradients(gradients, (len(words), self.dim))
        self._group.push(self._number, words, given)

    def evict(self) -> int:
        """Remove what has expired in all tables of the servers; return how many rows that were."""
        return self._group.evict()

    def __eq__(self, other: object) -> bool:
        return isinstance(other, RemoteTable) and self._place == other._place

    def __hash__(self) -> int:
        return hash(self._place)

    @property
    def _place(self) -> tuple[ServerGroup, int]:
        return self._group, self._number

    def __len__(self) -> int:
        return self._group.count_rows(self.name)


@functools.cache
def _group() -> ServerGroup:
    return ServerGroup(JobDirectory(launched.given.relay, TIMEOUT))


def open_table(name: str, dim: int, **options: Any) -> HashTable | RemoteTable:
    """Return the job's table of a name: on its embedding servers, or in this process if the job has none.

    Args:
        name: Equal for all processes that use the table.
        dim: Numbers of a row.
        options: As for `HashTable`; equal for all processes.

    Raises:
        ConfigurationError: The table is open with other options, or the name is not accepted.
    """
    if type(name) is not str or not 1 <= len(name) <= MAX_NAME:
        raise ConfigurationError(
            f"name is {name!r:.100}; a text of 1 to {MAX_NAME} characters is accepted."
        )
    made = HashTable(dim, **options)
    return RemoteTable(_group(), name, made) if launched.given.embedding else made


def checkpoints(place: str, *, keep: int = 3) -> TableCheckpoints:
    """Return the checkpoints of the job's tables in a directory or store. One process of the job uses them.

    Raises:
        ConfigurationError: The job has no embedding servers.
    """
    if not launched.given.embedding:
        raise ConfigurationError(
            "The job has no embedding servers, whose tables could be saved; start it with dlrover-run"
            " --embedding-servers N, or use HashTable.save."
        )
    return TableCheckpoints(JobDirectory(launched.given.relay, TIMEOUT), place, keep=keep)
