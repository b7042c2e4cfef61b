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
    """The keys of the newest membership, and those of each row of ranks that have a replica together."""

    def __init__(self) -> None:
        self._rooms: dict[int, _Room] = {}
        """By row; -1 for all ranks, -2 for the whole round."""

    def handle(self, request: Meet, epoch: int, membership: Membership) -> Met:
        """Set and read keys; refuse those of a membership or a row that is over."""
        room = self._round(membership) if request.begun else self._room(request.row, membership)
        if room is None or (request.round, request.number, request.ranks) != room.of:
            what = "Membership" if request.row < 0 else f"Row {request.row}, attempt"
            return Met(epoch, refused=f"{what} {request.number} of round {request.round} is over.")
        if any(len(value) > MAX_VALUE for value in request.put.values()):
            return Met(epoch, refused=f"A value has at most {MAX_VALUE} bytes.")
        most = MAX_VALUE * max(LEAST_VALUES, len(membership.latest))
        if not room.set(request.put, most):
            return Met(epoch, refused=f"All keys of a membership have at most {most} bytes.")
        return Met(epoch, room.page(request.after))

    def _round(self, membership: Membership) -> _Room:
        """Return the keys of the whole round."""
        of = membership.round, 0, 0
        if -2 not in self._rooms or self._rooms[-2].of != of:
            self._rooms[-2] = _Room(of)
        return self._rooms[-2]

    def _room(self, row: int, membership: Membership) -> _Room | None:
        """Return the keys of the newest membership, or of a row's latest attempt; None if there is no such row."""
        number, ranks = membership.number, membership.row_of(row * membership.row)
        if row >= 0:
            number = max((membership.latest.get(rank, -1) for rank in ranks), default=-1)
        room = self._rooms.get(row)
        if number >= 0 and (room is None or room.of[:2] != (membership.round, number)):
            of = 0 if row >= 0 else checksum(membership.attempts)
            room = self._rooms[row] = _Room((membership.round, number, of))
        return room


class _Room:
    """The keys of ranks that meet."""

    def __init__(self, of: tuple[int, int, int]) -> None:
        self.of = of
        """The round, the number of the membership and the checksum of its ranks; of a row, its attempt and 0."""
        self._keys: dict[str, bytes] = {}
        self._size = 0

    def set(self, put: dict[str, bytes], most: int) -> bool:
        """Set keys, unless all of them together are larger than ``most`` bytes."""
        size = self._size + sum(
            len(key) + len(value) - self._size_of(key) for key, value in put.items()
        )
        if size > most:
            return False
        self._keys.update(put)
        self._size = size
        return True

    def page(self, after: int) -> dict[str, bytes]:
        """Return the keys beyond the first ``after`` ones, up to `REPLY_BYTES`."""
        found, size = {}, 0
        for key, value in islice(self._keys.items(), after, None):
            found[key] = value
            size += len(key) + len(value)
            if size > REPLY_BYTES:
                break
        return found

    def _size_of(self, key: str) -> int:
        return len(key) + len(self._keys[key]) if key in self._keys else 0
