"""The only writing thread: it commits concurrent writes together.

A commit waits for the disk, so all writes of that time share one. A write is a function of a `Batch`; its
result is known once it is committed.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from typing import Any, NamedTuple

import sqlalchemy as sa
from sqlalchemy.engine import Connection, Engine
from sqlalchemy.exc import DBAPIError

from dlrover.brain import tables
from dlrover.brain.database import LOCK_TIMEOUT, lock, reason
from dlrover.errors import DLRoverError, InfrastructureError

logger = logging.getLogger(__name__)

BATCH = 500
"""Maximum number of writes in one commit."""
WAITING = 20_000
"""Maximum number of waiting writes; more are refused."""
ATTEMPTS = 3
"""Attempts at a single write: a connection may be lost."""


class Batch:
    """Writes of one transaction, with few statements: it reads their lookups at once, and writes their rows at once.

    ``requests`` and ``jobs`` are the ids that the writes will look up.
    """

    def __init__(
        self, connection: Connection, requests: Iterable[str], jobs: Iterable[str]
    ) -> None:
        self.connection = connection
        self._requests = self._found(tables.requests, requests)
        self._jobs = self._found(tables.jobs, jobs)
        self._rows: dict[sa.Table, list[dict[str, Any]]] = {}
        self._changes: dict[str, dict[str, Any]] = {}

    def _found(self, table: sa.Table, ids: Iterable[str]) -> set[str]:
        asked = {one for one in ids if one}
        if not asked:
            return set()
        return set(self.connection.scalars(sa.select(table.c.id).where(table.c.id.in_(asked))))

    def has_done(self, request: str) -> bool:
        """Return whether a request was carried out before."""
        return request in self._requests

    def note(self, request: str, now: float) -> None:
        """Record that a request was carried out."""
        self._requests.add(request)
        self.insert(tables.requests, {"id": request, "at": now})

    def has_job(self, job: str) -> bool:
        """Return whether a job is registered."""
        return job in self._jobs

    def add_job(self, job: str, row: dict[str, Any]) -> None:
        """Add a job to the table of jobs."""
        self.connection.execute(tables.jobs.insert().values(row | {"id": job}))
        self._jobs.add(job)

    def change_job(self, job: str, **values: Any) -> None:
        """Change fields of a job; ``done`` never falls."""
        before = self._changes.setdefault(job, {})
        if "done" in values:
            values["done"] = max(values["done"], before.get("done", 0.0))
        before.update(values)

    def insert(self, table: sa.Table, *rows: dict[str, Any]) -> None:
        """Add rows at the end of the transaction."""
        self._rows.setdefault(table, []).extend(rows)

    def flush(self) -> None:
        """Write the deferred changes and rows."""
        jobs = tables.jobs
        for job, values in self._changes.items():
            if "done" in values:
                done = values["done"]
                values["done"] = sa.case((jobs.c.done > done, jobs.c.done), else_=done)
            self.connection.execute(jobs.update().where(jobs.c.id == job).values(values))
        for table, rows in self._rows.items():
            self.connection.execute(table.insert(), rows)
        self._rows, self._changes = {}, {}


Write = Callable[[Batch], Any]


class _Item(NamedTuple):
    write: Write
    request: str
    job: str
    done: Future[Any]


class Writer:
    """Writer to one database, in the order of submission."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._queue: queue.Queue[_Item | None] = queue.Queue(WAITING)
        self._thread = threading.Thread(target=self._run, name="brain-writer", daemon=True)
        self._thread.start()
        self._failing = False

    def submit(self, write: Write, request: str = "", job: str = "") -> Future[Any]:
        """Queue a write; its result is available once it is committed.

        ``write`` may be called again in a new transaction if the first one fails, as when the connection was lost.
        An error that it raises does not undo the other writes of its commit, so it must raise before it writes.
        ``request`` and ``job`` are the ids that it looks up. A write whose result is cancelled before its turn is
        dropped.

        Raises:
            InfrastructureError: too many writes wait. The result raises it if the database fails.
        """
        done: Future[Any] = Future()
        try:
            self._queue.put_nowait(_Item(write, request, job, done))
        except queue.Full as error:
            raise InfrastructureError(
                f"The database is too slow: {WAITING} reports wait for it."
            ) from error
        return done

    def close(self) -> None:
        """Write what waits, then end the thread."""
        self._queue.put(None)
        self._thread.join()

    def _run(self) -> None:
        while (item := self._queue.get()) is not None:
            batch, last = [item], False
            while len(batch) < BATCH and not self._queue.empty():
                following = self._queue.get_nowait()
                if following is None:
                    last = True
                    break
                batch.append(following)
            self._write(batch)
            if last:
                return

    def _write(self, batch: list[_Item]) -> None:
        batch = [item for item in batch if item.done.set_running_or_notify_cancel()]
        until = time.monotonic() + LOCK_TIMEOUT
        failure = self._try(batch)
        if failure is None:
            if self._failing:
                logger.info("The database works again")
            self._failing = False
            return
        # Writing each alone finds the one that failed. What was committed nevertheless is known by its request.
        if not self._failing:
            logger.warning("A commit of %d writes failed: %s", len(batch), reason(failure))
        self._failing = True
        for item in batch:
            failure = self._write_alone(item, failure, until)

    def _write_alone(self, item: _Item, failure: Exception, until: float) -> Exception:
        """Write an item, unless a locked database has already taken its time; return the latest failure."""
        for _ in range(ATTEMPTS):
            if time.monotonic() >= until:
                break
            latest = self._try([item])
            if latest is None:
                return failure
            failure = latest
        item.done.set_exception(InfrastructureError(f"The database failed: {reason(failure)}."))
        return failure

    def _try(self, batch: list[_Item]) -> Exception | None:
        try:
            self._commit(batch)
        except DBAPIError as error:
            if self._engine.url.get_backend_name() != "sqlite":
                self._engine.dispose()  # another server may be in charge by now, and this one read-only
            return error
        except InfrastructureError as error:
            return error
        except Exception as error:
            logger.exception("A write failed")
            return error
        return None

    def _commit(self, batch: list[_Item]) -> None:
        with self._engine.begin() as connection:
            lock(connection)
            together = Batch(
                connection, (item.request for item in batch), (item.job for item in batch)
            )
            results = [_outcome(item, together) for item in batch]
            together.flush()
        for item, result in zip(batch, results, strict=True):
            if isinstance(result, DLRoverError):
                item.done.set_exception(result)
            else:
                item.done.set_result(result)


def _outcome(item: _Item, batch: Batch) -> Any:
    """Return a write's result, or the error by which it refuses to write."""
    try:
        return item.write(batch)
    except DLRoverError as error:
        return error
