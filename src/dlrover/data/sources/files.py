"""Records of files by number, for any format, and those of TFRecord files.

Each file is read once to learn where its records begin, which takes 8 bytes of memory per record; then each
record is one read. The index is the same in all processes, and so is the number of a record.
"""

from __future__ import annotations

import errno
import os
import re
import struct
from abc import ABC, abstractmethod
from array import array
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, Generic, TypeVar

from dlrover.data.sources import waiting
from dlrover.errors import ConfigurationError, InfrastructureError

MAX_OPEN = 100
"""Maximum number of files that one reader keeps open; a process may have 1,024 in all."""
Record = TypeVar("Record")
Result = TypeVar("Result")
Paths = str | os.PathLike[str] | Sequence[str | os.PathLike[str]]


class FileRecords(ABC, Generic[Record]):
    """Records of one or several files, which must not change.

    Raises:
        ConfigurationError: a file cannot be read, or there is none.
        InfrastructureError: its disk or file server fails, or a file stays away from a worker that starts again.
    """

    def __init__(self, paths: Paths) -> None:
        alone = [paths] if isinstance(paths, str | os.PathLike) else paths
        self.paths = [os.fspath(path) for path in alone]
        if not self.paths:
            raise ConfigurationError("paths is empty; it must name one file or several.")
        self._bounds: list[array[int]] = []
        self._ends: list[int] = []
        self._files = OrderedDict[int, _OpenFile]()
        """Open files by number, the ones used last at the end."""
        for path in self.paths:
            bounds = opened(path, partial(self._indexed, path))
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
        data = self._data(number, start, stop)
        if len(data) != stop - start:
            raise InfrastructureError(
                f"{self.paths[number]} has become shorter; it must not change."
            )
        return self._record(data, number)

    def _data(self, number: int, start: int, stop: int) -> bytes:
        def read() -> bytes:
            try:
                return self._file(number).read(start, stop)
            except OSError:
                self._files.pop(number, None)
                raise

        return waiting.insist(read, self.paths[number], is_away, error_text)

    def _indexed(self, path: str) -> array[int]:
        return array("q", self._index(path))

    @abstractmethod
    def _index(self, path: str) -> Iterator[int]:
        """Yield where the records of a file begin, and where the last one ends."""

    @abstractmethod
    def _record(self, data: bytes, number: int) -> Record:
        """Return the record in the bytes of file ``number``."""

    def _file(self, number: int) -> _OpenFile:
        file = self._files.pop(number, None) or _OpenFile(self.paths[number])
        self._files[number] = file
        while len(self._files) > MAX_OPEN:
            self._files.popitem(last=False)
        return file

    def close(self) -> None:
        """Close the files; reading opens them again."""
        self._files.clear()

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_files": OrderedDict()}


def is_away(error: Exception) -> bool:
    """Return whether a file that was there cannot be reached, rather than is damaged at one place."""
    return isinstance(error, OSError) and error.errno not in (None, errno.EIO)


def error_text(error: Exception) -> str:
    """Return an error's text, as the end of a sentence."""
    text = (isinstance(error, OSError) and error.strerror) or str(error)
    return f"{text.rstrip('.')}."


def shown(path: str) -> str:
    """Return a path for messages: a URL without its user and password, and without a signature."""
    if "://" not in path:
        return path
    return re.sub(r"\?[^?]*=.*", "", re.sub(r"://[^/?#]*@", "://", path))


def scrubbed(text: str) -> str:
    """Return an error's text, in which URLs have no user, password and signature."""
    return re.sub(r"\?\S*=\S*", "", re.sub(r"://[^/?#\s]*@", "://", text))


def opened(path: str, call: Callable[[], Result]) -> Result:
    """Return what a call finds at a path. Workers that start again have found it before, and wait for it.

    Raises:
        ConfigurationError: the path is wrong.
        InfrastructureError: its disk or file server fails or, for a worker that starts again, the path stays away.
    """
    again = waiting.starts_again()
    try:
        return waiting.insist(
            call, shown(path), lambda error: again and isinstance(error, OSError), error_text
        )
    except (FileNotFoundError, PermissionError, IsADirectoryError, NotADirectoryError) as error:
        raise ConfigurationError(f"{shown(path)} cannot be read: {error_text(error)}") from error
    except OSError as error:
        raise InfrastructureError(f"{shown(path)} cannot be read: {error_text(error)}") from error


class _OpenFile:
    """A file that is open as long as this object is in use, perhaps by another thread."""

    def __init__(self, path: str) -> None:
        self._fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)

    def read(self, start: int, stop: int) -> bytes:
        """Return the bytes from ``start`` up to ``stop``; fewer at the end of the file."""
        return os.pread(self._fd, stop - start, start)

    def __del__(self) -> None:
        if hasattr(self, "_fd"):
            os.close(self._fd)


# ---- TFRecord: serialized records, each with its length and checksums

_LENGTH = struct.Struct("<Q")
_HEAD = _LENGTH.size + 4
"""Bytes of a record's length and of the length's checksum."""
_TAIL = 4
"""Bytes of the record's checksum."""


class TfRecords(FileRecords[bytes]):
    """Bytes of each record; the checksums are not verified. The files must not be compressed.

    Raises:
        ConfigurationError: a file cannot be read, or ends within a record.
    """

    def _index(self, path: str) -> Iterator[int]:
        yield 0
        size, position = os.stat(path).st_size, 0
        with open(path, "rb") as file:
            while position < size:
                file.seek(position)
                head = file.read(_HEAD)
                if len(head) == _HEAD:
                    position += _HEAD + _LENGTH.unpack_from(head)[0] + _TAIL
                if len(head) < _HEAD or position > size:
                    raise ConfigurationError(
                        f"{path} ends within a record: it is no TFRecord file, compressed, or cut off."
                    )
                yield position

    def _record(self, data: bytes, number: int) -> bytes:
        return data[_HEAD:-_TAIL]
