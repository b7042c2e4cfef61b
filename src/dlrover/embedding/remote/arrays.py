"""Named arrays as bytes: what servers send each other, and what parts of checkpoints hold."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TypeAlias

import msgspec
import numpy as np
from numpy.typing import NDArray

from dlrover._util import decoding
from dlrover.errors import ProtocolError

Arrays: TypeAlias = Mapping[str, NDArray[np.generic]]


class _Array(msgspec.Struct, frozen=True, array_like=True):
    name: str
    dtype: str
    shape: tuple[int, ...]


_index = decoding.msgpack_decoder(tuple[_Array, ...])


def packed(arrays: Arrays) -> list[NDArray[np.generic] | bytes]:
    """Return the parts whose concatenation `unpacked` reads; they share the memory of the arrays."""
    index = msgspec.msgpack.encode(
        [_Array(name, array.dtype.str, array.shape) for name, array in arrays.items()]
    )
    return [
        len(index).to_bytes(8, "little"),
        index,
        *(np.ascontiguousarray(array).reshape(-1).view(np.uint8) for array in arrays.values()),
    ]


def unpacked(body: NDArray[np.uint8]) -> dict[str, NDArray[np.generic]]:
    """Return the arrays, which share the memory of ``body``.

    Raises:
        ProtocolError: The bytes are not what `packed` makes.
    """
    data = memoryview(body)
    try:
        start = 8 + int.from_bytes(data[:8], "little")
        entries: Sequence[_Array] = _index.decode(data[8:start])
        found = {}
        for entry in entries:
            dtype = np.dtype(entry.dtype)
            size = dtype.itemsize * int(np.prod(entry.shape, dtype=np.int64))
            found[entry.name] = body[start : start + size].view(dtype).reshape(entry.shape)
            start += size
    except (ValueError, TypeError, msgspec.DecodeError) as error:
        raise ProtocolError(f"Arrays of an embedding table cannot be read: {error}.") from error
    if start != len(data):
        raise ProtocolError(f"Arrays of an embedding table have {len(data)} bytes, not {start}.")
    return found
