"""The journal: every input of the master's machines, in order, before it takes effect.

A SQLite file in write-ahead mode: an append survives the death of the process at any instant (only a
crash of the whole machine may take the last moments). Replaying it gives the machines their state back.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from dlrover.errors import InfrastructureError
from dlrover.master.machine import inputs
from dlrover.rpc import messages

Entry = inputs.Input | messages.StoreRequest

FORMAT = 1
"""Changes when old journals can no longer be replayed."""

_ANY_INPUT = msgspec.msgpack.Decoder(inputs.Input)
_ANY_REQUEST = msgspec.msgpack.Decoder(messages.StoreRequest)
_encoder = msgspec.msgpack.Encoder()


class Journal:
    """One job's journal at ``path``; made if it does not exist.

    Raises:
        InfrastructureError: the file cannot be opened, is damaged, or has another format; also when an
            append fails (disk full).
    """

    def __init__(self, path: Path, *, read_only: bool = False) -> None:
        self._path = path
        uri = f"{path.absolute().as_uri()}{'?mode=ro' if read_only else ''}"
        try:
            self._db = sqlite3.connect(uri, uri=True, isolation_level=None, timeout=5.0)
        except sqlite3.Error as error:
            raise self._problem("cannot be opened", error) from error
        try:
            version = self._prepare(read_only)
        except sqlite3.Error as error:
            self._db.close()
            raise self._problem("cannot be opened", error) from error
        if version != FORMAT:
            self._db.close()
            raise InfrastructureError(
                f"The journal {path} has format {version}; this version reads {FORMAT}."
            )

    def _prepare(self, read_only: bool) -> int:
        """Make the table of a new journal; the journal's format."""
        if not read_only:
            self._db.execute("PRAGMA journal_mode=WAL")
            self._db.execute("PRAGMA synchronous=NORMAL")
            self._db.execute(
                "CREATE TABLE IF NOT EXISTS entries "
                "(seq INTEGER PRIMARY KEY, time REAL NOT NULL, kind TEXT NOT NULL, body BLOB NOT NULL)"
            )
            if self._version() == 0:
                self._db.execute(f"PRAGMA user_version={FORMAT}")
        return self._version()

    def append(self, entry: Entry, time: float) -> None:
        """Add an entry; it is on its way to the disk when this returns."""
        kind = "input" if isinstance(entry, inputs.Input) else "store"
        try:
            self._db.execute(
                "INSERT INTO entries (time, kind, body) VALUES (?, ?, ?)",
                (time, kind, _encoder.encode(entry)),
            )
        except sqlite3.Error as error:
            raise self._problem("cannot be written", error) from error

    def entries(self) -> Iterator[tuple[float, Entry]]:
        """All entries with their times, oldest first."""
        try:
            rows: Any = self._db.execute("SELECT time, kind, body FROM entries ORDER BY seq")
            for time, kind, body in rows:
                decoder = _ANY_INPUT if kind == "input" else _ANY_REQUEST
                yield time, decoder.decode(body)
        except (sqlite3.Error, msgspec.DecodeError) as error:
            raise self._problem("cannot be read", error) from error

    def close(self) -> None:
        """Close the file."""
        self._db.close()

    def _version(self) -> int:
        return int(self._db.execute("PRAGMA user_version").fetchone()[0])

    def _problem(self, what: str, error: Exception) -> InfrastructureError:
        return InfrastructureError(f"The journal {self._path} {what}: {error}.")
