"""Tables of databases: one sample per row, in the order of a key."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from dlrover import extras
from dlrover._util import databases
from dlrover.data.sources import waiting
from dlrover.data.sources.blocks import BlockRecords
from dlrover.errors import ConfigurationError, InfrastructureError

PAGE = 1000
"""Rows to read at once."""
KEPT = 4
"""Pages that a process keeps."""
_MYSQL_AWAY = 1040, 1053, 1203, 1226, 2003, 2006, 2013
"""Errors of MariaDB and MySQL: too many connections in all or of a user, a shutdown, no server, a lost connection."""
_STARTING = (
    "starting up",
    "shutting down",
    "in recovery",
    "not yet accepting",
    "too many",
    "connection slots",
    "try again later",
)
"""Words of a PostgreSQL server, or a PgBouncer before it, that refuses a connection for now."""
_NO_HOST = "Name or service not known"
"""Words of a name server that does not know a host."""
Result = TypeVar("Result")
_DRIVERS = {
    "mysql": "mysql+pymysql",
    "mariadb": "mariadb+pymysql",
    "postgres": "postgresql+psycopg",
    "postgresql": "postgresql+psycopg",
}


class Table(BlockRecords["list[Any]", "dict[str, Any]"]):
    """Rows of a table as dicts of their columns, in the order of a unique key.

    Opening looks up every ``page``-th key in the key's index; a page is then read by its range of keys,
    without counting from the table's beginning. Rows added behind the last key are ignored; rows before it
    must not be added or removed. Opening and reads wait for a database that is away for less than a minute, and as long
    for an answer of PyMySQL or psycopg: ``read_timeout`` in the URL is another limit for it, in seconds.

    Args:
        url: URL of SQLAlchemy: ``sqlite:///file``, ``mysql://user:password@host/database``,
            ``postgresql://...``. Its password is never shown.
        table: the table, ``schema.table`` or a view.
        key: a column with a unique index; by default the primary key. The key of a view is not verified.
        columns: the columns to read; by default all.
        first: the first key; by default the table's.
        last: the last key. Give it if rows are added: a restart must find as many rows as before.
        page: rows to read at once.
        kept: pages that each process keeps in memory.

    Raises:
        ConfigurationError: the database or the table cannot be read, or has no such key or column; or
            ``dlrover[sql]`` is not installed.
        InfrastructureError: the database stays away.
    """

    def __init__(  # noqa: PLR0913 - options, by name
        self,
        url: Any,
        table: str,
        *,
        key: str | None = None,
        columns: Sequence[str] | None = None,
        first: Any = None,
        last: Any = None,
        page: int = PAGE,
        kept: int = KEPT,
    ) -> None:
        if page < 1:
            raise ConfigurationError(f"page is {page}; it must be at least 1.")
        self._sql = extras.load("sqlalchemy", "A table", "sql")
        self._url = _url(self._sql, url)
        self._name = table
        self._engines: tuple[int, Any] | None = None
        try:
            self._columns, self._key = self._insist(
                lambda: self._reflected(table, key, columns), self._is_away
            )
            self._starts, blocks, self._last = self._insist(
                lambda: self._pages(first, last, page), self._is_away
            )
        except self._sql.exc.SQLAlchemyError as error:
            raise ConfigurationError(
                f"{self!r} cannot be read: {self._error_text(error)}"
            ) from None
        finally:
            self._disconnect()
        super().__init__(blocks, max(1, kept))

    def __repr__(self) -> str:
        url = self._url
        where = f"{url.host or ''}/{url.database or ''}"
        return f"table {self._name} of {url.get_backend_name()}://{where}"

    def close(self) -> None:
        """Close the connection; reading opens it again."""
        self._disconnect()
        self._read_last.clear()

    def _disconnect(self) -> None:
        if self._engines is not None and self._engines[0] == os.getpid():
            self._engines[1].dispose()
        self._engines = None

    def __del__(self) -> None:
        if hasattr(self, "_engines"):
            self._disconnect()

    # ---- columns and pages

    def _reflected(self, table: str, key: str | None, columns: Sequence[str] | None) -> Any:
        """Return the columns to read, and the key."""
        sql, engine = self._sql, self._engine()
        schema, _, name = table.rpartition(".")
        try:
            found = sql.Table(
                name,
                sql.MetaData(),
                schema=schema or None,
                autoload_with=engine,
                resolve_fks=False,
            )
        except sql.exc.NoSuchTableError:
            if waiting.starts_again():
                raise sql.exc.NoSuchTableError("there is no such table") from None
            raise ConfigurationError(f"There is no {self!r}.") from None
        key = key or self._primary(found)
        for column in (key, *(columns or ())):
            if column not in found.columns:
                have = ", ".join(found.columns.keys())
                raise ConfigurationError(f"The {self!r} has no column {column}; it has {have}.")
        self._check_unique(found, schema or None, key)
        return [found.columns[column] for column in columns or found.columns.keys()], found.columns[
            key
        ]

    def _primary(self, table: Any) -> str:
        found = list(table.primary_key.columns.keys())
        if len(found) != 1:
            raise ConfigurationError(
                f"The {self!r} has a primary key of {len(found)} columns; name one unique column with key=."
            )
        return str(found[0])

    def _check_unique(self, table: Any, schema: str | None, key: str) -> None:
        inspector = self._sql.inspect(self._engine())
        if table.name in inspector.get_view_names(schema):
            return
        unique = [list(table.primary_key.columns.keys())]
        unique += [c["column_names"] for c in inspector.get_unique_constraints(table.name, schema)]
        unique += [
            index["column_names"]
            for index in inspector.get_indexes(table.name, schema)
            if index["unique"]
        ]
        if [key] not in unique:
            raise ConfigurationError(
                f"The column {key} of {self!r} has no unique index, so it gives no order of the rows."
            )

    def _pages(self, first: Any, last: Any, page: int) -> tuple[list[Any], list[int], Any]:
        """Return the first key and the number of rows of each page, and the last key of all."""
        sql, key = self._sql, self._key
        starts: list[Any] = []
        blocks: list[int] = []
        with self._engine().connect() as connection:
            if first is None and last is None and key.nullable:
                self._refuse_nulls(connection)
            if last is None:
                last = connection.scalar(sql.select(sql.func.max(key)))
            start = connection.scalar(self._from(first, last, [key]).limit(1))
            while start is not None:
                starts.append(start)
                ahead = self._from(start, last, [key])
                # An offset of one page from a key, within the index, costs the same for every page.
                start = connection.scalar(ahead.offset(page).limit(1))
                if start is None:
                    rest = sql.select(sql.func.count()).select_from(ahead.subquery())
                    blocks.append(connection.scalar(rest))
                else:
                    blocks.append(page)
                if start is not None and start == starts[-1]:
                    raise ConfigurationError(f"More than {page} rows of {self!r} have one key.")
        return starts, blocks, last

    def _refuse_nulls(self, connection: Any) -> None:
        without = self._sql.select(self._key).where(self._key.is_(None)).limit(1)
        if connection.execute(without).first() is not None:
            raise ConfigurationError(
                f"Rows of {self!r} have no {self._key.name}; the key must have a value in each."
            )

    # ---- reading

    def _read(self, number: int) -> list[Any]:
        start = self._starts[number]
        rows = self._from(start, self._last, self._columns)
        if number + 1 < len(self._starts):
            rows = rows.where(self._key < self._starts[number + 1])
        found = self._ask(rows)
        if len(found) != self.blocks[number]:
            raise InfrastructureError(
                f"The {self!r} has {len(found)} rows from the key {start!r} on, and had {self.blocks[number]};"
                " rows before the last key must not come or go."
            )
        return found

    def _record(self, block: list[Any], at: int) -> dict[str, Any]:
        return dict(block[at]._mapping)  # noqa: SLF001 - that is its public name

    def _from(self, first: Any, last: Any, columns: Sequence[Any]) -> Any:
        """Select the rows between two keys, in their order."""
        rows = self._sql.select(*columns).order_by(self._key)
        if first is not None:
            rows = rows.where(self._key >= first)
        return rows if last is None else rows.where(self._key <= last)

    def _ask(self, statement: Any) -> list[Any]:
        """Return the rows; wait for a database that is away."""
        passing = self._sql.exc.OperationalError, self._sql.exc.InterfaceError

        def ask() -> list[Any]:
            with self._engine().connect() as connection:
                return list(connection.execute(statement))

        try:
            return self._insist(ask, lambda error: isinstance(error, passing))
        except self._sql.exc.DataError:
            raise  # a value that cannot be read
        except self._sql.exc.DBAPIError as error:
            raise InfrastructureError(
                f"The {self!r} cannot be read: {self._error_text(error)}"
            ) from None

    def _insist(self, call: Callable[[], Result], may_pass: Callable[[Any], bool]) -> Result:
        """Call until there is a result; wait for a database that is away.

        Raises:
            InfrastructureError: the database stays away.
        """
        refuses = self._sql.exc.DBAPIError, self._sql.exc.NoSuchTableError
        return waiting.insist(
            call,
            f"The {self!r}",
            lambda error: isinstance(error, refuses) and may_pass(error),
            self._error_text,
        )

    def _is_away(self, error: Any) -> bool:
        """Return whether a database that is to be opened is away, rather than refuses.

        To a worker that starts again it has refused nothing before.
        """
        if waiting.starts_again():
            return True
        text = str(error.orig)
        if _NO_HOST in text:
            return False
        match self._url.get_backend_name():
            case "mysql" | "mariadb":
                return error.orig.args[:1] in [(code,) for code in _MYSQL_AWAY]
            case "postgresql":
                operational = isinstance(error, self._sql.exc.OperationalError)
                return operational and ("FATAL" not in text or any(w in text for w in _STARTING))
        return "locked" in text

    def _engine(self) -> Any:
        """Return this process's own connections."""
        if self._engines is None or self._engines[0] != os.getpid():
            if self._engines is not None:
                self._engines[1].dispose(close=False)  # they are the parent's
            with extras.needed(f"The {self!r}", "sql"):
                try:
                    self._engines = (
                        os.getpid(),
                        databases.create_engine(self._url, waiting.PATIENCE),
                    )
                except ValueError as error:
                    raise ConfigurationError(f"The {self!r}: {error}") from None
        return self._engines[1]

    def _error_text(self, error: Any) -> str:
        """Return an error in one line, without secrets of the URL."""
        text = " ".join(str(getattr(error, "orig", None) or error).split())
        secrets = [str(v) for k, v in self._url.query.items() if "pass" in k.lower()]
        for secret in filter(None, [self._url.password, *secrets]):
            text = text.replace(str(secret), "***")
        return text

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_engines": None, "_sql": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._sql = extras.load("sqlalchemy", "A table", "sql")


def _url(sql: Any, given: Any) -> Any:
    try:
        url = sql.engine.make_url(given)
    except (sql.exc.ArgumentError, ValueError):
        raise ConfigurationError(
            "The URL of a database cannot be read; it must be like postgresql://user:password@host/database,"
            " with %-escapes for other characters of the password than letters and digits."
        ) from None
    url = url.set(drivername=_DRIVERS.get(url.drivername, url.drivername))
    if url.get_backend_name() == "sqlite" and not os.path.exists(url.database or ""):
        raise ConfigurationError(f"There is no file {url.database or ':memory:'} of SQLite.")
    return url
