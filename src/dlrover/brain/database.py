"""The Brain's database: SQLite in a file, MariaDB or MySQL, PostgreSQL; and the deletion of its old records."""

from __future__ import annotations

import contextlib
import fcntl
import os
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any

import sqlalchemy as sa
from alembic import command
from alembic.config import Config
from alembic.util import CommandError
from sqlalchemy.engine import URL, Connection, Engine, make_url
from sqlalchemy.exc import ArgumentError, DBAPIError, NoSuchModuleError

from dlrover import extras
from dlrover._util import databases
from dlrover.brain import tables
from dlrover.errors import ConfigurationError, InfrastructureError

LOCK_TIMEOUT = 60
"""Maximum seconds that another server may hold the database, to migrate it or to write."""
MIGRATIONS = Path(__file__).parent / "migrations"
DRIVERS = {
    "sqlite": "sqlite+pysqlite",
    "mysql": "mysql+pymysql",
    "mariadb": "mysql+pymysql",
    "postgresql": "postgresql+psycopg",
    "postgres": "postgresql+psycopg",
}
"""Drivers by the first word of a URL."""
LOCKS = {
    "mysql": "SELECT GET_LOCK('dlrover-brain-migrations', 0)",
    "postgresql": f"SELECT pg_try_advisory_lock({0x646C72627261})",
}
"""Statements that take the lock for a migration, or return false, by the kind of database."""
LOCK_POLL = 0.1
"""Seconds between two attempts."""
DAY = 86_400.0
REQUESTS_DAYS = 2.0
"""Days for which a repeated report is recognized."""
PRUNED = 1000
"""Maximum number of rows deleted in one transaction, so that writers do not wait long."""
_OF_JOBS = (tables.samples, tables.usages, tables.nodes)


def open_database(url: str) -> Engine:
    """Open a database and bring its tables to this version.

    Args:
        url: As SQLAlchemy takes it: ``sqlite:////var/lib/brain.db``,
            ``mysql://user:password@host/name``, ``postgresql://user:password@host/name``.

    Raises:
        ConfigurationError: the URL is wrong, or its driver is not installed.
        InfrastructureError: the database cannot be reached or migrated.
    """
    parsed = _parsed(url)
    shown = databases.shown(parsed)
    with extras.needed(f"--database {shown}", f"brain-{parsed.get_backend_name()}"):
        try:
            engine: Engine = databases.create_engine(parsed, LOCK_TIMEOUT, **_options(parsed))
        except ValueError as error:
            raise ConfigurationError(f"--database {shown}: {error}") from error
    if parsed.get_backend_name() == "sqlite":
        _prepare_sqlite(engine, str(parsed.database))
    try:
        with _alone(engine), engine.begin() as connection:
            _migrate(connection)
    except CommandError as error:
        engine.dispose()
        raise InfrastructureError(
            f"The database {shown} was made by another version: {error}."
        ) from error
    except (DBAPIError, OSError) as error:
        engine.dispose()
        raise InfrastructureError(
            f"The database {shown} cannot be opened: {reason(error)}."
        ) from error
    return engine


def reason(error: Exception) -> str:
    """Return a database's error message as one line."""
    message = str(getattr(error, "orig", None) or error)
    return message.strip().splitlines()[0].rstrip(".") if message.strip() else type(error).__name__


def lock(connection: Connection) -> None:
    """Let no other server write until the transaction ends, as SQLite does: in different orders, two would deadlock.

    The database ends a transaction that stands still: a lost machine's connection may stay for hours.
    """
    seconds = LOCK_TIMEOUT / 2  # another server still has time to write
    if connection.dialect.name == "postgresql":
        limit = f"SET LOCAL idle_in_transaction_session_timeout = {int(seconds * 1000)}"
    elif connection.dialect.name == "mysql":
        limit = f"SET SESSION wait_timeout = {max(1, int(seconds))}"
    else:
        return
    connection.exec_driver_sql(limit)
    connection.exec_driver_sql("SELECT version_num FROM alembic_version FOR UPDATE")


def _parsed(url: str) -> URL:
    accepted = "sqlite:///FILE, mysql://USER:PASSWORD@HOST/NAME and postgresql://…"
    try:
        parsed = make_url(url)
        driver = DRIVERS.get(parsed.drivername, parsed.drivername)
        parsed = parsed.set(drivername=driver)
        parsed.get_dialect()
    except (ArgumentError, NoSuchModuleError, ValueError):
        # The error may contain a part of the password.
        raise ConfigurationError(
            f"--database is not the URL of a database that is known; accepted are {accepted}, with %-escapes for"
            " other characters of the password than letters and digits."
        ) from None
    if parsed.get_backend_name() not in ("sqlite", "mysql", "postgresql"):
        raise ConfigurationError(f"--database {parsed.drivername}://…: accepted are {accepted}.")
    if parsed.get_backend_name() == "sqlite" and parsed.database in (None, "", ":memory:"):
        raise ConfigurationError("--database sqlite:// names no file; write sqlite:///FILE.")
    return parsed


def _options(url: URL) -> dict[str, Any]:
    if url.get_backend_name() == "sqlite":
        return {"connect_args": {"timeout": LOCK_TIMEOUT}}
    options: dict[str, Any] = {"pool_pre_ping": True}
    if url.get_backend_name() == "mysql":
        options["connect_args"] = {"charset": "utf8mb4"}
        options["isolation_level"] = "READ COMMITTED"
    return options


def _prepare_sqlite(engine: Engine, path: str) -> None:
    """Let readers proceed beside the writer, let commits survive a power failure, and refuse another file."""
    first: list[tuple[int, int]] = []

    @sa.event.listens_for(engine, "connect")
    def connect(connection: Any, _record: Any) -> None:
        connection.isolation_level = None  # transactions begin below, not by the driver's guess
        cursor = connection.cursor()
        cursor.execute(f"PRAGMA busy_timeout={LOCK_TIMEOUT * 1000}")
        cursor.execute("PRAGMA journal_mode=WAL")
        cursor.execute("PRAGMA synchronous=FULL")
        cursor.execute("PRAGMA foreign_keys=ON")
        cursor.close()

    @sa.event.listens_for(engine, "begin")
    def begin(connection: Connection) -> None:
        found = _file_id(path)
        first.extend([found] if found and not first else [])
        if first and found != first[0]:
            # What is committed to a file without a name is lost with this process.
            raise InfrastructureError(
                f"the file {path} was deleted or replaced; start the Brain again"
            )
        writes = connection.get_execution_options().get("writes", True)
        connection.exec_driver_sql("BEGIN IMMEDIATE" if writes else "BEGIN")


def _file_id(path: str) -> tuple[int, int] | None:
    try:
        status = os.stat(path)
    except FileNotFoundError:
        return None
    return status.st_dev, status.st_ino


@contextlib.contextmanager
def _alone(engine: Engine) -> Iterator[None]:
    """Hold the migration lock: one server migrates at a time, the others wait.

    Raises:
        InfrastructureError: another server has held it for `LOCK_TIMEOUT` seconds.
    """
    if engine.url.get_backend_name() == "sqlite":
        path = Path(f"{engine.url.database}.lock")
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("w") as file:
            _wait(lambda: _flock(file))
            yield
        return
    asked = sa.text(LOCKS[engine.url.get_backend_name()])
    with engine.connect() as connection:
        try:
            _wait(lambda: bool(connection.scalar(asked)))
            yield
        finally:
            connection.invalidate()  # the lock goes with the connection


def _wait(take: Callable[[], bool]) -> None:
    late = time.monotonic() + LOCK_TIMEOUT
    while not take():
        if time.monotonic() > late:
            raise InfrastructureError(
                f"Another server has been migrating the database for {LOCK_TIMEOUT} s: end it if it stands still."
            )
        threading.Event().wait(LOCK_POLL)


def _flock(file: IO[str]) -> bool:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _migrate(connection: Connection) -> None:
    config = Config()
    config.set_main_option("script_location", str(MIGRATIONS).replace("%", "%%"))
    config.attributes["connection"] = connection
    if sa.inspect(connection).has_table("alembic_version"):
        lock(connection)
    command.upgrade(config, "head")


# ---- retention


def prune(connection: Connection, now: float, days: float) -> int:
    """Delete some records older than ``days``; return how many rows. Call it until it returns 0.

    A job that has ended, or has reported nothing since, is deleted with all its records: its master may have been
    deleted. Another one loses only old samples and usages.
    """
    limit = now - days * DAY
    deleted = _delete(connection, tables.requests, now - min(days, REQUESTS_DAYS) * DAY)
    for table in (tables.samples, tables.usages):
        deleted += _delete(connection, table, limit)
    jobs = tables.jobs
    old = (jobs.c.ended < limit) | (jobs.c.ended.is_(None) & _unheard_since(limit))
    return deleted + _delete_jobs(
        connection, list(connection.scalars(sa.select(jobs.c.id).where(old).limit(PRUNED)))
    )


def _unheard_since(limit: float) -> Any:
    """Return the condition for jobs that have neither registered, reported nor been planned since a time."""
    job = tables.jobs.c.id
    times = ((table, table.c.at) for table in (tables.samples, tables.usages, tables.plans))
    heard = [
        sa.exists().where(table.c.job == job, at >= limit)
        for table, at in (*times, (tables.nodes, tables.nodes.c.heard))
    ]
    return (tables.jobs.c.registered < limit) & ~sa.or_(*heard)


def _delete(connection: Connection, table: sa.Table, before: float) -> int:
    old = sa.select(table.c.id).where(table.c.at < before).limit(PRUNED)
    numbers = list(connection.scalars(old))
    if numbers:
        connection.execute(table.delete().where(table.c.id.in_(numbers)))
    return len(numbers)


def _delete_jobs(connection: Connection, names: list[str]) -> int:
    """Delete jobs with few rows left; delete rows of the others."""
    deleted = 0
    for name in names:
        if deleted >= PRUNED:
            break
        rows = sum(_delete_some(connection, table, name) for table in _OF_JOBS)
        rows += _delete_plans(connection, name)
        if rows < PRUNED:
            connection.execute(tables.ends.delete().where(tables.ends.c.job == name))
            connection.execute(tables.jobs.delete().where(tables.jobs.c.id == name))
            rows += 1
        deleted += rows
    return deleted


def _delete_some(connection: Connection, table: sa.Table, job: str) -> int:
    key: Any = table.c.node if table is tables.nodes else table.c.id
    keys = list(connection.scalars(sa.select(key).where(table.c.job == job).limit(PRUNED)))
    if keys:
        connection.execute(table.delete().where((table.c.job == job) & key.in_(keys)))
    return len(keys)


def _delete_plans(connection: Connection, job: str) -> int:
    plans, outcomes = tables.plans, tables.outcomes
    ids = list(connection.scalars(sa.select(plans.c.id).where(plans.c.job == job).limit(PRUNED)))
    if ids:
        connection.execute(outcomes.delete().where(outcomes.c.plan.in_(ids)))
        connection.execute(plans.delete().where(plans.c.id.in_(ids)))
    return len(ids)
