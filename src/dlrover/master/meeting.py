"""The keys by which the ranks of a membership connect to each other; in memory only.

The keys of the newest membership are kept. A master that takes over has none: each reply has the master's epoch, and
a rank that sees another one sets its keys again.
"""

from __future__ import annotations

from itertools import islice

from dlrover.master.machine.membership import Membership
from dlrover.spec.requests.membership import MAX_VALUE, Meet, Met, checksum

LEAST_VALUES = 1024
"""Values of the greatest size for which there is room in a membership of few ranks; larger ones have one for each rank."""
REPLY_BYTES = 1 << 20
"""Bytes of keys and values after which a reply ends: the rank asks again."""


class Meeting:
    """The keys of one membership."""

    def __init__(self) -> None:
        self._of = (0, 0, 0)
        """The membership's round, its number and the checksum of its ranks."""
        self._keys: dict[str, bytes] = {}
        self._size = 0

    def handle(self, request: Meet, epoch: int, membership: Membership) -> Met:
        """Set and read keys; refuse those of a membership that is over."""
        now = membership.round, membership.number
        if now != self._of[:2]:
            self._of = *now, checksum(membership.attempts)
            self._keys, self._size = {}, 0
        if (request.round, request.number, request.ranks) != self._of:
            return Met(
                epoch, refused=f"Membership {request.number} of round {request.round} is over."
            )
        if any(len(value) > MAX_VALUE for value in request.put.values()):
            return Met(epoch, refused=f"A value has at most {MAX_VALUE} bytes.")
        most = MAX_VALUE * max(LEAST_VALUES, len(membership.latest))
        size = self._size + sum(
            len(key) + len(value) - self._size_of(key) for key, value in request.put.items()
        )
        if size > most:
            return Met(epoch, refused=f"All keys of a membership have at most {most} bytes.")
        self._keys.update(request.put)
        self._size = size
        return Met(epoch, self._page(request.after))

    def _page(self, after: int) -> dict[str, bytes]:
        found, size = {}, 0
        for key, value in islice(self._keys.items(), after, None):
            found[key] = value
            size += len(key) + len(value)
            if size > REPLY_BYTES:
                break
        return found

    def _size_of(self, key: str) -> int:
        return len(key) + len(self._keys[key]) if key in self._keys else 0
