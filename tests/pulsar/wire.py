"""The wire format of protobuf, as far as Pulsar's commands need it."""

from __future__ import annotations

from typing import Any

MASK = (1 << 64) - 1
"""Negative numbers are sent as what they are modulo 2^64."""


def encode(fields: dict[int, Any]) -> bytes:
    """A message of fields by number: integers, bytes, text, messages; lists repeat, None is left out."""
    out = bytearray()
    for number, value in fields.items():
        for one in value if isinstance(value, list) else [value]:
            if one is None:
                continue
            if isinstance(one, int):
                out += varint(number << 3) + varint(one & MASK)
            else:
                data = encode(one) if isinstance(one, dict) else one
                data = data.encode() if isinstance(data, str) else data
                out += varint(number << 3 | 2) + varint(len(data)) + data
    return bytes(out)


def varint(value: int) -> bytes:
    out = bytearray()
    while value > 127:
        out.append(value & 127 | 128)
        value >>= 7
    out.append(value)
    return bytes(out)


def decode(data: bytes) -> dict[int, list[Any]]:
    """The fields of a message: integers, or bytes."""
    found: dict[int, list[Any]] = {}
    at = 0

    def number() -> int:
        nonlocal at
        value = shift = 0
        while True:
            byte = data[at]
            at += 1
            value |= (byte & 127) << shift
            if byte < 128:
                return value
            shift += 7

    while at < len(data):
        key = number()
        if key & 7 == 0:
            value: Any = number()
        elif key & 7 == 2:
            size = number()
            value, at = data[at : at + size], at + size
        else:
            size = 8 if key & 7 == 1 else 4
            value, at = data[at : at + size], at + size
        found.setdefault(key >> 3, []).append(value)
    return found


class Fields:
    """The fields of a command, by number."""

    def __init__(self, data: bytes) -> None:
        self._known = decode(data)

    def number(self, field: int, default: int = 0) -> int:
        value = self._known.get(field, [default])[-1]
        return value - (1 << 64) if value >= 1 << 63 else value

    def text(self, field: int) -> str:
        return self._known.get(field, [b""])[-1].decode()

    def has(self, field: int) -> bool:
        return field in self._known

    def all(self, field: int) -> list[Fields]:
        return [Fields(data) for data in self._known.get(field, [])]
