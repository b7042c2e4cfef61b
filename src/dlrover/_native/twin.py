"""The functions of the compiled library in Python: the same arguments, the same results, slower."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import xxhash

from dlrover._native.library import memory

CHUNK = 4 << 20
"""Bytes copied and hashed at a time: they must fit in a cache that the cores share."""


def _views(addresses: Any, sizes: Any) -> Iterator[memoryview | bytes]:
    """Yield the memory of each piece; that of an empty one may have no address."""
    for address, size in zip(addresses.tolist(), sizes.tolist(), strict=True):
        yield memory(address, size) if size else b""


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
    """Copy each piece and write the hash of its bytes to ``hashes``.

    Large pieces are hashed in parts that are still in the processor's cache, by several threads.
    """
    is_large = sizes > CHUNK
    small, large = np.flatnonzero(~is_large), np.flatnonzero(is_large).tolist()
    found = np.empty(len(small), np.uint64)
    copy(count, source[small], destination[small], sizes[small], 1)
    hash_pieces(count, destination[small], sizes[small], found, 1)
    hashes[small] = found
    if large:
        with ThreadPoolExecutor(threads) as pool:
            done = pool.map(
                _copy_hash,
                source[large].tolist(),
                destination[large].tolist(),
                sizes[large].tolist(),
            )
            hashes[large] = list(done)


def _copy_hash(source: int, destination: int, size: int) -> int:
    if abs(source - destination) < size:  # parts would overwrite what is not copied yet
        ctypes.memmove(destination, source, size)
        return xxhash.xxh3_64_intdigest(memory(destination, size))
    digest = xxhash.xxh3_64()
    for start in range(0, size, CHUNK):
        part = min(CHUNK, size - start)
        ctypes.memmove(destination + start, source + start, part)
        digest.update(memory(destination + start, part))
    return digest.intdigest()
