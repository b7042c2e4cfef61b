"""Deletion of old records, a few at a time."""

from __future__ import annotations

from typing import Any

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from dlrover.brain import tables

DAY = 86_400.0
REQUESTS_DAYS = 2.0
"""Days for which a repeated report is recognized."""
BATCH = 1000
"""Maximum number of rows deleted in one transaction, so that writers do not wait long."""
_OF_JOBS = (tables.samples, tables.usages, tables.nodes)


def prune(connection: Connection, now: float, days: float) -> int:
    """Delete some records older than ``days``; return how many rows. Call it until it returns 0.

    An ended job is deleted with all its records; a running job loses only old samples and usages.
    """
    limit = now - days * DAY
    deleted = _delete(connection, tables.requests, now - min(days, REQUESTS_DAYS) * DAY)
    for table in (tables.samples, tables.usages):
        deleted += _delete(connection, table, limit)
    jobs = tables.jobs
    ended = sa.select(jobs.c.id).where(jobs.c.ended < limit).limit(BATCH)
    return deleted + _delete_jobs(connection, list(connection.scalars(ended)))


def _delete(connection: Connection, table: sa.Table, before: float) -> int:
    old = sa.select(table.c.id).where(table.c.at < before).limit(BATCH)
    numbers = list(connection.scalars(old))
    if numbers:
        connection.execute(table.delete().where(table.c.id.in_(numbers)))
    return len(numbers)


def _delete_jobs(connection: Connection, names: list[str]) -> int:
    """Delete jobs with few rows left; delete rows of the others."""
    deleted = 0
    for name in names:
        if deleted >= BATCH:
            break
        rows = sum(_delete_some(connection, table, name) for table in _OF_JOBS)
        rows += _delete_plans(connection, name)
        if rows < BATCH:
            connection.execute(tables.jobs.delete().where(tables.jobs.c.id == name))
            rows += 1
        deleted += rows
    return deleted


def _delete_some(connection: Connection, table: sa.Table, job: str) -> int:
    key: Any = table.c.node if table is tables.nodes else table.c.id
    keys = list(connection.scalars(sa.select(key).where(table.c.job == job).limit(BATCH)))
    if keys:
        connection.execute(table.delete().where((table.c.job == job) & key.in_(keys)))
    return len(keys)


def _delete_plans(connection: Connection, job: str) -> int:
    plans, outcomes = tables.plans, tables.outcomes
    ids = list(connection.scalars(sa.select(plans.c.id).where(plans.c.job == job).limit(BATCH)))
    if ids:
        connection.execute(outcomes.delete().where(outcomes.c.plan.in_(ids)))
        connection.execute(plans.delete().where(plans.c.id.in_(ids)))
    return len(ids)
