"""Connections to database servers, each of whose waits for an answer is bounded."""

from __future__ import annotations

import importlib
import math
import select
from typing import Any

CONNECT_TIMEOUT = 10
"""Seconds that a connection may take, unless its URL has ``connect_timeout``."""


def create_engine(url: Any, timeout: float, **options: Any) -> Any:
    """Create an engine of SQLAlchemy.

    Its drivers PyMySQL and psycopg raise `OperationalError` when a server has not answered for ``timeout`` seconds.
    The parameters ``connect_timeout`` and ``read_timeout`` of the URL, in seconds, take precedence.

    Raises:
        ValueError: ``read_timeout`` of the URL is not a number above 0.
    """
    sql = importlib.import_module("sqlalchemy")
    driver = url.get_driver_name()
    if driver not in ("pymysql", "psycopg"):
        return sql.create_engine(url, **options)
    limit = _seconds(url.query.get("read_timeout", timeout))
    url = url.difference_update_query(["read_timeout"])
    arguments = options.setdefault("connect_args", {})
    if "connect_timeout" not in url.query:
        arguments["connect_timeout"] = CONNECT_TIMEOUT
    if driver == "pymysql":
        arguments |= {"read_timeout": limit, "write_timeout": limit}
        return sql.create_engine(url, **options)
    # A pooler such as PgBouncer gives each transaction another connection, where the name may be another statement's.
    arguments["prepare_threshold"] = None
    engine = sql.create_engine(url, **options)
    connection = _bounded(importlib.import_module("psycopg"), limit)

    def connect(_dialect: Any, _record: Any, words: Any, names: Any) -> Any:
        return connection.connect(*words, **names)

    sql.event.listen(engine, "do_connect", connect)
    return engine


def shown(url: Any) -> str:
    """Return a URL of SQLAlchemy as text, without passwords: they may also be among its parameters."""
    secret = [name for name in url.query if "pass" in name.lower()]
    return str(url.difference_update_query(secret).render_as_string(hide_password=True))


def _seconds(given: Any) -> float:
    try:
        seconds = float(given)
    except (TypeError, ValueError):
        seconds = 0.0
    if not 0 < seconds < math.inf:
        raise ValueError(f"read_timeout of the URL is {given!r}; accepted are seconds above 0.")
    return seconds


def _bounded(psycopg: Any, limit: float) -> Any:
    """Return psycopg's connection, but for its endless wait: libpq has no limit for an answer."""
    waits = psycopg.waiting
    events = {
        waits.Wait.R: select.POLLIN,
        waits.Wait.W: select.POLLOUT,
        waits.Wait.RW: select.POLLIN | select.POLLOUT,
    }

    class Bounded(psycopg.Connection):  # type: ignore[misc]
        def wait(self, gen: Any, *_: Any, **__: Any) -> Any:
            poll = select.poll()
            try:
                wanted = next(gen)
                while True:
                    poll.register(self.pgconn.socket, events[wanted])
                    found = poll.poll(limit * 1000)
                    if not found:
                        self.pgconn.finish()
                        raise psycopg.OperationalError(
                            f"the server has not answered for {limit:g} s (read_timeout)"
                        )
                    wanted = gen.send(_ready(waits.Ready, found[0][1]))
            except StopIteration as done:
                return done.value

    return Bounded


def _ready(kinds: Any, events: int) -> Any:
    readable = events & ~select.POLLOUT  # an end or an error of the socket is read
    if not events & select.POLLOUT:
        return kinds.R
    return kinds.RW if readable else kinds.W
