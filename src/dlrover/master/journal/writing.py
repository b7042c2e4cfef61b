"""What a running master writes: all of it in order, also while the disk is full, until another master takes over."""

from __future__ import annotations

import asyncio
import collections
import contextlib
import logging
from collections.abc import Iterator, Sequence

from dlrover.errors import FencedError, InfrastructureError
from dlrover.master.journal.journal import Entry, Journal, fenced
from dlrover.master.machine import inputs

logger = logging.getLogger(__name__)


class JournalWriter:
    """A running master's access to its journal."""

    def __init__(self, journal: Journal) -> None:
        self.fenced = asyncio.Event()
        """Set once another master has taken over: this one must exit."""
        self.unwritten = ""
        """Error of the last write; empty if it succeeded."""
        self._journal = journal
        self._backlog: collections.deque[tuple[float, inputs.Input]] = collections.deque()
        """Inputs that took effect while the disk was full, oldest first; journalled before anything else."""

    @property
    def epoch(self) -> int:
        """The master's epoch."""
        return self._journal.epoch

    def append(self, entries: Sequence[Entry], now: float) -> None:
        """Add entries, all or none.

        Raises:
            FencedError: another master has taken over.
            InfrastructureError: the journal cannot be written.
        """
        with self._leave_if_fenced():
            try:
                while self._backlog:
                    at, older = self._backlog[0]
                    self._journal.append_all([older], at)
                    self._backlog.popleft()
                self._journal.append_all(entries, now)
            except InfrastructureError as error:
                self.unwritten = str(error)
                raise
            self.unwritten = ""

    def append_or_keep(self, event: inputs.Input, now: float) -> None:
        """Add an input; while the disk is full, keep it in memory so that the job can still end."""
        try:
            self.append([event], now)
        except FencedError:
            raise
        except InfrastructureError as error:
            self.check()  # this needs no disk space
            if not self._backlog:
                logger.warning("%s The job goes on; its state is kept in memory.", error)
            self._backlog.append((now, event))

    def check(self) -> None:
        """Check that no other master has taken over.

        Raises:
            FencedError: one has.
        """
        with self._leave_if_fenced():
            self._journal.check()

    def meet(self, epoch: int, *, known: bool, starting: bool) -> None:
        """Handle an agent that has met a master: exceed that master's ``epoch``, or leave if it took over.

        A lost store counts again from 1. So while it is ``starting``, this master takes a higher epoch if it
        is still the store's latest; later on, another master must have taken over. An agent that is not ``known``
        to this master's journal has its epoch from another master, even if both epochs are the same.

        Raises:
            FencedError: that master has taken over.
        """
        if epoch < self.epoch + known or not epoch:
            return
        with self._leave_if_fenced():
            if not starting:
                raise fenced(self.epoch, epoch)
            self._journal.raise_epoch(epoch)

    @contextlib.contextmanager
    def _leave_if_fenced(self) -> Iterator[None]:
        try:
            if self.fenced.is_set():
                raise fenced(self.epoch, self.epoch + 1)
            yield
        except FencedError as error:
            if not self.fenced.is_set():
                logger.error("%s It leaves.", error)  # noqa: TRY400
            self.fenced.set()
            raise
