"""The job's key-value store, in which agents share small values and meet at barriers."""

from __future__ import annotations

from dataclasses import dataclass, field

from dlrover.errors import ProtocolError
from dlrover.rpc import messages

MAX_STORE_BYTES = 64 * 1024 * 1024
"""Maximum size of the whole store; a request that exceeds it is refused."""


@dataclass
class KeyValueStore:
    """Keys, counters and barriers. Every request is idempotent."""

    values: dict[str, bytes] = field(default_factory=dict)
    #: ids of the completed additions, by key
    additions: dict[str, set[str]] = field(default_factory=dict)
    #: members that have entered, by barrier
    barriers: dict[str, set[str]] = field(default_factory=dict)
    #: bytes of all keys, values, ids of additions and members; at most `MAX_STORE_BYTES`
    size: int = 0

    def apply(self, request: messages.StoreRequest) -> None:
        """Carry out the changes of a request; `reply` does the reading.

        Raises:
            ProtocolError: The store is full, or a counter's key holds something else.
        """
        match request:
            case messages.SetKey(key, value):
                self._set(key, value)
            case messages.AddToKey():
                self._add(request)
            case messages.DeleteKeys(prefix):
                self._delete(prefix)
            case messages.EnterBarrier(name=name, member=member):
                self._enter(name, member)

    def reply(self, request: messages.StoreRequest) -> bytes | None:
        """Return the answer to an applied request; None while it must wait."""
        match request:
            case messages.GetKey(key=key) | messages.AddToKey(key=key) | messages.SetKey(key=key):
                return self.values.get(key)
            case messages.EnterBarrier(name=name, size=size):
                entered = len(self.barriers.get(name, ()))
                return b"%d" % entered if entered >= size else None
        return b""

    def _set(self, key: str, value: bytes, request_id: str = "") -> None:
        before = _bytes(key, self.values[key]) if key in self.values else 0
        self._take(_bytes(key, value, request_id) - before, key)
        self.values[key] = value

    def _add(self, request: messages.AddToKey) -> None:
        key = request.key
        if request.request_id in self.additions.get(key, ()):
            return
        try:
            value = b"%d" % (int(self.values.get(key, b"0")) + request.amount)
        except ValueError as error:  # also beyond the 4300 digits that the interpreter converts
            raise ProtocolError(f"Key {key} holds no number; it cannot be added to.") from error
        self._set(key, value, request.request_id)
        self.additions.setdefault(key, set()).add(request.request_id)

    def _delete(self, prefix: str) -> None:
        for key in [k for k in self.values if k.startswith(prefix)]:
            self.size -= _bytes(key, self.values.pop(key), *self.additions.pop(key, ()))

    def _enter(self, name: str, member: str) -> None:
        if member not in self.barriers.get(name, ()):
            self._take(_bytes(name, member), name)
            self.barriers.setdefault(name, set()).add(member)

    def _take(self, size: int, name: str) -> None:
        """Account for ``size`` more bytes."""
        if self.size + size > MAX_STORE_BYTES:
            raise ProtocolError(
                f"Key {name} does not fit, {size} bytes more: the store holds at most "
                f"{MAX_STORE_BYTES} bytes."
            )
        self.size += size

    def validate(self) -> None:
        """Check the invariants; raise AssertionError on the first broken one."""
        pairs = sum(_bytes(key, value) for key, value in self.values.items())
        ids = sum(_bytes(*made) for made in self.additions.values())
        members = sum(_bytes(name, m) for name, entered in self.barriers.items() for m in entered)
        assert self.size == pairs + ids + members
        assert self.size <= MAX_STORE_BYTES
        assert self.additions.keys() <= self.values.keys()


def _bytes(*parts: str | bytes) -> int:
    return sum(len(part.encode() if isinstance(part, str) else part) for part in parts)
