"""The writes of one commit.

Many reports cost few statements: a batch reads their lookups at once, and writes their rows at once.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from dlrover.brain import tables


class Batch:
    """Writes of one transaction.

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
        """Write the deferred rows and changes."""
        for table, rows in self._rows.items():
            self.connection.execute(table.insert(), rows)
        jobs = tables.jobs
        for job, values in self._changes.items():
            if "done" in values:
                done = values["done"]
                values["done"] = sa.case((jobs.c.done > done, jobs.c.done), else_=done)
            self.connection.execute(jobs.update().where(jobs.c.id == job).values(values))
        self._rows, self._changes = {}, {}
