"""A folder of numbered Parquet files that a pipeline fills: a stream without a broker.

A file is added whole, under the number of its part, and never changes. Rows count in the order of the parts, up to the
first part that is missing. A mark says whether the pipeline has ended, and then how many rows each part has.
"""

from __future__ import annotations

import errno
import filecmp
import os
import uuid
from bisect import bisect_right
from itertools import accumulate
from pathlib import Path
from typing import Any

import msgspec

from dlrover import extras
from dlrover._util import decoding
from dlrover._util.files import write_atomically
from dlrover.data.sources.parquet import MARK, Parquet
from dlrover.data.sources.stream import Address, Bounds, Broker, Fetched, Message
from dlrover.errors import ConfigurationError, DLRoverError, InfrastructureError

ROWS = 1000
"""Rows of a row group."""
SHARD = 500
"""Rows in a shard, unless set: few workers then read the same row group."""
SCHEME = "parquet"


class Mark(msgspec.Struct, frozen=True):
    """State of a pipeline's folder."""

    complete: bool = False
    rows: tuple[int, ...] = ()
    """Rows of each part, once the pipeline has ended."""


class Folder:
    """The parts of one pipeline."""

    def __init__(self, address: Address) -> None:
        address.accept()
        if address.scheme != SCHEME or address.host or not address.path:
            raise ConfigurationError(
                f"The address {address} names no folder; {SCHEME}:///FOLDER is accepted, with its absolute path."
            )
        self._parquet = extras.load("pyarrow.parquet", "Parquet", "parquet")
        self.path = Path("/", address.path)

    def mark(self) -> Mark | None:
        """Return the state; None if no pipeline has begun."""
        try:
            return decoding.json((self.path / MARK).read_bytes(), Mark)
        except FileNotFoundError:
            return None
        except msgspec.MsgspecError as error:
            raise InfrastructureError(f"{self.path / MARK} is damaged: {error}.") from error

    def part(self, number: int) -> Path:
        """Return the file of a part that has rows."""
        return self.path / f"part-{number:06d}.parquet"

    def rows(self, number: int) -> int | None:
        """Return the number of rows of a part; None if it is missing."""
        try:
            return int(self._parquet.read_metadata(self.part(number)).num_rows)
        except FileNotFoundError:
            return 0 if self._empty(number).exists() else None

    def _empty(self, number: int) -> Path:
        """Return the file of a part without rows, which readers of Parquet pass over."""
        return self.path / f"_part-{number:06d}"

    # ---- the pipeline

    def begin(self) -> bool:
        """Begin to write, or go on; return False if the pipeline has ended before."""
        self.path.mkdir(parents=True, exist_ok=True)
        mark = self.mark()
        if mark is None:
            write_atomically(self.path / MARK, msgspec.json.encode(Mark()))
        return mark is None or not mark.complete

    def add(self, number: int, table: Any) -> None:
        """Add a part, unless an earlier attempt has done so.

        Raises:
            ConfigurationError: the earlier attempt made other rows.
        """
        file, other = self.part(number), self._empty(number)
        if not table.num_rows:
            file, other = other, file
        draft = self.path / f".{file.name}-{uuid.uuid4().hex}"
        try:
            with draft.open("wb") as out:
                if table.num_rows:
                    self._parquet.write_table(table.combine_chunks(), out, row_group_size=ROWS)
                out.flush()
                os.fsync(out.fileno())
            try:
                if other.exists():
                    raise _unequal(file, number)
                os.link(draft, file)
            except FileExistsError:
                if not filecmp.cmp(draft, file, shallow=False):
                    raise _unequal(file, number) from None
            except OSError as error:
                if error.errno not in (errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS):
                    raise
                raise ConfigurationError(
                    f"The file system of {self.path} has no hard links, which a stream in a folder needs; choose another"
                    " folder."
                ) from error
        finally:
            draft.unlink(missing_ok=True)
        _sync(self.path)

    def finish(self, parts: int) -> int:
        """End the stream after its last part; return the number of rows.

        Raises:
            ConfigurationError: an earlier attempt made more parts.
        """
        rows = [self.rows(number) for number in range(parts)]
        if None in rows:
            raise InfrastructureError(f"Part {rows.index(None)} of {self.path} is missing.")
        if self.rows(parts) is not None:
            raise _unequal(self.part(parts), parts)
        mark = Mark(complete=True, rows=tuple(count for count in rows if count is not None))
        write_atomically(self.path / MARK, msgspec.json.encode(mark))
        for draft in (*self.path.glob(".part-*"), *self.path.glob("._part-*")):
            draft.unlink(missing_ok=True)
        return sum(mark.rows)


def _unequal(file: Path, number: int) -> ConfigurationError:
    return ConfigurationError(
        f"The pipeline makes other rows of part {number} than an earlier attempt, whose rows are in {file.parent}: its"
        " input, code or packages have changed, or it has no seed. Write to another folder."
    )


def _sync(folder: Path) -> None:
    fd = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


class PartFolder(Broker):
    """The rows of a folder; one partition, whose offsets are the numbers of the rows."""

    def __init__(self, address: Address) -> None:
        super().__init__(address)
        self._folder = Folder(address)
        self._ends: list[int] = []
        self._opened: tuple[int, Parquet] | None = None

    @property
    def identity(self) -> str:
        """The folder."""
        return f"{SCHEME} {self._folder.path}"

    def bounds(self) -> list[Bounds]:
        """Return the bounds of the rows; empty ones while there is no part."""
        mark = None if self.ended else self._folder.mark()
        if mark is not None and mark.complete:
            self._ends, self.ended = list(accumulate(mark.rows)), True
        while not self.ended and (rows := self._folder.rows(len(self._ends))) is not None:
            self._ends.append(self._end + rows)
        return [Bounds(0, self._end)]

    @property
    def _end(self) -> int:
        return self._ends[-1] if self._ends else 0

    def shard(self, bounds: list[Bounds]) -> int:
        """Return the number of rows in a shard."""
        return SHARD

    def fetch(self, partition: int, start: int, stop: int, most: int) -> Fetched:
        """Return rows of the part that has row ``start``."""
        if start >= self._end and start >= self.bounds()[0].end:
            raise TimeoutError(f"row {start} is not there")  # perhaps not yet on this machine
        number = bisect_right(self._ends, start)
        reached = min(stop, self._ends[number], start + most)
        try:
            part = self._part(number)
            first = self._ends[number] - len(part)
            messages = [Message(0, at, part[at - first]) for at in range(start, reached)]
        except DLRoverError as error:
            if not isinstance(error.__context__, OSError):
                raise
            raise TimeoutError(str(error)) from error  # a shared folder may be away for a moment
        return Fetched(messages, reached, start)

    def _part(self, number: int) -> Parquet:
        if self._opened is None or self._opened[0] != number:
            self._opened = number, Parquet(self._folder.part(number))
        return self._opened[1]

    def close(self) -> None:
        """Close the open part."""
        self._opened = None
