"""Functions on lists of pieces of memory, by the compiled library or by its twin.

A list is two or three numpy arrays of uint64: source addresses, destination addresses, sizes in bytes. The caller
answers for the addresses and keeps their memory alive. An empty piece may have the address 0. A source and a
destination that overlap within one piece are copied as by ``memmove``; pieces have no order, so the destination of
one must not overlap another piece.

The library runs without the global interpreter lock. ``threads`` is a maximum: little work takes fewer.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from dlrover._native import library, twin


@dataclass(frozen=True, slots=True)
class _Functions:
    """One implementation. All begin with the number of pieces and end with that of threads."""

    copy: Callable[..., None]
    hash: Callable[..., None]
    copy_hash: Callable[..., None]


_TWIN = _Functions(twin.copy, twin.hash_pieces, twin.copy_hash)


def _compiled(loaded: ctypes.CDLL) -> _Functions:
    forms = {
        name: (None, (ctypes.c_size_t, *(ctypes.c_void_p,) * arrays, ctypes.c_size_t))
        for name, arrays in {"copy": 3, "hash": 3, "copy_hash": 4}.items()
    }
    made = library.functions(loaded, "dlrover_", forms)
    return _Functions(**{name: taking_arrays(function) for name, function in made.items()})


def taking_arrays(function: Callable[..., None]) -> Callable[..., None]:
    """Let a compiled function take arrays for their addresses.

    numpy's type for arguments would do that, too, but ctypes makes an `ArgumentError` of a Ctrl-C that comes meanwhile.
    """

    def call(*given: Any) -> None:
        function(*(each.ctypes.data if isinstance(each, np.ndarray) else each for each in given))

    return call


class Kernels:
    """Copies and hashes pieces of memory."""

    def __init__(self, loaded: library.Loaded) -> None:
        self.native = loaded.library is not None
        self.reason = loaded.reason
        self._functions = _compiled(loaded.library) if loaded.library is not None else _TWIN

    def copy(self, source: Any, destination: Any, sizes: Any, threads: int = 1) -> None:
        """Copy each piece.

        Raises:
            ValueError: here and below, an argument is no list of pieces as the module describes it.
        """
        count = checked(sizes, threads, source=source, destination=destination)
        self._functions.copy(count, source, destination, sizes, threads)

    def hash(self, source: Any, sizes: Any, threads: int = 1) -> Any:
        """Return the XXH3 hash (64 bits, seed 0) of each piece, as an array of uint64."""
        count = checked(sizes, threads, source=source)
        hashes = np.empty(count, np.uint64)
        self._functions.hash(count, source, sizes, hashes, threads)
        return hashes

    def copy_hash(self, source: Any, destination: Any, sizes: Any, threads: int = 1) -> Any:
        """Copy each piece and return the hash of the bytes that were written, in one pass over them."""
        count = checked(sizes, threads, source=source, destination=destination)
        hashes = np.empty(count, np.uint64)
        self._functions.copy_hash(count, source, destination, sizes, hashes, threads)
        return hashes


def checked(sizes: Any, threads: int, **addresses: Any) -> int:
    """Return the number of pieces.

    Raises:
        ValueError: an array has the wrong type, form or length, or a piece with bytes has the address 0.
    """
    for name, array in {"sizes": sizes, **addresses}.items():
        if not isinstance(array, np.ndarray) or array.dtype != np.uint64:
            kind = (
                f"one of {array.dtype}" if isinstance(array, np.ndarray) else type(array).__name__
            )
            raise ValueError(f"{name} must be a numpy array of uint64; it is {kind}.")
        if array.ndim != 1 or not array.flags.c_contiguous or not array.flags.aligned:
            raise ValueError(f"{name} must be a contiguous array of one dimension.")
        if len(array) != len(sizes):
            raise ValueError(f"{name} has {len(array)} entries and sizes has {len(sizes)}.")
        if np.count_nonzero(array) != len(array) and sizes[array == 0].any():
            piece = int(np.flatnonzero((array == 0) & (sizes != 0))[0])
            raise ValueError(f"{name} has the address 0 for piece {piece}, which is not empty.")
    if threads < 1:
        raise ValueError(f"threads is {threads}; it must be 1 or more.")
    return len(sizes)


@functools.cache
def kernels(choice: str) -> Kernels:
    """Return the functions for a value of ``DLROVER_NATIVE``.

    Raises:
        ImportError: see `library.use`.
    """
    return Kernels(library.use(choice))


def overlap(pointers: Any, sizes: Any) -> bool:
    """Return whether two pieces of memory share bytes; addresses and sizes in bytes, uint64."""
    order = np.argsort(pointers)
    starts, ends = pointers[order], (pointers + sizes)[order]
    return bool((ends[:-1] > starts[1:]).any())
