"""Values of the latest checkpoint in memory, kept up to date as a training writes increments."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

import msgspec

from dlrover.checkpoint.storage.stores import StorageAwayError, open_store
from dlrover.embedding.machine import chain
from dlrover.embedding.machine.chain import TableManifest
from dlrover.embedding.remote import stored
from dlrover.embedding.remote.arrays import Arrays
from dlrover.embedding.tools import values
from dlrover.embedding.tools.values import Tables
from dlrover.errors import ConfigurationError, DLRoverError, InfrastructureError

logger = logging.getLogger(__name__)


class NoCheckpointError(ConfigurationError):
    """Raised where there is no checkpoint yet."""


class Served(NamedTuple):
    """What is served now. An increment changes the tables in place; a full checkpoint brings new ones."""

    step: int
    id: str
    time: float
    """When the training copied these rows, in seconds since the epoch."""
    tables: Tables
    order: tuple[float, int, int]
    """A later checkpoint has a larger one."""


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


class CheckpointFollower:
    """Looks for newer checkpoints. `served` may be read by any thread.

    Args:
        place: Directory or URL of checkpoints, or a file of `HashTable.save`, which may be replaced.
        poll: Seconds between two looks.
    """

    served: Served
    names: list[str]
    """Tables that are or were served: the place of one is its number, which clients keep."""

    def __init__(self, place: str, poll: float = 1.0) -> None:
        file = values.file_of(place)
        self._source = _TableFile(file) if file is not None else _Checkpoints(place)
        self._poll = poll
        self.names = []
        self._ended = threading.Event()
        self._looked = time.monotonic()
        self._error = ""
        failed = self._take(None)
        if not hasattr(self, "served"):
            raise failed or NoCheckpointError(f"{place} has no embedding checkpoint.")
        self._note(failed)

    def _take(self, served: Served | None) -> Exception | None:
        """Take over what is new; return why that is not all."""
        try:
            for each in self._source.look(served):
                self.names += [name for name in each.tables if name not in self.names]
                self.served = each
        except (DLRoverError, MemoryError) as error:
            return error
        return None

    def _note(self, failed: Exception | None) -> None:
        if failed is None:
            self._looked, self._error = time.monotonic(), ""
            return
        reason = str(failed) or "There is no memory for it."
        if reason != self._error:
            logger.warning("Step %d is served still: %s", self.served.step, reason)
        self._error = reason

    def look(self) -> None:
        """Take over what is new; if that fails, keep what is served, and say why in `lag`."""
        self._note(self._take(self.served))

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
        self._begun = ""  # the increment that was applied in part: readers see some of its rows
        self.newest_step, self.behind = -1, 0

    def look(self, served: Served | None) -> Iterator[Served]:
        """Yield the tables of checkpoints on the way to the newest one, up to one that is damaged."""
        error = self._read_all()
        newer = [each for each in self._known.values() if _is_newer(each, served)]
        newer.sort(key=stored.order, reverse=True)
        if newer:
            self.newest_step = newer[0].step
        self.behind = len(newer)
        damaged: set[str] = set()
        for newest in newer:
            if not _is_newer(newest, served):
                break
            try:
                for each in self._up_to(newest, served, damaged):
                    served = each
                    self.behind = sum(_is_newer(other, served) for other in newer)
                    yield each
            except InfrastructureError as found:
                if isinstance(found, StorageAwayError):
                    raise
                error = error or found
        if error is not None:
            raise error

    def _up_to(
        self, newest: TableManifest, served: Served | None, damaged: set[str]
    ) -> Iterator[Served]:
        """Yield the tables of the checkpoints of a chain that are newer than ``served``; note one that is damaged."""
        links = chain.chain(newest, self._read)
        ids = [each.id for each in links]
        tables: Tables = {}
        if served is not None and served.id in ids:
            later = links[ids.index(served.id) + 1 :]
            if later[0].id == self._begun or not self._begun:
                links, tables = later, served.tables
        if not damaged.isdisjoint(each.id for each in links):
            return
        for manifest in links:
            new = {name: text for name, text in manifest.tables.items() if name not in tables}
            tables = {**tables, **values.empty(new)} if new else tables
            seen = _are_seen(tables, served)
            try:
                for part in self._parts(manifest, seen=seen):
                    self._begun = manifest.id if seen else self._begun
                    values.add(tables, part)
            except InfrastructureError:
                damaged.add(manifest.id)
                raise
            if _is_newer(manifest, served):
                order = stored.order(manifest)
                served = Served(manifest.step, manifest.id, manifest.time, tables, order)
                self._begun = ""
                yield served

    def _parts(self, manifest: TableManifest, *, seen: bool) -> Iterable[Arrays]:
        """Return the parts of a checkpoint: if readers see the tables, only once all have been read."""
        parts = (stored.read_part(self._store, part) for part in manifest.parts)
        return [*parts] if seen else parts

    def _read_all(self) -> InfrastructureError | None:
        """Read the manifests that are not known; return what is wrong with one that is damaged."""
        there = stored.complete(self._store)
        damages = [self._damage(id_) for id_ in there]
        self._known = {id_: self._known[id_] for id_ in there if id_ in self._known}
        return next((each for each in damages if each is not None), None)

    def _damage(self, id_: str) -> InfrastructureError | None:
        try:
            self._known[id_] = self._read(id_)
        except InfrastructureError as error:
            if isinstance(error, StorageAwayError):
                raise
            return error
        return None

    def _read(self, id_: str) -> TableManifest:
        return self._known.get(id_) or stored.read_manifest(self._store, id_)


def _is_newer(manifest: TableManifest, served: Served | None) -> bool:
    return served is None or stored.order(manifest) > served.order


def _are_seen(tables: Tables, served: Served | None) -> bool:
    """Return whether readers see any of the tables."""
    return served is not None and any(
        served.tables.get(name) is table for name, table in tables.items()
    )


class _TableFile:
    """A file of `HashTable.save`."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.newest_step, self.behind = -1, 0

    def look(self, served: Served | None) -> Iterator[Served]:
        """Load the file if it is another one than before."""
        try:
            status = self._path.stat()
        except OSError as error:
            raise InfrastructureError(f"{self._path} cannot be read: {error.strerror}.") from error
        id_ = f"{status.st_ino:x}-{status.st_mtime_ns:x}"
        if served is not None and served.id == id_:
            self.behind = 0
            return
        self.behind = 1
        loaded = values.load(self._path)
        self.newest_step, self.behind = loaded.step, 0
        order = status.st_mtime, loaded.step, 0
        yield Served(loaded.step, id_, status.st_mtime, loaded.tables, order)
