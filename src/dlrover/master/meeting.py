"""The keys by which the ranks of a membership connect to each other; in memory only.

The keys of the newest membership are kept. A master that takes over has none: each reply has the master's epoch, and
a rank that sees another one sets its keys again.
"""

from __future__ import annotations

from dlrover.master.machine.membership import Membership
from dlrover.spec.membership import MAX_KEYS, MAX_VALUE, Meet, Met


class Meeting:
    """The keys of one membership."""

    def __init__(self) -> None:
        self._of = (0, 0)
        self._keys: dict[str, bytes] = {}

    def handle(self, request: Meet, epoch: int, membership: Membership) -> Met:
        """Set and read keys; refuse those of a membership that is over."""
        of = (request.round, request.number)
        if of != (membership.round, membership.number):
            return Met(epoch, refused=f"Membership {of[1]} of round {of[0]} is over.")
        if of != self._of:
            self._of, self._keys = of, {}
        most = MAX_KEYS * len(membership.latest)
        if len(self._keys.keys() | request.put.keys()) > most:
            return Met(epoch, refused=f"A membership has at most {most} keys.")
        if any(len(value) > MAX_VALUE for value in request.put.values()):
            return Met(epoch, refused=f"A value has at most {MAX_VALUE} bytes.")
        self._keys.update(request.put)
        return Met(epoch, {key: self._keys[key] for key in request.get if key in self._keys})
