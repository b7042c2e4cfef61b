"""Reading of typed values, from any thread.

msgspec 0.22 works out what a type looks like at its first use. A thread that meanwhile uses the same type, or a part of
it, crashes the process. Decoders are therefore made here alone, one after the other, and kept.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from typing import Any, TypeVar

import msgspec

from dlrover._util import forks

T = TypeVar("T")
_making = threading.RLock()
forks.wait_for(_making)


_json: dict[Any, msgspec.json.Decoder[Any]] = {}
_msgpack: dict[Any, msgspec.msgpack.Decoder[Any]] = {}


def json_decoder(kind: Any) -> msgspec.json.Decoder[Any]:
    """Return the decoder of JSON texts of a type."""
    if kind not in _json:
        with _making:
            _json[kind] = msgspec.json.Decoder(kind)
    return _json[kind]


def msgpack_decoder(kind: Any) -> msgspec.msgpack.Decoder[Any]:
    """Return the decoder of MessagePack bytes of a type."""
    if kind not in _msgpack:
        with _making:
            _msgpack[kind] = msgspec.msgpack.Decoder(kind)
    return _msgpack[kind]


def json(data: bytes | bytearray | memoryview | str, kind: type[T]) -> T:
    """Return the value that a JSON text holds.

    Raises:
        msgspec.MsgspecError: the text is no JSON, or of another type.
    """
    try:
        value: T = json_decoder(kind).decode(data)
    except UnicodeDecodeError as error:
        raise msgspec.DecodeError(str(error)) from error
    return value


def msgpack(data: bytes | bytearray | memoryview, kind: type[T]) -> T:
    """Return the value that MessagePack bytes hold.

    Raises:
        msgspec.MsgspecError: the bytes are no MessagePack, or of another type.
    """
    try:
        value: T = msgpack_decoder(kind).decode(data)
    except UnicodeDecodeError as error:
        raise msgspec.DecodeError(str(error)) from error
    return value


def toml(data: bytes) -> dict[str, Any]:
    """Return the table that a TOML file holds.

    Raises:
        msgspec.DecodeError: the bytes are no TOML, which is UTF-8.
    """
    try:
        value: dict[str, Any] = msgspec.toml.decode(data)
    except UnicodeDecodeError as error:
        raise msgspec.DecodeError(str(error)) from error
    return value


def convert(values: Any, kind: type[T], *, strict: bool = True) -> T:
    """Return plain values, such as those of a JSON text, as a value of a type.

    Raises:
        msgspec.ValidationError: they are of another type.
    """
    json_decoder(kind)  # makes all that is to know of the type
    plain = dict(values) if isinstance(values, Mapping) else values
    return msgspec.convert(plain, kind, strict=strict)
