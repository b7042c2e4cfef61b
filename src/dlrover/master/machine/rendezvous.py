"""Rendezvous rounds: which nodes form the next world, and when.

A round is *collecting* from the moment it opens until its world is formed. It completes

- at once when the maximum of nodes (of workers and of servers) has joined, unless some nodes are still
  leaving the job;
- at once when every awaited node has joined, if the set is *fixed*: no other node can come, because the
  platform launches the nodes or because they are the survivors of the last world;
- otherwise after a quiet time without a further join, once the minimum (of workers and of servers) has
  joined.

A round that does not reach its minimum within the join timeout expires.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass, field

from dlrover.spec.job import JobSpec
from dlrover.spec.node import Size
from dlrover.spec.world import Offer, World

UNRANKED = 1 << 31
"""Sort key of nodes without a wanted rank, behind all others; among themselves they sort by id (age)."""
LEAP = 1000
"""Maximum number of rounds that a master may have lost with its journal."""


@dataclass
class Rendezvous:
    """The rounds of one job. Change it only through its methods."""

    job: JobSpec
    #: number of the collecting round, else of the last completed one; 0 before the first
    round: int = 0
    #: highest round that a node knows of and the journal has lost: no number is used twice
    passed: int = 0
    #: number of the last completed round while ``round`` collects
    before: int = 0
    #: True while ``round`` waits for nodes
    collecting: bool = False
    #: offer of each node that is ready for the collecting (else the next) round
    offers: dict[int, Offer] = field(default_factory=dict)
    #: awaited nodes that have not joined; empty unless collecting; disjoint from ``offers``
    missing: set[int] = field(default_factory=set)
    #: nodes that leave the job; while one of them is missing, no round is full
    leaving: set[int] = field(default_factory=set)
    #: servers that belong to worlds, whether still present or not
    servers: set[int] = field(default_factory=set)
    #: nodes of the last completed round, in order of rank
    members: tuple[int, ...] = ()
    #: True if no unknown node can come, so the round waits only for the awaited ones
    fixed: bool = False
    opened_at: float = 0.0
    last_join_at: float = 0.0
    #: when a master last took over or a node check ended; time limits restart then
    resumed_at: float = 0.0
    #: minimum size of a world
    least: Size = field(init=False)
    #: maximum size of a world
    most: Size = field(init=False)

    def __post_init__(self) -> None:
        nodes, servers = self.job.world_nodes, self.job.world_servers
        self.least, self.most = map(Size, nodes, servers)

    @property
    def joined(self) -> Size:
        """Nodes that have joined the collecting (else the next) round."""
        return self.count(self.offers)

    @property
    def size(self) -> Size:
        """Size of the last completed round's world."""
        return self.count(set(self.members) if self.servers else self.members)

    @property
    def last_round(self) -> int:
        """Number of the last completed round; 0 before the first."""
        return self.before if self.collecting else self.round

    @property
    def next_round(self) -> int:
        """Number of the round that a node may join now."""
        return self.round if self.collecting else max(self.round, self.passed) + 1

    def open(self, awaited: Iterable[int], *, fixed: bool, now: float) -> None:
        """Begin to collect the next round; nodes that already made an offer have joined."""
        self.before = self.last_round
        self.round = max(self.round, self.passed) + 1
        self.collecting = True
        self.fixed = fixed
        self.missing = set(awaited) - self.offers.keys()
        self.opened_at = self.last_join_at = now

    def hear(self, running: int, known: int) -> bool:
        """Take in a node's running round and the highest that it knows; return whether later ones have been open.

        Nodes also know the number of the next round, which is not open yet.
        """
        later = max(running, known if known > self.next_round else 0)
        if not self.next_round <= later <= self.next_round + LEAP:
            return False
        self.passed = later
        return True

    def suspend(self) -> None:
        """Revoke the first round, since the master may have to adopt a running one."""
        self.round = 0
        self.collecting = False
        self.missing = set()

    def adopt(self, round_: int, members: tuple[int, ...]) -> None:
        """Continue a completed round of an earlier master; ``members`` are in order of rank."""
        self.round = round_
        self.members = members
        for node_id in members:  # a member that had joined is at work after all
            self.offers.pop(node_id, None)

    def substitute(self, lost: int, node_id: int) -> None:
        """Let a node that has joined take the place of a lost member of the running world."""
        del self.offers[node_id]
        self.members = tuple(node_id if member == lost else member for member in self.members)

    def expect(self, node_id: int) -> None:
        """Await one more node if a round is collecting."""
        if self.collecting and node_id not in self.offers:
            self.missing.add(node_id)

    def join(self, node_id: int, offer: Offer, now: float) -> bool:
        """Take a node's offer for the next round to complete; return whether it is the node's first."""
        new = node_id not in self.offers
        self.offers[node_id] = offer
        self.missing.discard(node_id)
        if new:
            self.last_join_at = now
        return new

    def withdraw(self, node_id: int) -> None:
        """Await a node again if it lost its connection after it had joined."""
        if self.offers.pop(node_id, None) is not None:
            self.expect(node_id)

    def resume(self, now: float) -> None:
        """Restart the time limits after the master's absence."""
        self.resumed_at = now

    def drop(self, node_id: int) -> None:
        """Forget a node that is gone."""
        self.offers.pop(node_id, None)
        self.missing.discard(node_id)
        self.leaving.discard(node_id)

    def let_go(self, node_id: int) -> None:
        """Await the end of a node that leaves the job, instead of its joining."""
        self.offers.pop(node_id, None)
        self.leaving.add(node_id)
        self.expect(node_id)

    def count(self, nodes: Collection[int]) -> Size:
        """Count nodes by role; ``nodes`` is searched once for each server."""
        servers = sum(node in nodes for node in self.servers)
        return Size(len(nodes) - servers, servers)

    def usable(self, size: Size) -> Size:
        """Return the part of ``size`` that a world can use: at most the maximum, workers in whole units.

        The result is ``Size(0)`` if either role has less than its minimum.
        """
        workers = min(size.workers, self.most.workers) // self.job.node_unit * self.job.node_unit
        servers = min(size.servers, self.most.servers)
        enough = workers >= self.least.workers and servers >= self.least.servers
        return Size(workers, servers) if enough else Size(0)

    def can_form(self, nodes: Collection[int]) -> bool:
        """Return whether these nodes are enough for a world."""
        return self.usable(self.count(nodes)).nodes > 0

    def exceeds(self, size: Size) -> bool:
        """Return whether a size exceeds a world's maximum in either role."""
        return size.workers > self.most.workers or size.servers > self.most.servers

    def quiet_until(self) -> float:
        """Return when a round that has its minimum completes although awaited nodes are missing."""
        quiet = self.job.limits.last_call_timeout
        # Survivors may take their whole shutdown timeout to stop their workers.
        stopping = self.job.shutdown_timeout if self.fixed else 0.0
        until = max(self.last_join_at, self.resumed_at) + quiet + stopping
        if not self.leaving.isdisjoint(self.missing):  # the next workers may load what they persist
            until = max(until, self.opened_at + stopping + self.job.limits.release_grace)
        return until

    def expires_at(self) -> float:
        """Return when a round that lacks its minimum fails."""
        return max(self.opened_at, self.resumed_at) + self.job.limits.join_timeout

    def deadline(self) -> float | None:
        """Return the next time at which the round may complete or expire without a further input."""
        if not self.collecting:
            return None
        return self.quiet_until() if self.can_form(self.offers) else self.expires_at()

    def ready(self, now: float) -> bool:
        """Return whether the collecting round can complete now."""
        if not self.collecting or len(self.offers) < self.least.nodes:
            return False  # this is asked after each of thousands of joins
        joined = self.joined
        if not self.usable(joined).nodes:
            return False
        full = joined.workers >= self.most.workers and joined.servers >= self.most.servers
        if full and self.leaving.isdisjoint(self.missing):
            return True
        return (self.fixed and not self.missing) or now >= self.quiet_until()

    def expired(self, now: float) -> bool:
        """Return whether the collecting round has failed."""
        return self.collecting and now >= self.expires_at() and not self.can_form(self.offers)

    def in_order(self, node_ranks: dict[int, int]) -> list[int]:
        """Return the joined nodes in the order of their future ranks, servers last."""
        return sorted(self.offers, key=lambda i: (i in self.servers, _wanted(node_ranks, i), i))

    def settle(self, now: float) -> None:
        """Continue with the joined nodes after their check, without waiting for unknown ones."""
        self.fixed = True
        self.resumed_at = now

    def complete(
        self, node_ranks: dict[int, int], restart_count: int, global_batch: int = 0
    ) -> dict[int, World]:
        """Form the world of a round that is `ready`; return each member's view of it by node id.

        Nodes with a wanted rank come first, in its order, then the others by age, so that rank 0 stays where
        it is. Servers come last. Nodes beyond the usable number keep their offers for the next round.
        """
        joined, order = self.joined, self.in_order(node_ranks)
        usable = self.usable(joined)
        workers, servers = order[: joined.workers], order[joined.workers :]
        self.members = (*workers[: usable.workers], *servers[: usable.servers])
        chosen = [(node, self.offers.pop(node)) for node in self.members]
        self.collecting = False
        self.missing = set()
        world_size = sum(offer.nproc for _, offer in chosen)
        serving = sum(offer.nproc for node, offer in chosen if node in self.servers)
        first = chosen[0][1]
        worlds: dict[int, World] = {}
        first_rank = 0
        for node_rank, (node, offer) in enumerate(chosen):
            worlds[node] = World(
                round=self.round,
                restart_count=restart_count,
                node_rank=node_rank,
                node_count=len(chosen),
                first_rank=first_rank,
                world_size=world_size,
                store_addr=first.addr,
                store_port=first.store_port,
                servers=serving,
                global_batch=global_batch,
                salt=first.salt,
            )
            first_rank += offer.nproc
        return worlds

    def validate(self) -> None:
        """Check the invariants; raise AssertionError on the first broken one."""
        assert not (self.missing & self.offers.keys()), "a node is both missing and joined"
        assert not (self.leaving & self.offers.keys()), "a node that leaves has joined"
        assert self.collecting or not self.missing, "nodes are missing though nothing is collected"
        assert len(set(self.members)) == len(self.members), "a node is twice in the world"
        assert self.size.workers % self.job.node_unit == 0, "the world has a wrong size"
        assert self.job.world_servers[1] or not self.servers, "servers in a world without any"
        serve = [node in self.servers for node in self.members]
        assert serve == sorted(serve), "a server before a worker"


def _wanted(node_ranks: dict[int, int], node_id: int) -> int:
    rank = node_ranks.get(node_id, -1)
    return rank if rank >= 0 else UNRANKED
