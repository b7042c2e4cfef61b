"""Text files: one sample per line or row."""

from __future__ import annotations

import csv
import re
from abc import abstractmethod
from collections.abc import Iterator
from typing import Any, BinaryIO

import msgspec

from dlrover.data.sources.files import FileRecords, Paths, Record
from dlrover.errors import ConfigurationError

CHUNK = 1 << 22
"""Bytes to read at a time."""
_BOM = b"\xef\xbb\xbf"
_HEAD = 10
"""Bytes by which a compressed file is known."""
_COMPRESSED = re.compile(
    rb"\x1f\x8b|\xfd7zXZ\0|\x28\xb5\x2f\xfd|PK\x03\x04|BZh[1-9](1AY&SY|\x17\x72\x45\x38\x50\x90)"
)
"""Beginnings of files of gzip, xz, Zstandard, zip and bzip2, whose first letters a text may have, too."""


class _Text(FileRecords[Record]):
    """Records of text in UTF-8."""

    def _index(self, path: str) -> Iterator[int]:
        with open(path, "rb", buffering=CHUNK) as file:
            head = file.read(_HEAD)
            if _COMPRESSED.match(head):
                raise ConfigurationError(f"{path} is compressed; decompress it.")
            start = len(_BOM) if head.startswith(_BOM) else 0
            file.seek(start)
            yield start
            yield from self._stops(file, start)

    def _stops(self, file: BinaryIO, start: int) -> Iterator[int]:
        """Yield where the records of a file end that begin at ``start``."""
        for line in file:
            start += len(line)
            yield start

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

    def __init__(self, paths: Paths, *, delimiter: str = ",") -> None:
        self._delimiter = delimiter
        self._opening = re.compile(b"(?:^|" + re.escape(delimiter.encode()) + b')"')
        self._columns: list[list[str]] = []
        super().__init__(paths)
        for number, bounds in enumerate(self._bounds):
            if len(bounds) < 2:
                raise ConfigurationError(f"{self.paths[number]} has no row with column names.")
            head = self._data(number, bounds[0], bounds[1])
            self._columns.append(self._split(head.decode().rstrip("\r\n")))
            del bounds[0]
        total = 0
        for number, bounds in enumerate(self._bounds):
            total += len(bounds) - 1
            self._ends[number] = total

    def _stops(self, file: BinaryIO, start: int) -> Iterator[int]:
        quoted = False
        for line in file:
            start += len(line)
            quoted = self._quoted_behind(line, quoted) if b'"' in line else quoted
            if not quoted:
                yield start
        if quoted:
            yield start

    def _quoted_behind(self, line: bytes, quoted: bool) -> bool:
        """Return whether quotes are open at a line's end. Only the beginning of a field opens them."""
        at = 0
        while True:
            while quoted:
                at = line.find(b'"', at) + 1
                if not at:
                    return True
                if line[at : at + 1] == b'"':
                    at += 1
                else:
                    quoted = False
            opening = self._opening.search(line, at)
            if opening is None:
                return False
            at, quoted = opening.end(), True

    def _split(self, text: str) -> list[str]:
        csv.field_size_limit(
            max(csv.field_size_limit(), len(text))
        )  # of the whole process; 128 KiB
        return next(csv.reader([text], delimiter=self._delimiter), [])

    def _decoded(self, text: str, number: int) -> dict[str, str]:
        values, columns = self._split(text), self._columns[number]
        if len(values) != len(columns):
            raise ValueError(f"a row has {len(values)} values for {len(columns)} columns")
        return dict(zip(columns, values, strict=True))
