"""The functions of the compiled library in Python: the same arguments, the same results, slower."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from typing import Any

import numpy as np
import xxhash

_view = ctypes.pythonapi.PyMemoryView_FromMemory
_view.restype = ctypes.py_object
_view.argtypes = (ctypes.c_void_p, ctypes.c_ssize_t, ctypes.c_int)
_READ = 0x100  # PyBUF_READ


def _views(addresses: Any, sizes: Any) -> Iterator[memoryview | bytes]:
    """Yield the memory of each piece; that of an empty one may have no address."""
    for address, size in zip(addresses.tolist(), sizes.tolist(), strict=True):
        yield _view(address, size, _READ) if size else b""


def copy(_count: int, source: Any, destination: Any, sizes: Any, _threads: int) -> None:
    """Copy each piece."""
    for start, end, size in zip(source.tolist(), destination.tolist(), sizes.tolist(), strict=True):
        if size:
            ctypes.memmove(end, start, size)


def hash_pieces(_count: int, source: Any, sizes: Any, hashes: Any, _threads: int) -> None:
    """Write the XXH3 hash of each piece to ``hashes``."""
    for index, view in enumerate(_views(source, sizes)):
        hashes[index] = xxhash.xxh3_64_intdigest(view)


def copy_hash(
    count: int, source: Any, destination: Any, sizes: Any, hashes: Any, threads: int
) -> None:
    """Copy each piece and write the hash of its bytes to ``hashes``."""
    copy(count, source, destination, sizes, threads)
    hash_pieces(count, destination, sizes, hashes, threads)


def equal(
    _count: int, source: Any, destination: Any, sizes: Any, result: Any, _threads: int
) -> None:
    """Write to ``result`` for each piece whether source and destination have the same bytes."""
    pairs = zip(_views(source, sizes), _views(destination, sizes), strict=True)
    for index, (one, other) in enumerate(pairs):
        result[index] = np.array_equal(np.frombuffer(one, np.uint8), np.frombuffer(other, np.uint8))
