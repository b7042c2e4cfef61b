"""The index of a part of weights: which tensors it has, and where they are in its memory."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
import numpy as np

from dlrover._util import decoding
from dlrover.checkpoint.machine.extent import Extent
from dlrover.checkpoint.saver.memory import kernels
from dlrover.errors import ConfigurationError, InfrastructureError
from dlrover.roles.runtime import payload, wire
from dlrover.roles.runtime.memory import PartReader

THREADS = 4
"""Maximum number of threads that copy or check."""


class WeightEntry(msgspec.Struct, frozen=True, array_like=True):
    """One tensor, or a rank's part of it, in the memory of a part."""

    name: str
    dtype: str
    whole: tuple[int, ...]
    at: tuple[int, ...]
    shape: tuple[int, ...]
    offset: int
    nbytes: int
    sum: int = 0

    @property
    def extent(self) -> Extent:
        """Its place in the whole tensor."""
        return Extent(self.whole, self.at, self.shape)


class PartIndex(msgspec.Struct, frozen=True, array_like=True):
    """What a part holds."""

    entries: tuple[WeightEntry, ...]
    values: bytes
    """What else is in the state, as `payload` encodes it."""


def encoded(entries: Sequence[WeightEntry], values: Mapping[str, Any]) -> bytes:
    """Return the index of these entries and values as bytes."""
    packed = wire.packed(*payload.encode(dict(values)))
    return msgspec.msgpack.encode(PartIndex(tuple(entries), packed))


def read_index(part: PartReader) -> PartIndex:
    """Return the index of a part.

    Raises:
        InfrastructureError: It is damaged.
    """
    held = part.held
    data = bytes(part.view(held.data_bytes, held.index_bytes))
    if checksum(data) != held.index_sum:
        raise InfrastructureError("The index of a part of weights is damaged in memory.")
    return decoding.msgpack(data, PartIndex)


def checksum(data: bytes) -> int:
    """Return the checksum of bytes, as the kernels compute it."""
    array = np.frombuffer(data, np.uint8)
    sums = kernels().hash(
        np.array([array.ctypes.data], np.uint64), np.array([len(data)], np.uint64)
    )
    return int(sums[0])


def piece_of(key: str, value: Any) -> tuple[Any, str, Extent | None] | None:
    """Return an array, its type and its place in the whole tensor if it is a part; None for a plain value."""
    if isinstance(value, np.ndarray):
        if value.dtype.kind not in "biufc":
            raise ConfigurationError(
                f"{key} of the weights is an array of {value.dtype}: numbers can be published."
            )
        return value, value.dtype.str, None
    if "torch" not in sys.modules:
        return None
    import torch  # noqa: PLC0415 - the program has it

    from dlrover.checkpoint.engine import tree  # noqa: PLC0415 - it needs PyTorch

    if isinstance(value, tree.Spread):
        local = tree.local_part(value, (key,))
        return local, str(local.dtype), tree.extent(value, (key,))
    if isinstance(value, torch.Tensor):
        return value, str(value.dtype), None
    return None


def flat(array: Any) -> Any:
    """Return the memory of an array or a tensor."""
    if isinstance(array, np.ndarray):
        return np.ascontiguousarray(array).reshape(-1).view(np.uint8)
    return np.frombuffer(payload.tensor_bytes(array), np.uint8)


def address_of(array: Any) -> int:
    """Return where the memory of an array or tensor begins; 0 if it is not plain memory of this machine."""
    if isinstance(array, np.ndarray):
        plain = array.flags.c_contiguous and array.flags.writeable
        return int(array.ctypes.data) if plain and array.nbytes else 0
    plain = array.is_cpu and array.is_contiguous() and not array.is_conj() and not array.is_neg()
    return int(array.data_ptr()) if plain else 0


def array_of(entry: WeightEntry, memory: payload.Bytes) -> Any:
    """Return an entry's memory as an array, or as a tensor where a tensor was published."""
    if entry.dtype.startswith("torch."):
        return payload.tensor_of(memory, entry.dtype, entry.shape)
    return memory.view(np.dtype(entry.dtype)).reshape(entry.shape)


def empty(dtype: str, shape: Sequence[int]) -> Any:
    """Return an array or a tensor of a published type."""
    if not dtype.startswith("torch."):
        return np.empty(shape, np.dtype(dtype))
    import torch  # noqa: PLC0415 - the publisher has it

    return torch.empty(tuple(shape), dtype=getattr(torch, dtype.removeprefix("torch.")))
