"""Messages of any type with any content that the type accepts: the smallest, the largest, and what is plausible."""

from __future__ import annotations

import random
from typing import Any

import msgspec
from msgspec import inspect

INTEGERS = (0, 0, 0, 1, 1, 1, 2, 3, 4, 7, -1, -2, 2**31, 2**53 + 1, 2**63, -(2**63), 2**64 - 1)
FLOATS = (0.0, 1.0, 2.5, -1.0, 1e-308, 1e308, -1.7e308, 1.7e9)
TEXTS = (
    "",
    "a",
    "a",
    "b",
    "data",
    "agent 0",
    "agent 1",
    "ValueError",
    "\0",
    "\x1b[2J",
    "é" * 300,
    "x" * 20_000,
)
MOST = 4
"""Maximum number of items in a container."""


class Hostile:
    """Maker of values; equal seeds make equal ones. ``names`` limits the values of fields, by name."""

    def __init__(self, seed: int, names: dict[str, tuple[Any, ...]] | None = None) -> None:
        self.random = random.Random(seed)
        self.names = names or {}

    def value(self, kind: Any) -> Any:
        """Return a value of a type, which may be a union of messages."""
        return self._value(inspect.type_info(kind), 0)

    def _value(self, kind: Any, depth: int) -> Any:  # noqa: C901, PLR0911, PLR0912 - one for each kind of type
        pick = self.random.choice
        match kind:
            case inspect.Metadata(type=inner):
                return self._value(inner, depth)
            case inspect.UnionType(types=types):
                return self._value(pick(types), depth)
            case inspect.StructType(cls=cls, fields=fields):
                return cls(**{f.name: self._field(f, depth) for f in fields if self._is_given(f)})
            case inspect.NamedTupleType(cls=cls, fields=fields):
                return cls(*(self._field(f, depth) for f in fields))
            case inspect.IntType(ge=ge, gt=gt, le=le, lt=lt):
                least, most = _first(ge, gt, -(2**63)), _first(le, lt, 2**64 - 1)
                return min(max(pick(INTEGERS), least), most - (lt is not None))
            case inspect.FloatType(ge=ge, gt=gt, le=le, lt=lt):
                return min(max(pick(FLOATS), _first(ge, gt, -1.7e308)), _first(le, lt, 1.7e308))
            case inspect.StrType(max_length=most, min_length=least):
                return pick(TEXTS)[:most] or "a" * (least or 0)
            case inspect.BytesType():
                return pick((b"", b"1", b"\x81\x00\x92\x00\x05", bytes(100), b"\xc1"))
            case inspect.BoolType():
                return pick((False, True))
            case inspect.NoneType():
                return None
            case inspect.EnumType(cls=cls):
                return pick(list(cls))
            case inspect.LiteralType(values=values):
                return pick(values)
            case inspect.TupleType(item_types=types):
                return tuple(self._value(one, depth + 1) for one in types)
            case inspect.VarTupleType(item_type=item):
                return tuple(self._value(item, depth + 1) for _ in range(self._length(kind, depth)))
            case inspect.DictType(key_type=key, value_type=item):
                count = self._length(kind, depth)
                return {
                    self._value(key, depth + 1): self._value(item, depth + 1) for _ in range(count)
                }
        raise AssertionError(f"no values of {kind}")

    def _field(self, field: Any, depth: int) -> Any:
        chosen = self.names.get(field.name)
        if chosen is not None:
            return self.random.choice(chosen)
        return self._value(field.type, depth + 1)

    def _is_given(self, field: Any) -> bool:
        return field.required or self.random.random() < 0.6

    def _length(self, kind: Any, depth: int) -> int:
        least, most = kind.min_length or 0, min(kind.max_length or MOST, MOST)
        return max(least, self.random.randint(0, most) if depth < 6 else 0)


def _first(one: float | None, other: float | None, default: float) -> Any:
    return next((bound for bound in (one, other) if bound is not None), default)


def accepted(kind: Any, message: msgspec.Struct) -> bool:
    """Return whether a peer's decoder accepts the message."""
    try:
        msgspec.msgpack.decode(msgspec.msgpack.encode(message), type=kind)
    except msgspec.ValidationError:
        return False
    return True
