"""The journal as a SQLite file in write-ahead mode.

An append survives the death of the process at any instant; only a crash of the whole machine may lose
the last moments. Two masters may have the file open: each append checks which of them may write, in
the same transaction.
"""

from __future__ import annotations

import contextlib
import functools
import os
import re
import sqlite3
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec

from dlrover.errors import DamagedJournalError, DLRoverError, FencedError, InfrastructureError
from dlrover.master.journal.journal import MASTER, Codec, Entry, fenced
from dlrover.spec.jobdir import FORMAT, check_format

LOCK_TIMEOUT = 5.0
"""Maximum seconds to wait for another master that opens the file or appends to it."""
LOCK_PAUSE = 0.01
"""Seconds between two attempts at an operation that SQLite does not wait for."""

_TABLES = (
    "CREATE TABLE IF NOT EXISTS entries "
    "(seq INTEGER PRIMARY KEY, time REAL NOT NULL, kind TEXT NOT NULL, body BLOB NOT NULL)",
    "CREATE TABLE IF NOT EXISTS master (id INTEGER PRIMARY KEY CHECK (id = 1), epoch INTEGER NOT NULL)",
    "INSERT OR IGNORE INTO master VALUES (1, 0)",
)
_INSERT = (
    "INSERT INTO entries (time, kind, body) SELECT ?, ?, ? WHERE (SELECT epoch FROM master) = ?"
)


def open_file(rest: str, own_file: Path, *, read_only: bool) -> FileJournal:
    """Open the journal at the path ``rest``, or in the job directory if ``rest`` is empty."""
    return FileJournal(Path(rest) if rest else own_file, read_only=read_only)


class FileJournal:
    """One job's journal at ``path``, created if it does not exist; ``codec`` is that of its entries.

    Raises:
        FormatError: another version of DLRover wrote it; it stays as it is.
        DamagedJournalError: what is in the file cannot be read, or is no journal.
        InfrastructureError: the file cannot be opened; also when an append fails (disk full).
    """

    def __init__(self, path: Path, *, read_only: bool = False, codec: Codec = MASTER) -> None:
        self._path = path
        self._codec = codec
        self.epoch = 0
        """See `Journal`."""
        with self._reported("cannot be opened"):
            if not read_only:
                _create(path)
            self._db = self._connect("?mode=ro" if read_only else "")
        try:
            with self._reported("cannot be opened"):
                self._open(read_only)
                self._file = path.stat().st_ino
        except DLRoverError:
            self._db.close()
            raise

    def _open(self, read_only: bool) -> None:
        try:
            self._check_format(read_only)
        except sqlite3.OperationalError as error:
            if not read_only or "locked" in str(error) or self._has_log():
                raise
            # A reader needs a file beside the journal, which a full or read-only disk does not take.
            self._db.close()
            self._db = self._connect("?immutable=1")
            self._check_format(read_only)
        if not read_only:
            self._prepare()
            self.epoch = self._take_epoch()

    def _connect(self, mode: str) -> sqlite3.Connection:
        uri = f"{self._path.absolute().as_uri()}{mode}"
        database = sqlite3.connect(uri, uri=True, isolation_level=None, timeout=LOCK_TIMEOUT)
        # The codec refuses what is damaged; SQLite's error would not say where it is.
        database.text_factory = functools.partial(str, encoding="utf-8", errors="replace")
        return database

    def _has_log(self) -> bool:
        """Return whether entries are outside of the file itself, as while a master runs or after it was killed."""
        log = Path(f"{self._path}-wal")
        return log.exists() and log.stat().st_size > 0

    def _check_format(self, read_only: bool) -> None:
        """Refuse another version's journal; refuse a reader if the file is new and not yet prepared."""
        version = self._version()
        if version:
            check_format(self._path, version)
        elif read_only:
            raise InfrastructureError(f"The journal {self._path} is empty.")

    def _prepare(self) -> None:
        """Create the tables of a new journal."""
        self._write_ahead()
        self._db.execute("PRAGMA synchronous=NORMAL")
        for statement in _TABLES:
            self._db.execute(statement)
        if self._version() == 0:
            self._db.execute(f"PRAGMA user_version={FORMAT}")

    def _write_ahead(self) -> None:
        """Set the mode; wait for another process that does the same, which SQLite itself does not."""
        until = time.monotonic() + LOCK_TIMEOUT
        while not self._has_set_mode(last=time.monotonic() > until):
            time.sleep(LOCK_PAUSE)  # noqa: TID251  # as SQLite does for every other statement

    def _has_set_mode(self, *, last: bool) -> bool:
        try:
            self._db.execute("PRAGMA journal_mode=WAL")
        except sqlite3.OperationalError as error:
            if last or "locked" not in str(error):
                raise
            return False
        return True

    def append(self, entry: Entry, now: float) -> None:
        """Add an entry; it is on its way to the disk when this returns."""
        self.append_all((entry,), now)

    def append_all(self, entries: Sequence[Entry], now: float) -> None:
        """Add entries in one transaction."""
        self._check_file()
        rows = [(now, *self._codec.encode(entry), self.epoch) for entry in entries]
        with self._reported("cannot be written"):
            added = self._insert(rows)
        if not added:
            self.check()

    def _insert(self, rows: list[tuple[float, str, bytes, int]]) -> int:
        """Add rows and return their number; 0 if another master's epoch is the latest."""
        if len(rows) == 1:
            return self._db.execute(_INSERT, rows[0]).rowcount
        with self._transaction():
            return self._db.executemany(_INSERT, rows).rowcount

    def replace(self, entry: Entry, now: float) -> None:
        """Put an entry in the place of all entries of its kind, in one transaction; their room is used again."""
        self._check_file()
        kind, body = self._codec.encode(entry)
        with self._reported("cannot be written"), self._transaction():
            added = self._db.execute(_INSERT, (now, kind, body, self.epoch))
            if added.rowcount:
                last = "DELETE FROM entries WHERE kind = ? AND seq < ?"
                self._db.execute(last, (kind, added.lastrowid))
        if not added.rowcount:
            self.check()

    def entries(self) -> Iterator[tuple[float, Entry]]:
        """Yield all entries with their times, oldest first."""
        seq = 0
        try:
            rows: Any = self._db.execute("SELECT seq, time, kind, body FROM entries ORDER BY seq")
            for seq, at, kind, body in rows:  # noqa: B007 - the errors name it
                yield at, self._codec.decode(kind, body)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise self._problem("cannot be read", error, f" at entry {seq}") from error
        except sqlite3.Error as error:
            raise self._problem("cannot be read", error, f" behind entry {seq}") from error

    def check(self) -> None:
        """Check that this is still the job's journal and its latest epoch."""
        self._check_file()
        with self._reported("cannot be read"):
            latest = self._latest()
        if latest != self.epoch:
            raise fenced(self.epoch, latest)

    def raise_epoch(self, above: int) -> None:
        """Take an epoch higher than ``above``."""
        self._check_file()
        with self._reported("cannot be written"):
            taken = self._db.execute(
                "UPDATE master SET epoch = ? WHERE epoch = ?",
                (max(above, self.epoch) + 1, self.epoch),
            )
        if not taken.rowcount:
            self.check()
        self.epoch = max(above, self.epoch) + 1

    def close(self) -> None:
        """Close the file."""
        self._db.close()

    def _take_epoch(self) -> int:
        """Make this the latest master in one transaction; return its epoch."""
        with self._transaction():
            self._db.execute("UPDATE master SET epoch = epoch + 1")
            return self._latest()

    @contextlib.contextmanager
    def _transaction(self) -> Iterator[None]:
        """Run the block as one transaction, all or nothing; no other master writes meanwhile."""
        self._db.execute("BEGIN IMMEDIATE")
        try:
            yield
            self._db.execute("COMMIT")
        except sqlite3.Error:
            if self._db.in_transaction:
                self._db.execute("ROLLBACK")
            raise

    def _latest(self) -> int:
        return int(self._db.execute("SELECT epoch FROM master").fetchone()[0])

    def _check_file(self) -> None:
        """Refuse to continue in a deleted file once another master has created a new one."""
        try:
            current = os.stat(self._path).st_ino  # for each entry: `Path.stat` takes twice as long
        except OSError:
            return
        if current != self._file:
            raise FencedError(
                f"The journal {self._path} was replaced: another master has taken over the job."
            )

    def _version(self) -> int:
        return int(self._db.execute("PRAGMA user_version").fetchone()[0])

    def _problem(self, what: str, error: Exception, place: str = "") -> InfrastructureError:
        # SQLite reports damage by the error's base class, and all else that may pass by a class of its own.
        if isinstance(error, OSError) or (
            isinstance(error, sqlite3.Error) and type(error) is not sqlite3.DatabaseError
        ):
            return InfrastructureError(f"The journal {self._path} {what}: {error}.")
        return DamagedJournalError(
            f"The journal {self._path} is damaged{place}{self._damaged_page()}: {error}.",
            str(self._path),
        )

    def _damaged_page(self) -> str:
        """Return the place of the first damaged page, as words, if SQLite finds one."""
        with contextlib.suppress(sqlite3.Error, AttributeError):
            (found,) = self._db.execute("PRAGMA quick_check(1)").fetchone()
            (size,) = self._db.execute("PRAGMA page_size").fetchone()
            page = re.search(r"[Pp]age (\d+)", found)
            return f", in the page at byte {(int(page[1]) - 1) * size}" if page else ""
        return ""

    @contextlib.contextmanager
    def _reported(self, what: str) -> Iterator[None]:
        """Raise an error of the store as one of DLRover."""
        try:
            yield
        except (sqlite3.Error, OSError, msgspec.DecodeError, UnicodeDecodeError) as error:
            raise self._problem(what, error) from error


def _create(path: Path) -> None:
    """Create a file that only its owner can read, as items of queues are in it; those beside it get the same mode."""
    with contextlib.suppress(FileExistsError):
        os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600))
