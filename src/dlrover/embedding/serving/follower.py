"""Values of the latest checkpoint in memory, kept up to date as a training writes increments."""

from __future__ import annotations

import logging
import threading
import time
from pathlib import Path
from typing import NamedTuple, Protocol

import msgspec

from dlrover.checkpoint.storage.stores import open_store
from dlrover.embedding.machine import chain
from dlrover.embedding.machine.chain import TableManifest
from dlrover.embedding.remote import stored
from dlrover.embedding.tools import values
from dlrover.embedding.tools.values import Tables
from dlrover.errors import ConfigurationError, DLRoverError, InfrastructureError

logger = logging.getLogger(__name__)


class Served(NamedTuple):
    """What is served now. An increment changes the tables in place; a full checkpoint brings new ones."""

    step: int
    id: str
    time: float
    """When the training copied these rows, in seconds since the epoch."""
    tables: Tables


class Lag(msgspec.Struct, frozen=True, kw_only=True):
    """How far what is served is behind."""

    step: int
    checkpoint: str
    seconds: float
    """Since the training copied the rows that are served."""
    newest_step: int
    behind: int
    """Checkpoints that are stored and not served yet."""
    looked: float
    """Seconds since the checkpoints were last looked for without an error."""
    error: str
    """Why a newer checkpoint is not served; empty if nothing is wrong."""


class CheckpointSource(Protocol):
    """Where checkpoints come from."""

    newest_step: int
    behind: int

    def look(self, served: Served | None) -> Served | None:
        """Return what to serve from now on: ``served`` itself if there is nothing newer."""


class CheckpointFollower:
    """Looks for newer checkpoints. `served` may be read by any thread.

    Args:
        place: Directory or URL of checkpoints, or a file of `HashTable.save`, which may be replaced.
        poll: Seconds between two looks.
    """

    def __init__(self, place: str, poll: float = 1.0) -> None:
        file = values.file_of(place)
        self._source: CheckpointSource = (
            _TableFile(file) if file is not None else _Checkpoints(place)
        )
        self._poll = poll
        self._ended = threading.Event()
        self._looked = time.monotonic()
        self._error = ""
        first = self._source.look(None)
        if first is None:
            raise ConfigurationError(f"{place} has no embedding checkpoint.")
        self.served = first

    def look(self) -> None:
        """Take over what is new; if that fails, keep what is served, and say why in `lag`."""
        try:
            self.served = self._source.look(self.served) or self.served
        except (DLRoverError, MemoryError) as error:
            reason = str(error) or "There is no memory for it."
            if reason != self._error:
                logger.warning("Step %d is served still: %s", self.served.step, reason)
            self._error = reason
        else:
            self._looked, self._error = time.monotonic(), ""

    def run(self) -> None:
        """Look again and again until `close`."""
        while not self._ended.wait(self._poll):
            self.look()

    def close(self) -> None:
        """End `run`."""
        self._ended.set()

    def lag(self) -> Lag:
        """Return how far what is served is behind."""
        served, source = self.served, self._source
        return Lag(
            step=served.step,
            checkpoint=served.id,
            seconds=round(max(0.0, time.time() - served.time), 3),
            newest_step=source.newest_step,
            behind=source.behind,
            looked=round(time.monotonic() - self._looked, 3),
            error=self._error,
        )


class _Checkpoints:
    """A directory with chains of checkpoints."""

    def __init__(self, place: str) -> None:
        self._store = open_store(place)
        self._known: dict[str, TableManifest] = {}
        self.newest_step, self.behind = -1, 0

    def look(self, served: Served | None) -> Served | None:
        """Apply the increments since ``served``, or load everything if the newest chain does not hold it."""
        there = stored.complete(self._store)
        self._known = {id_: self._read(id_) for id_ in there}
        if not self._known:
            return served
        newest = max(self._known.values(), key=stored.order)
        self.newest_step = newest.step
        if served is not None and newest.id == served.id:
            self.behind = 0
            return served
        links = chain.chain(newest, self._read)
        ids = [each.id for each in links]
        if served is not None and served.id in ids:
            links = links[ids.index(served.id) + 1 :]
            tables = served.tables
            new = {name: text for name, text in newest.tables.items() if name not in tables}
            tables = {**tables, **values.empty(new)} if new else tables
        else:
            tables = values.empty(newest.tables)
        self.behind = len(links)
        for manifest in links:
            for part in manifest.parts:
                values.add(tables, stored.read_part(self._store, part))
        self.behind = 0
        return Served(newest.step, newest.id, newest.time, tables)

    def _read(self, id_: str) -> TableManifest:
        return self._known.get(id_) or stored.read_manifest(self._store, id_)


class _TableFile:
    """A file of `HashTable.save`."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.newest_step, self.behind = -1, 0

    def look(self, served: Served | None) -> Served | None:
        """Load the file if it is another one than before."""
        try:
            status = self._path.stat()
        except OSError as error:
            raise InfrastructureError(f"{self._path} cannot be read: {error.strerror}.") from error
        id_ = f"{status.st_ino:x}-{status.st_mtime_ns:x}"
        if served is not None and served.id == id_:
            self.behind = 0
            return served
        self.behind = 1
        loaded = values.load(self._path)
        self.newest_step, self.behind = loaded.step, 0
        return Served(loaded.step, id_, status.st_mtime, loaded.tables)
