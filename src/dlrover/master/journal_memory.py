"""A journal that is lost with its master: the job's state then lives with the agents alone."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from dlrover.errors import ConfigurationError, InfrastructureError
from dlrover.master.journal import Entry


def open_memory(rest: str, _own_file: Path, *, read_only: bool) -> MemoryJournal:
    """A journal in the memory of this process.

    Raises:
        ConfigurationError: ``rest`` is not empty: it has no place.
        InfrastructureError: it is to be read, which no other process can.
    """
    if rest:
        raise ConfigurationError(f"journal memory:{rest} is unknown; it takes memory: alone.")
    if read_only:
        raise InfrastructureError("The journal is in the memory of the master (journal memory:).")
    return MemoryJournal()


class MemoryJournal:
    """The journal of one master process. It keeps no entries: nobody could ever replay them.

    Nothing here knows of other masters. Only what the agents tell keeps an old one from going on.
    """

    def __init__(self) -> None:
        self.epoch = 1
        """As in `Journal`."""

    def append(self, entry: Entry, now: float) -> None:
        """Nothing to do."""

    def append_all(self, entries: Sequence[Entry], now: float) -> None:
        """Nothing to do."""

    def entries(self) -> Iterator[tuple[float, Entry]]:
        """None: a master finds its journal empty."""
        return iter(())

    def check(self) -> None:
        """Nothing to find out."""

    def raise_epoch(self, above: int) -> None:
        """Take an epoch higher than ``above``."""
        self.epoch = max(above, self.epoch) + 1

    def close(self) -> None:
        """Nothing to do."""
