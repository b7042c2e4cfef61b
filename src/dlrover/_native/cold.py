"""Rows on disk: an index of where they lie, and a reader of many records, by the compiled library or by its twin.

The index holds the time of a key's last use, its flags and the number of its record. It grows and shrinks with its
keys, and is used by one thread at a time. Arguments are contiguous numpy arrays.
"""

from __future__ import annotations

import ctypes
import errno
import functools
import os
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import numpy as np

from dlrover._native import library
from dlrover._native.library import at
from dlrover._native.tables import SLOTS, slots_of

NOWHERE = (1 << 32) - 1
"""Place of a key that is not in the index."""
RECORDS = (1 << 30) - 1
"""Records that an index can name."""


class Headers(NamedTuple):
    """Keys of an index."""

    keys: Any
    last: Any
    """Time of the last use, uint32."""
    flags: Any
    """1: changed, 2: set to zero by penalties; uint16."""
    places: Any
    """Number of the record, uint32."""


class ColdIndex(Protocol):
    """An index; see the module."""

    def put(self, headers: Headers) -> None:
        """Add keys, or replace what is known of them.

        Raises:
            MemoryError: There is no memory; nothing has changed.
        """

    def find(self, keys: Any) -> Any:
        """Return the place of each key, uint32; `NOWHERE` for others."""

    def headers(self, keys: Any) -> Headers:
        """Return what is known of keys, which are all here."""

    def remove(self, keys: Any) -> None:
        """Remove keys."""

    def move(self, keys: Any, places: Any) -> None:
        """Say where the records of keys lie now."""

    def list(self, slot: int, flagged: int = 0) -> Headers:
        """Return the keys of a slot that have any of these flags; 0: all."""

    def unflag(self, slot: int, flags: int) -> None:
        """Remove flags of all keys of a slot."""

    def used(self) -> Any:
        """Return the number of keys of each slot, uint64."""

    def nbytes(self) -> int:
        """Return the bytes of the index, at most `index_bytes`."""


class RecordReader(Protocol):
    """Reads records from files."""

    @property
    def ring(self) -> bool:
        """Whether it uses io_uring."""

    def read(self, files: Any, offsets: Any, out: Any) -> None:
        """Fill each row of ``out``, uint8 ``(n, size)``, from a file, int32, at an offset, uint64.

        Raises:
            OSError: A file cannot be read, or ends before.
        """


class NativeIndex:
    """ColdIndex in the compiled library."""

    def __init__(self, loaded: ctypes.CDLL) -> None:
        """Make an index.

        Raises:
            MemoryError: There is no memory.
        """
        self._library = loaded
        self._index = _functions(loaded)["cold_new"]()
        if self._index is None:
            raise MemoryError("There is no memory for an index.")

    def __del__(self) -> None:
        if getattr(self, "_index", None) is not None:
            self._call("free")

    def _call(self, name: str, *arguments: Any) -> Any:
        return _functions(self._library)[f"cold_{name}"](self._index, *arguments)

    def put(self, headers: Headers) -> None:
        """Add keys, or replace what is known of them."""
        if self._call("put", len(headers.keys), *map(at, headers)):
            raise MemoryError("There is no memory for an index.")

    def find(self, keys: Any) -> Any:
        """Return the place of each key."""
        found = np.empty(len(keys), np.uint32)
        self._call("find", len(keys), at(keys), at(found), 0, None, None)
        return found

    def headers(self, keys: Any) -> Headers:
        """Return what is known of keys."""
        found = _empty(len(keys))._replace(keys=keys)
        self._call(
            "find", len(keys), at(keys), at(found.places), 1, at(found.last), at(found.flags)
        )
        return found

    def remove(self, keys: Any) -> None:
        """Remove keys."""
        self._call("remove", len(keys), at(keys))

    def move(self, keys: Any, places: Any) -> None:
        """Say where the records of keys lie now."""
        self._call("move", len(keys), at(keys), at(places))

    def list(self, slot: int, flagged: int = 0) -> Headers:
        """Return the keys of a slot."""
        room = 0
        while True:
            made = _empty(room)
            number = self._call("list", slot, flagged, room, *map(at, made))
            if number <= room:
                return Headers._make(part[:number] for part in made)
            room = number

    def unflag(self, slot: int, flags: int) -> None:
        """Remove flags of all keys of a slot."""
        self._call("unflag", slot, flags)

    def used(self) -> Any:
        """Return the number of keys of each slot."""
        used = np.empty(SLOTS, np.uint64)
        self._call("used", at(used))
        return used

    def nbytes(self) -> int:
        """Return the bytes of the index."""
        return int(self._call("bytes"))


class NativeReader:
    """RecordReader in the compiled library: io_uring where the kernel allows it, else threads."""

    def __init__(self, loaded: ctypes.CDLL, *, ring: bool = True) -> None:
        self._library = loaded
        self._reader = _functions(loaded)["reader_new"](ring)
        if self._reader is None:
            raise MemoryError("There is no memory for a reader.")

    def __del__(self) -> None:
        if getattr(self, "_reader", None) is not None:
            _functions(self._library)["reader_free"](self._reader)

    @property
    def ring(self) -> bool:
        """Whether it uses io_uring."""
        return bool(_functions(self._library)["reader_has_ring"](self._reader))

    def read(self, files: Any, offsets: Any, out: Any) -> None:
        """Fill each row of ``out``."""
        read = _functions(self._library)["reader_read"]
        status = read(self._reader, len(out), at(files), at(offsets), out.shape[1], at(out))
        if status:
            raise OSError(status, os.strerror(status))


class TwinIndex:
    """ColdIndex with a dict for each slot."""

    def __init__(self) -> None:
        self._slots: list[dict[int, list[int]]] = [{} for _ in range(SLOTS)]

    def _pairs(self, keys: Any) -> Any:
        return zip(keys.tolist(), slots_of(keys).tolist(), strict=True)

    def put(self, headers: Headers) -> None:
        """Add keys, or replace what is known of them."""
        rest = zip(*(part.tolist() for part in headers[1:]), strict=True)
        for (key, slot), header in zip(self._pairs(headers.keys), rest, strict=True):
            self._slots[slot][key] = list(header)

    def find(self, keys: Any) -> Any:
        """Return the place of each key."""
        nothing = [0, 0, NOWHERE]
        places = [self._slots[slot].get(key, nothing)[2] for key, slot in self._pairs(keys)]
        return np.array(places, np.uint32)

    def headers(self, keys: Any) -> Headers:
        """Return what is known of keys."""
        return _made(keys, [self._slots[slot][key] for key, slot in self._pairs(keys)])

    def remove(self, keys: Any) -> None:
        """Remove keys."""
        for key, slot in self._pairs(keys):
            self._slots[slot].pop(key, None)

    def move(self, keys: Any, places: Any) -> None:
        """Say where the records of keys lie now."""
        for (key, slot), place in zip(self._pairs(keys), places.tolist(), strict=True):
            self._slots[slot][key][2] = place

    def list(self, slot: int, flagged: int = 0) -> Headers:
        """Return the keys of a slot."""
        chosen = {
            key: header
            for key, header in self._slots[slot].items()
            if not flagged or header[1] & flagged
        }
        return _made(np.array([*chosen], np.uint64), [*chosen.values()])

    def unflag(self, slot: int, flags: int) -> None:
        """Remove flags of all keys of a slot."""
        for header in self._slots[slot].values():
            header[1] &= ~flags

    def used(self) -> Any:
        """Return the number of keys of each slot."""
        return np.array([len(keys) for keys in self._slots], np.uint64)

    def nbytes(self) -> int:
        """Return nothing: Python's objects are not counted."""
        return 0


class TwinReader:
    """RecordReader with one call for each record."""

    @property
    def ring(self) -> bool:
        """Whether it uses io_uring."""
        return False

    def read(self, files: Any, offsets: Any, out: Any) -> None:
        """Fill each row of ``out``."""
        for file, offset, row in zip(files.tolist(), offsets.tolist(), out, strict=True):
            done = 0
            while done < len(row):
                got = os.preadv(file, [memoryview(row)[done:]], offset + done)
                if not got:
                    raise OSError(errno.EIO, os.strerror(errno.EIO))
                done += got


def index_bytes(keys: int) -> int:
    """Return the most bytes of an index with a number of keys: 16 for each place, and 0.82 or more of the places are used."""
    return int(16 * (keys * 17 / 16 / 0.87 + 4 * SLOTS))


def _empty(count: int) -> Headers:
    types = (np.uint64, np.uint32, np.uint16, np.uint32)
    return Headers._make(np.empty(count, each) for each in types)


def _made(keys: Any, rest: list[list[int]]) -> Headers:
    made = _empty(len(keys))
    made.keys[:] = keys
    for part, values in zip(made[1:], zip(*rest, strict=True), strict=False):
        part[:] = values
    return made


_SIZE, _WORD, _PLACE, _NUMBER = ctypes.c_size_t, ctypes.c_uint32, ctypes.c_void_p, ctypes.c_int
_FORMS: dict[str, tuple[Any, tuple[Any, ...]]] = {
    "cold_new": (_PLACE, ()),
    "cold_free": (None, (_PLACE,)),
    "cold_put": (_NUMBER, (_PLACE, _SIZE, *(_PLACE,) * 4)),
    "cold_find": (None, (_PLACE, _SIZE, _PLACE, _PLACE, _WORD, _PLACE, _PLACE)),
    "cold_remove": (None, (_PLACE, _SIZE, _PLACE)),
    "cold_move": (None, (_PLACE, _SIZE, _PLACE, _PLACE)),
    "cold_list": (_SIZE, (_PLACE, _SIZE, _WORD, _SIZE, *(_PLACE,) * 4)),
    "cold_unflag": (None, (_PLACE, _SIZE, _WORD)),
    "cold_used": (None, (_PLACE, _PLACE)),
    "cold_bytes": (ctypes.c_uint64, (_PLACE,)),
    "reader_new": (_PLACE, (_WORD,)),
    "reader_free": (None, (_PLACE,)),
    "reader_has_ring": (_WORD, (_PLACE,)),
    "reader_read": (_NUMBER, (_PLACE, _SIZE, _PLACE, _PLACE, ctypes.c_uint64, _PLACE)),
}
"""Result and arguments of each function, whose name begins with ``dlrover_``."""


@functools.cache
def _functions(loaded: ctypes.CDLL) -> dict[str, Callable[..., Any]]:
    return library.functions(loaded, "dlrover_", _FORMS)


def cold_index(choice: str) -> ColdIndex:
    """Return an index for a value of ``DLROVER_NATIVE``."""
    loaded = library.use(choice).library
    return NativeIndex(loaded) if loaded is not None else TwinIndex()


def reader(choice: str) -> RecordReader:
    """Return a reader for a value of ``DLROVER_NATIVE``."""
    loaded = library.use(choice).library
    return NativeReader(loaded) if loaded is not None else TwinReader()
