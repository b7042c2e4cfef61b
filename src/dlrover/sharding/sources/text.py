"""Text files: one sample a line, or a row.

A file is read once to learn where its records begin, 8 bytes of memory for each; after that any record is
one read. The index is the same in all processes, and so is the number of a record.
"""

from __future__ import annotations

import csv
import os
from array import array
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from typing import Any, Generic, TypeVar

import msgspec

from dlrover.errors import ConfigurationError, InfrastructureError

Record = TypeVar("Record")
Paths = str | os.PathLike[str] | Sequence[str | os.PathLike[str]]

CHUNK = 1 << 22
"""Bytes that are looked through at a time."""


class _Records(Generic[Record]):
    """The records of one or several files, which must not change.

    Raises:
        ConfigurationError: a file cannot be read.
    """

    _quoted = False
    """Whether a line may end within quotes, and the record goes on."""

    _pid = -1

    def __init__(self, paths: Paths) -> None:
        alone = [paths] if isinstance(paths, str | os.PathLike) else paths
        self.paths = [os.fspath(path) for path in alone]
        self._bounds: list[array[int]] = []
        self._ends: list[int] = []
        self._files: dict[int, int] = {}
        self._pid = os.getpid()
        for path in self.paths:
            try:
                bounds = array("q", _bounds(path, quoted=self._quoted))
            except OSError as error:
                raise ConfigurationError(f"{path} cannot be read: {error.strerror}.") from error
            self._bounds.append(bounds)
            self._ends.append((self._ends[-1] if self._ends else 0) + len(bounds) - 1)

    def __len__(self) -> int:
        return self._ends[-1] if self._ends else 0

    def __getitem__(self, index: int) -> Record:
        if not 0 <= index < len(self):
            raise IndexError(f"record {index} of {len(self)}")
        number = bisect_right(self._ends, index)
        at = index - (self._ends[number - 1] if number else 0)
        start, stop = self._bounds[number][at : at + 2]
        data = os.pread(self._file(number), stop - start, start)
        if len(data) != stop - start:
            raise InfrastructureError(
                f"{self.paths[number]} has become shorter; it must not change."
            )
        return self._record(data.decode().rstrip("\r\n"), number)

    def _record(self, text: str, number: int) -> Record:
        raise NotImplementedError

    def _file(self, number: int) -> int:
        """The descriptor of a file, this process's own."""
        if self._pid != os.getpid():
            self._files, self._pid = {}, os.getpid()
        if number not in self._files:
            self._files[number] = os.open(self.paths[number], os.O_RDONLY | os.O_CLOEXEC)
        return self._files[number]

    def close(self) -> None:
        """Close the files; reading opens them again."""
        if self._pid == os.getpid():
            for fd in self._files.values():
                os.close(fd)
        self._files = {}

    def __del__(self) -> None:
        self.close()

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_files": {}}


class Lines(_Records[str]):
    """Lines of text, without their ends. An empty line is a sample, too."""

    def _record(self, text: str, number: int) -> str:
        return text


class JsonLines(_Records[Any]):
    """One JSON value a line, decoded."""

    def _record(self, text: str, number: int) -> Any:
        return msgspec.json.decode(text)


class Csv(_Records["dict[str, str]"]):
    """Rows of CSV files as dicts; the first row of each names the columns. Quoted fields may have lines."""

    _quoted = True

    def __init__(self, paths: Paths, *, delimiter: str = ",") -> None:
        self._delimiter = delimiter
        self._columns: list[list[str]] = []
        super().__init__(paths)
        for number, bounds in enumerate(self._bounds):
            if len(bounds) < 2:
                raise ConfigurationError(f"{self.paths[number]} has no row with column names.")
            head = os.pread(self._file(number), bounds[1] - bounds[0], bounds[0])
            self._columns.append(self._split(head.decode("utf-8-sig").rstrip("\r\n")))
            del bounds[0]
        total = 0
        for number, bounds in enumerate(self._bounds):
            total += len(bounds) - 1
            self._ends[number] = total

    def _split(self, text: str) -> list[str]:
        return next(csv.reader([text], delimiter=self._delimiter), [])

    def _record(self, text: str, number: int) -> dict[str, str]:
        values, columns = self._split(text), self._columns[number]
        if len(values) != len(columns):
            raise ValueError(f"a row has {len(values)} values for {len(columns)} columns")
        return dict(zip(columns, values, strict=True))


def _bounds(path: str, *, quoted: bool) -> Iterator[int]:
    """Where the records of a file begin, and where the last one ends."""
    yield 0
    position, quotes, last = 0, 0, 0
    with open(path, "rb") as file:
        while chunk := file.read(CHUNK):
            at = -1
            counted = 0
            while (at := chunk.find(b"\n", at + 1)) >= 0:
                if quoted:
                    quotes += chunk.count(b'"', counted, at)
                    counted = at
                if quotes % 2 == 0:
                    last = position + at + 1
                    yield last
            if quoted:
                quotes += chunk.count(b'"', counted)
            position += len(chunk)
    if last < position:
        yield position
