"""Hot servers: which hash slots move when much more is asked of one server than of the others."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from dlrover.embedding.machine.placement import Placement
from dlrover.spec.requests.placement import SLOTS, MoveSlots, SlotsUsed

LEAST = 1000.0
"""Keys per second and server below which no server is hot."""
GAIN = 0.1
"""Part of the mean by which the moves must relieve a server; else it keeps its slots."""
HALVINGS = 3
"""Halvings of a measurement's weight within one window."""


@dataclass
class HotServers:
    """Requests of each slot, and since when a server is hot. Only `handle` changes it.

    A restarted master measures anew: this is in no journal.
    """

    rates: list[float] = field(default_factory=lambda: [0.0] * SLOTS)
    """Keys per second, by slot."""
    owners: list[int] = field(default_factory=list)
    heard: set[int] = field(default_factory=set)
    """Servers that have reported since the slots lie where they do."""
    hot: int = -1
    """The server that is hot; -1: none is."""
    since: float = 0.0
    """Time since which it has been hot at each report."""

    def handle(
        self, used: SlotsUsed, placement: Placement, now: float, ratio: float, window: float
    ) -> MoveSlots | None:
        """Take a report; return the moves that it leads to.

        Args:
            used: The report.
            placement: Where the slots are.
            now: Time in seconds.
            ratio: Multiple of the mean beyond which a server is hot; 0: none is.
            window: Seconds that it must be hot, with all slots where they are.
        """
        server = placement.servers.get(used.server)
        if server is None or server.start != used.start:
            return None
        steady = not placement.moves and all(
            each.ready and not each.leaving for each in placement.servers.values()
        )
        if not steady or placement.owners != self.owners:
            self.owners, self.hot = list(placement.owners), -1
            self.heard.clear()
        self.heard.add(used.server)
        self._measure(used, window)
        servers = placement.servers.keys()
        if not ratio or not self.owners or not servers <= self.heard:
            return None
        before = loads(self.owners, self.rates, servers)
        mean, hottest = sum(before.values()) / len(before), max(before, key=before.__getitem__)
        hot = hottest if before[hottest] > ratio * mean >= ratio * LEAST else -1
        # The time starts anew also soon after a pause of the training, which some servers have reported and others not.
        if hot != self.hot:
            self.hot, self.since = hot, now
        if hot < 0 or now - self.since < window:
            return None
        moves = relief(self.owners, self.rates, servers, ratio)
        if not moves:
            return None
        self.hot = -1
        holders = [moves.get(slot, owner) for slot, owner in enumerate(self.owners)]
        after = loads(holders, self.rates, servers)
        return MoveSlots(hot, before[hot] / mean, max(after.values()) / mean, moves)

    def _measure(self, used: SlotsUsed, window: float) -> None:
        kept = 0.5 ** (HALVINGS * used.seconds / window)
        for slot, owner in enumerate(self.owners):
            if owner == used.server:
                rate = used.keys.get(slot, 0) / used.seconds
                self.rates[slot] = kept * self.rates[slot] + (1 - kept) * rate


def loads(
    owners: Sequence[int], rates: Sequence[float], servers: Iterable[int]
) -> dict[int, float]:
    """Return what is asked of each server."""
    found = dict.fromkeys(sorted(servers), 0.0)
    for owner, rate in zip(owners, rates, strict=True):
        found[owner] += rate
    return found


def relief(
    owners: Sequence[int], rates: Sequence[float], servers: Iterable[int], ratio: float
) -> dict[int, int]:
    """Return the server that each moving slot goes to, so that no server is hot, with few moves.

    A server is hot beyond ``ratio`` times the mean. It gives slots, the hottest that fit first, until it has no
    more than the *goal*, two thirds of the way from the mean to ``ratio``; the one with the least takes them, up
    to the goal. What is asked of one slot cannot be divided: a slot that fits nowhere stays.
    """
    load = loads(owners, rates, servers)
    mean = sum(load.values()) / len(load)
    goal = mean * (1 + (ratio - 1) * 2 / 3)
    moves: dict[int, int] = {}
    for hot in sorted(load, key=load.__getitem__, reverse=True):
        if load[hot] <= ratio * mean:
            break
        slots = sorted((rates[s], s) for s, owner in enumerate(owners) if owner == hot and rates[s])
        given: dict[int, int] = {}
        before = load[hot]
        while load[hot] > goal:
            taker = min(load, key=load.__getitem__)
            fitting = bisect_right(slots, (goal - load[taker], SLOTS))
            if not fitting:
                break
            enough = bisect_left(slots, (load[hot] - goal, 0))
            rate, slot = slots.pop(min(enough, fitting - 1))
            given[slot] = taker
            load[hot] -= rate
            load[taker] += rate
        if before - load[hot] >= GAIN * mean:
            moves |= given
        else:  # hardly worth a move
            for slot, taker in given.items():
                load[hot] += rates[slot]
                load[taker] -= rates[slot]
    return moves
