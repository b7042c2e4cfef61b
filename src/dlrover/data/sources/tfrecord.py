"""TFRecord files: serialized records, each with its length and checksums."""

from __future__ import annotations

import os
import struct
from collections.abc import Iterator

from dlrover.data.sources.files import FileRecords
from dlrover.errors import ConfigurationError

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
