"""Text files: one sample per line or row."""

from __future__ import annotations

import csv
from abc import abstractmethod
from collections.abc import Iterator
from typing import Any

import msgspec

from dlrover.data.sources.files import FileRecords, Paths, Record
from dlrover.errors import ConfigurationError

CHUNK = 1 << 22
"""Bytes to search at a time."""


class _Text(FileRecords[Record]):
    """Records of text."""

    _quoted = False
    """True if a record may continue behind a line end within quotes."""

    def _index(self, path: str) -> Iterator[int]:
        return _bounds(path, quoted=self._quoted)

    def _record(self, data: bytes, number: int) -> Record:
        return self._decoded(data.decode().rstrip("\r\n"), number)

    @abstractmethod
    def _decoded(self, text: str, number: int) -> Record:
        """Return the record in a text of file ``number``."""


class Lines(_Text[str]):
    """Lines of text, without their ends. An empty line is a sample, too."""

    def _decoded(self, text: str, number: int) -> str:
        return text


class JsonLines(_Text[Any]):
    """One JSON value per line, decoded."""

    def _decoded(self, text: str, number: int) -> Any:
        return msgspec.json.decode(text)


class Csv(_Text["dict[str, str]"]):
    """Rows of CSV files as dicts; the first row of each names the columns. Quoted fields may span lines."""

    _quoted = True

    def __init__(self, paths: Paths, *, delimiter: str = ",") -> None:
        self._delimiter = delimiter
        self._columns: list[list[str]] = []
        super().__init__(paths)
        for number, bounds in enumerate(self._bounds):
            if len(bounds) < 2:
                raise ConfigurationError(f"{self.paths[number]} has no row with column names.")
            head = self._data(number, bounds[0], bounds[1])
            self._columns.append(self._split(head.decode("utf-8-sig").rstrip("\r\n")))
            del bounds[0]
        total = 0
        for number, bounds in enumerate(self._bounds):
            total += len(bounds) - 1
            self._ends[number] = total

    def _split(self, text: str) -> list[str]:
        return next(csv.reader([text], delimiter=self._delimiter), [])

    def _decoded(self, text: str, number: int) -> dict[str, str]:
        values, columns = self._split(text), self._columns[number]
        if len(values) != len(columns):
            raise ValueError(f"a row has {len(values)} values for {len(columns)} columns")
        return dict(zip(columns, values, strict=True))


def _bounds(path: str, *, quoted: bool) -> Iterator[int]:
    """Yield where the records of a file begin, and where the last one ends."""
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
