"""Arguments and results as MessagePack, with the memory of arrays and tensors beside it, not copied.

None, booleans, numbers, texts, bytes, lists, dicts, NumPy arrays and PyTorch tensors arrive as they are; NumPy scalars
arrive as numbers, tuples and sets as lists, dataclasses and msgspec structs as dicts. There is no pickle: nothing else can
be sent.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import msgspec
import numpy as np
from numpy.typing import NDArray

from dlrover._util import decoding
from dlrover.errors import ConfigurationError, ProtocolError

Bytes: TypeAlias = NDArray[np.uint8]
ALIGNMENT = 64
"""Alignment of each array, in bytes."""
_ARRAY = 1
"""Code of the MessagePack extension that describes an array."""
ACCEPTED = "None, numbers, texts, bytes, lists, dicts, NumPy arrays and PyTorch tensors"


MAX_DEPTH = 20
"""Levels of an argument in which an error looks for the part that cannot be sent."""


class _Described(msgspec.Struct, frozen=True, array_like=True):
    offset: int
    nbytes: int
    dtype: str
    """That of NumPy; ``torch.`` and its name for a tensor."""
    shape: tuple[int, ...]


_described = decoding.msgpack_decoder(_Described)


class _Unsendable(TypeError):  # noqa: N818 - never seen by users
    pass


class _Collector:
    """Takes the arrays of one message while it is encoded."""

    def __init__(self) -> None:
        self.buffers: list[memoryview] = []
        self._offset = 0

    def take(self, value: Any) -> Any:
        """Encode what MessagePack does not know."""
        if isinstance(value, np.ndarray) and value.dtype.kind in "biufcSUmM":
            flat = np.ascontiguousarray(value).reshape(-1).view(np.uint8)
            return self._add(memoryview(flat), value.dtype.str, value.shape)
        if isinstance(value, np.generic):
            return value.item()
        torch = sys.modules.get("torch")
        if torch is not None and isinstance(value, torch.Tensor):
            view = tensor_bytes(value)
            return self._add(view, str(value.dtype), tuple(value.shape))
        raise _Unsendable(type(value).__qualname__)

    def _add(self, view: memoryview, dtype: str, shape: tuple[int, ...]) -> msgspec.msgpack.Ext:
        described = _Described(self._offset, view.nbytes, dtype, shape)
        self._offset += -(-view.nbytes // ALIGNMENT) * ALIGNMENT
        self.buffers.append(view)
        return msgspec.msgpack.Ext(_ARRAY, msgspec.msgpack.encode(described))


def tensor_bytes(tensor: Any) -> memoryview:
    """Return the memory of a tensor; that of a copy if it is not contiguous or not in host memory.

    Raises:
        TypeError: It has no plain memory.
    """
    import torch  # noqa: PLC0415 - the caller has a tensor

    if tensor.layout is not torch.strided or tensor.is_quantized:
        raise _Unsendable(f"{type(tensor).__qualname__} that is sparse or quantized")
    plain = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous().reshape(-1)
    return memoryview(plain.view(torch.uint8).numpy())


def encode(value: Any) -> tuple[bytes, list[memoryview]]:
    """Return a head and the buffers beside it.

    Raises:
        TypeError: Something cannot be sent; see `encode_call` and `encode_named`.
    """
    collector = _Collector()
    head = msgspec.msgpack.encode(value, enc_hook=collector.take)
    return head, collector.buffers


def encode_call(
    method: str, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> tuple[bytes, list[memoryview]]:
    """Return a call as a head and the buffers beside it.

    Raises:
        ConfigurationError: An argument cannot be sent; the error names it.
    """
    try:
        return encode((method, args, kwargs))
    except (TypeError, ValueError, OverflowError, RecursionError):
        named = {f"argument {place}": value for place, value in enumerate(args, 1)}
        named |= {f"argument {name}": value for name, value in kwargs.items()}
        for name, value in named.items():
            _check(f"{name} of {method}", value)
        raise


def encode_named(name: str, value: Any) -> tuple[bytes, list[memoryview]]:
    """Return a value as a head and the buffers beside it; ``name`` is what errors call it.

    Raises:
        ConfigurationError: It cannot be sent.
    """
    try:
        return encode(value)
    except (TypeError, ValueError, OverflowError, RecursionError):
        _check(name, value)
        raise


def _check(where: str, value: Any) -> None:
    try:
        encode(value)
    except (TypeError, ValueError, OverflowError, RecursionError) as error:
        inner, path = _culprit(value)
        kind = str(error) if isinstance(error, _Unsendable) else type(inner).__qualname__
        at = f" (at {path})" if path else ""
        raise ConfigurationError(
            f"{where[0].upper()}{where[1:]}{at} is of type {kind}, which cannot be sent to another process:"
            f" {ACCEPTED} can."
        ) from None


def _culprit(value: Any, path: str = "", depth: int = 0) -> tuple[Any, str]:
    """Return the innermost part of a value that cannot be encoded, and where it is."""
    parts: list[tuple[str, Any]] = []
    if isinstance(value, Mapping):
        parts = [(f"[{key!r}]", item) for key, item in value.items()]
    elif isinstance(value, list | tuple | set | frozenset):
        parts = [(f"[{place}]", item) for place, item in enumerate(value)]
    for name, item in parts if depth < MAX_DEPTH else []:
        if not _can_be_sent(item):
            return _culprit(item, path + name, depth + 1)
    return value, path


def _can_be_sent(value: Any) -> bool:
    try:
        encode(value)
    except (TypeError, ValueError, OverflowError, RecursionError):
        return False
    return True


def decode(head: bytes, body: Bytes | None) -> Any:
    """Return the value of a head; its arrays share the memory of ``body``.

    Raises:
        ProtocolError: The bytes are no such value.
    """
    try:
        return msgspec.msgpack.decode(head, ext_hook=_extension(body))
    except (msgspec.DecodeError, ValueError, TypeError, AttributeError) as error:
        raise ProtocolError(f"A call cannot be read: {error}.") from error


def _extension(body: Bytes | None) -> Callable[[int, memoryview], Any]:
    def hook(code: int, data: memoryview) -> Any:
        if code != _ARRAY:
            raise ValueError(f"extension {code} is unknown")
        array = _described.decode(data)
        whole = body if body is not None else np.empty(0, np.uint8)
        if array.offset % ALIGNMENT or not 0 <= array.offset + array.nbytes <= whole.nbytes:
            raise ValueError("an array lies outside of its frame")
        part = whole[array.offset : array.offset + array.nbytes]
        if array.dtype.startswith("torch."):
            return tensor_of(part, array.dtype, array.shape)
        return part.view(np.dtype(array.dtype)).reshape(array.shape)

    return hook


def tensor_of(part: Bytes, dtype: str, shape: Sequence[int]) -> Any:
    """Return a tensor that shares the memory of ``part``."""
    import torch  # noqa: PLC0415 - the sender has a tensor

    kind = getattr(torch, dtype.removeprefix("torch."), None)
    if not isinstance(kind, torch.dtype):
        raise TypeError(f"{dtype} is no type of tensors")
    if not part.nbytes:
        return torch.empty(tuple(shape), dtype=kind)
    return torch.from_numpy(part).view(kind).reshape(tuple(shape))
