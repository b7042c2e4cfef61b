"""A table in one file: what it is made of, then parts of its rows, each with a checksum, so that none is large."""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import msgspec
import numpy as np
import xxhash

from dlrover.embedding import options as table_options
from dlrover.embedding.options import TableOptions
from dlrover.embedding.remote import arrays
from dlrover.embedding.remote.arrays import Arrays
from dlrover.errors import InfrastructureError

_MAGIC = b"dlrover embedding table 2\n"
_DIGEST = xxhash.xxh3_64().digest_size


class TableFile(NamedTuple):
    """A file that is read."""

    options: TableOptions
    step: int
    parts: Iterator[Arrays]
    """Rows as `HashTable.export_rows` returned them; each call of ``next`` reads some.

    Raises:
        InfrastructureError: The file is damaged.
    """


def write(
    path: str | os.PathLike[str], made: TableOptions, step: int, parts: Iterable[Arrays]
) -> None:
    """Write a table to a file, which gets its name when it is complete.

    Raises:
        InfrastructureError: The file cannot be written.
    """
    target = Path(path)
    temporary = target.with_name(f".{target.name}.{secrets.token_hex(4)}")
    try:
        with temporary.open("wb", buffering=0) as file:
            _write(file, [_MAGIC])
            _write_block(file, [msgspec.json.encode({"options": made, "step": step})])
            for part in parts:
                _write_block(file, arrays.packed(part))
            _write_block(file, [])
            os.fsync(file.fileno())
        temporary.replace(target)
    except OSError as error:
        raise InfrastructureError(f"{target} cannot be written: {error.strerror}.") from error
    finally:
        temporary.unlink(missing_ok=True)


def read(path: str | os.PathLike[str]) -> TableFile:
    """Return what is in a file of `write`.

    Raises:
        InfrastructureError: The file cannot be read, or is damaged.
    """
    blocks = _blocks(path)
    head = msgspec.json.decode(next(blocks).tobytes())
    made = table_options.decoded(msgspec.json.encode(head["options"]).decode())
    return TableFile(made, head["step"], map(arrays.unpacked, blocks))


def _write_block(file: BinaryIO, pieces: Iterable[Any]) -> None:
    views = [memoryview(piece).cast("B") for piece in pieces if len(piece)]
    digest = xxhash.xxh3_64()
    for view in views:
        digest.update(view)
    size = sum(len(view) for view in views)
    _write(file, [size.to_bytes(8, "little"), *views, digest.digest()])


def _write(file: BinaryIO, pieces: Iterable[Any]) -> None:
    for piece in pieces:
        data = memoryview(piece)
        while data:
            data = data[file.write(data) :]


def _blocks(path: str | os.PathLike[str]) -> Iterator[Any]:
    """Return the blocks of a file but the last one, which is empty."""
    try:
        with Path(path).open("rb") as file:
            left = os.fstat(file.fileno()).st_size - len(_MAGIC)
            whole = file.read(len(_MAGIC)) == _MAGIC
            while whole:
                size = int.from_bytes(file.read(8), "little")
                left -= 8 + size + _DIGEST
                block = np.empty(size if left >= 0 else 0, np.uint8)
                file.readinto(memoryview(block))
                whole = left >= 0 and file.read(_DIGEST) == xxhash.xxh3_64(block).digest()
                if whole and not size:  # the last block, after which the file ends
                    if not left:
                        return
                    break
                if whole:
                    yield block
    except OSError as error:
        raise InfrastructureError(f"{path} cannot be read: {error.strerror}.") from error
    raise InfrastructureError(f"{path} is damaged, or no embedding table.")
