"""The job's key-value store: agents agree on small things here, and meet at barriers."""

from __future__ import annotations

from dataclasses import dataclass, field

from dlrover.errors import ProtocolError
from dlrover.rpc import messages

MAX_STORE_BYTES = 64 * 1024 * 1024
"""Keys and values together; a set beyond it is refused."""


@dataclass
class KeyValueStore:
    """Keys, counters and barriers. Every request may be repeated without a further effect."""

    values: dict[str, bytes] = field(default_factory=dict)
    #: ids of the additions that have been made, by key
    additions: dict[str, set[str]] = field(default_factory=dict)
    #: who has entered each barrier
    barriers: dict[str, set[str]] = field(default_factory=dict)
    #: bytes of all keys and values; at most `MAX_STORE_BYTES`
    size: int = 0

    def apply(self, request: messages.StoreRequest) -> None:
        """Carry out what a request changes; reading is `reply`'s.

        Raises:
            ProtocolError: the store is full, or a counter's key holds something else.
        """
        if isinstance(request, messages.SetKey):
            self._set(request.key, request.value)
        elif isinstance(request, messages.AddToKey):
            self._add(request)
        elif isinstance(request, messages.DeleteKeys):
            for key in [k for k in self.values if k.startswith(request.prefix)]:
                self.size -= len(key) + len(self.values.pop(key))
                self.additions.pop(key, None)
        elif isinstance(request, messages.EnterBarrier):
            self.barriers.setdefault(request.name, set()).add(request.member)

    def reply(self, request: messages.StoreRequest) -> bytes | None:
        """The answer to a request that has been applied; None while it must wait."""
        if isinstance(request, (messages.GetKey, messages.AddToKey, messages.SetKey)):
            return self.values.get(request.key)
        if isinstance(request, messages.EnterBarrier):
            entered = len(self.barriers.get(request.name, ()))
            return b"%d" % entered if entered >= request.size else None
        return b""

    def _set(self, key: str, value: bytes) -> None:
        before = len(key) + len(self.values[key]) if key in self.values else 0
        size = self.size - before + len(key) + len(value)
        if size > MAX_STORE_BYTES:
            raise ProtocolError(
                f"Key {key} of {len(value)} bytes does not fit: the store holds at most "
                f"{MAX_STORE_BYTES} bytes."
            )
        self.values[key] = value
        self.size = size

    def _add(self, request: messages.AddToKey) -> None:
        made = self.additions.setdefault(request.key, set())
        if request.request_id in made:
            return
        try:
            current = int(self.values.get(request.key, b"0"))
        except ValueError as error:
            raise ProtocolError(
                f"Key {request.key} holds no number; it cannot be added to."
            ) from error
        self._set(request.key, b"%d" % (current + request.amount))
        made.add(request.request_id)

    def validate(self) -> None:
        """Check the invariants; raise AssertionError on the first that is broken."""
        assert self.size == sum(len(k) + len(v) for k, v in self.values.items())
        assert self.size <= MAX_STORE_BYTES
