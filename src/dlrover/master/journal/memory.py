"""A journal that is lost with its master: only the agents then hold the job's state."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from dlrover.errors import ConfigurationError, InfrastructureError
from dlrover.master.journal.journal import Entry


def open_memory(rest: str, _own_file: Path, *, read_only: bool) -> MemoryJournal:
    """Create a journal in the memory of this process.

    Raises:
        ConfigurationError: ``rest`` is not empty: a journal in memory has no location.
        InfrastructureError: it was to be opened for reading, which no other process can do.
    """
    if rest:
        raise ConfigurationError(f"journal memory:{rest} is unknown; it takes memory: alone.")
    if read_only:
        raise InfrastructureError("The journal is in the memory of the master (journal memory:).")
    return MemoryJournal()


class MemoryJournal:
    """The journal of one master process. It keeps no entries: no process could ever replay them.

    It knows nothing of other masters. Only the agents' reports keep an old master from continuing.
    """

    def __init__(self) -> None:
        self.epoch = 1
        """See `Journal`."""

    def append(self, entry: Entry, now: float) -> None:
        """Do nothing."""

    def append_all(self, entries: Sequence[Entry], now: float) -> None:
        """Do nothing."""

    def entries(self) -> Iterator[tuple[float, Entry]]:
        """Return no entries: a master always finds its journal empty."""
        return iter(())

    def check(self) -> None:
        """Do nothing: no other master can write to this journal."""

    def raise_epoch(self, above: int) -> None:
        """Take an epoch higher than ``above``."""
        self.epoch = max(above, self.epoch) + 1

    def close(self) -> None:
        """Do nothing."""
