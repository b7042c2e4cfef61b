"""Encoding of messages as MessagePack."""

from __future__ import annotations

from typing import Any

import msgspec

_encoder = msgspec.msgpack.Encoder()


def encode(message: Any) -> bytes:
    """Encode a message; a question mark replaces what no text on a wire can hold.

    A name of a file may be no UTF-8, and an exception may quote it.
    """
    try:
        return _encoder.encode(message)
    except UnicodeEncodeError:
        return _encoder.encode(_replaced(msgspec.to_builtins(message, builtin_types=(bytes,))))


def _replaced(value: Any) -> Any:
    """Return plain values with texts that are UTF-8."""
    if isinstance(value, str):
        return value.encode(errors="replace").decode()
    if isinstance(value, dict):
        return {_replaced(key): _replaced(item) for key, item in value.items()}
    return [_replaced(item) for item in value] if isinstance(value, list | tuple) else value
