"""Membership of the running world: which ranks train, and who is started again.

In a job that survives losses, a rank's loss opens no round while another one trains: the ranks that are left go on
in their own processes, and the lost one is started again on its node or on the node that replaces it. Its new
process asks to join once it is ready.

Replicas may be spread over rows of ranks (HSDP). A row is lost with any of its ranks: the others of it are ended and
started again, all in one attempt, and they join together.

Invariant: a rank trains (`attempts`), or it is out; a rank that is out may ask to join in its present attempt only.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from dlrover.spec.job import JobSpec
from dlrover.spec.requests.membership import (
    DivideMembers,
    FinishMembers,
    JoinMembers,
    LeaveMembers,
    Members,
    MembershipChange,
    RenewMembers,
)
from dlrover.spec.world import Holding, World

LEAP = 1000
"""Maximum number of memberships that a master may have lost with its journal."""


class Hole(NamedTuple):
    """The place of a lost node."""

    world: World
    ranks: range


@dataclass
class Membership:
    """The ranks of one round. Change it only through its methods."""

    job: JobSpec
    #: the round; 0 before the first, and while a round collects its nodes
    round: int = 0
    #: number of the present membership
    number: int = 0
    #: attempt of each rank that trains
    attempts: dict[int, int] = field(default_factory=dict)
    #: latest attempt of each rank of the world
    latest: dict[int, int] = field(default_factory=dict)
    #: ranks by node; a lost node has none until another one takes its place
    ranks: dict[int, range] = field(default_factory=dict)
    #: places of lost nodes that no other node has taken yet
    holes: dict[int, Hole] = field(default_factory=dict)
    #: nodes that took the places of lost ones
    replacements: set[int] = field(default_factory=set)
    #: ranks of a row
    row: int = 1
    #: ranks that have asked to join in their latest attempt, while others of their row have not
    ready: set[int] = field(default_factory=set)
    #: attempts in which ranks are to be started again, by node and local rank; the caller takes them
    due: dict[int, dict[int, int]] = field(default_factory=dict)
    #: ids of the failures that were answered here
    seen: set[str] = field(default_factory=set)
    #: True once a rank has finished the training
    over: bool = False

    # ---- queries

    @property
    def active(self) -> bool:
        """True if a lost rank of the running world need not end the round."""
        return self.round > 0 and not self.over

    @property
    def lacks_first(self) -> bool:
        """True if the node of rank 0 was lost, and no node is in its place yet."""
        return any(hole.world.first_rank == 0 for hole in self.holes.values())

    def members(self, steps: int = 0) -> Members:
        """Return the membership as a message."""
        return Members(self.round, self.number, dict(self.attempts), self.over, steps, self.row)

    def row_of(self, rank: int) -> range:
        """Return the ranks of a rank's row."""
        first = rank - rank % self.row
        return range(first, first + self.row)

    def rows_of(self, ranks: Iterable[int]) -> list[int]:
        """Return all ranks of the rows that ranks belong to, in order."""
        firsts = sorted({rank - rank % self.row for rank in ranks})
        return [rank for first in firsts for rank in self.row_of(first)]

    def out_of(self, node_id: int) -> dict[int, int]:
        """Return the attempt of each rank of a node that was started again, by local rank."""
        ranks = self.ranks.get(node_id, range(0))
        return {i: self.latest[rank] for i, rank in enumerate(ranks) if self.latest[rank]}

    def trains(self, node_id: int) -> bool:
        """Return whether all ranks of a node train."""
        return self.attempts.keys() >= set(self.ranks.get(node_id, ()))

    @property
    def lacks_ranks(self) -> bool:
        """True while some ranks train and others do not."""
        return self.active and len(self.attempts) < len(self.latest)

    def missing(self) -> tuple[int, int]:
        """Return how many ranks on the nodes of the first world do not train, and how many ranks these have."""
        others = [rank for i in self.replacements for rank in self.ranks.get(i, ())]
        first = sum(map(len, self.ranks.values())) - len(others)
        trains = len(self.attempts) - sum(rank in self.attempts for rank in others)
        return (first - trains if self.active else 0), first

    def spares(self, ranks: Iterable[int]) -> bool:
        """Return whether other rows than these ranks' train."""
        rows = set(self.rows_of(ranks))
        return any(rank not in rows for rank in self.attempts)

    def survives_worker(self, node_id: int, local_rank: int) -> bool:
        """Return whether the world goes on without this worker."""
        ranks = self.ranks.get(node_id, range(0))
        return self.active and 0 <= local_rank < len(ranks) and self.spares((ranks[local_rank],))

    def survives_node(self, node_id: int) -> bool:
        """Return whether the world goes on without this node."""
        return self.active and node_id in self.ranks and self.spares(self.ranks[node_id])

    def vacancy(self, nproc: int) -> int | None:
        """Return the lost node whose place a node with ``nproc`` workers can take; None if there is none."""
        return min((i for i, hole in self.holes.items() if len(hole.ranks) == nproc), default=None)

    # ---- changes

    def form(self, worlds: dict[int, World]) -> None:
        """Begin with the world of a completed round; all ranks train."""
        if not self.job.survive:
            return
        size = next(iter(worlds.values())).world_size
        self.__init__(self.job)  # type: ignore[misc]
        self.round = next(iter(worlds.values())).round
        firsts = sorted((world.first_rank, node_id) for node_id, world in worlds.items())
        ends = [first for first, _ in firsts[1:]] + [size]
        for (first, node_id), end in zip(firsts, ends, strict=True):
            self.ranks[node_id] = range(first, end)
        self.attempts = dict.fromkeys(range(size), 0)
        self.latest = dict(self.attempts)

    def adopt(self, worlds: dict[int, World], held: Mapping[int, Holding]) -> None:
        """Go on with a running world's membership, from the latest order that its agents have, and what they run."""
        self.form(worlds)
        if not self.round:
            return
        for node_id, ranks in self.ranks.items():
            for local_rank, attempt in held[node_id].attempts.items():
                if local_rank < len(ranks):
                    self.latest[ranks[local_rank]] = attempt
        known = [holding.members for holding in held.values() if holding.members is not None]
        newest = max(
            (members for members in known if members.round == self.round),
            key=lambda members: (members.number, members.over),
            default=Members(self.round, 0, self.attempts),
        )
        self.row = newest.row if not len(self.latest) % newest.row else 1
        self.over = newest.over or any(holding.succeeded for holding in held.values())
        self.attempts = {r: a for r, a in newest.attempts.items() if self.latest.get(r) == a}
        self._level(self.latest)
        self.due.clear()  # the caller orders all that were started again anyway
        if not (self.attempts or self.over):
            self.end()
            return
        # Without a rank that was started again since then, it is another membership.
        self.number = newest.number + (self.attempts.keys() != newest.attempts.keys())

    def learn(self, node_id: int, held: Holding) -> bool:
        """Take in what a node knows of this round, and not a journal without its last moments.

        Return whether the membership has changed. It has no rank if all that this master knew to train are lost.
        """
        theirs, ranks = held.members, self.ranks[node_id]
        if theirs is None or theirs.round != self.round:
            theirs = Members(self.round, 0, self.attempts)
        newer = theirs.number > self.number
        again = newer or (theirs.number == self.number and theirs.attempts != self.attempts)
        latest = dict(theirs.attempts) if newer else {}
        latest |= {ranks[i]: a for i, a in held.attempts.items() if i < len(ranks)}
        latest = {r: a for r, a in latest.items() if a > self.latest.get(r, a)}
        if not (again or latest or theirs.over > self.over or theirs.row > self.row):
            return False
        self.latest |= latest
        if self.row == 1 and not len(self.latest) % theirs.row:
            self.row = theirs.row
        there = {rank for ranks in self.ranks.values() for rank in ranks}
        attempts = theirs.attempts if newer else self.attempts
        self.attempts = {r: a for r, a in attempts.items() if r in there and self.latest[r] == a}
        self.over |= theirs.over
        self.ready -= latest.keys() | self.attempts.keys()
        self._level(self.latest)
        # No other membership has this number: nodes and ranks take in none of a number that they know.
        self.number = max(self.number, theirs.number) + 1
        return True

    def pass_over(self, held: Holding) -> None:
        """Use no attempt again of a node outside the world, if the journal has lost that it was in a lost one's place."""
        there = {rank for ranks in self.ranks.values() for rank in ranks}
        if held.world is not None and held.world.round == self.round:
            for local_rank, attempt in held.attempts.items():
                rank = held.world.first_rank + local_rank
                if rank in self.latest and rank not in there:
                    self.latest[rank] = max(self.latest[rank], attempt)

    def end(self) -> None:
        """End the membership: a new round opens."""
        self.__init__(self.job)  # type: ignore[misc]

    def lose_worker(self, failure_id: str, node_id: int, local_rank: int) -> list[int]:
        """Go on without a worker's row, which is started again; return its ranks."""
        row = self.row_of(self.ranks[node_id][local_rank])
        self.seen.add(failure_id)
        self._start(row, 1 + max(self.latest[rank] for rank in row))
        return list(row)

    def lose_node(self, node_id: int, world: World) -> list[int]:
        """Go on without the rows of a node, whose place another one takes; return their ranks."""
        own = self.ranks.pop(node_id)
        rows = self.rows_of(own)
        self.holes[node_id] = Hole(world, own)
        self._drop(rows)
        self.ready -= set(own)
        starts: dict[int, list[int]] = {}  # by attempt: a start looks at all nodes
        for row in map(self.row_of, rows[:: self.row]):
            if not set(row) <= set(own):
                starts.setdefault(1 + max(self.latest[rank] for rank in row), []).extend(row)
        for attempt, ranks in starts.items():
            self._start(ranks, attempt)
        return rows

    def replace(self, lost: int, node_id: int) -> World:
        """Let a node take a lost one's place; return the world of its workers, which are new attempts."""
        world, ranks = self.holes.pop(lost)
        away = {*ranks}.union(*(hole.ranks for hole in self.holes.values()))
        rows = self.rows_of(ranks)
        waiting = [self.latest[rank] for rank in rows if rank not in away]
        attempt = max(1 + max(self.latest[rank] for rank in ranks), *waiting, 0)
        self.latest.update(dict.fromkeys(ranks, attempt))
        self.ranks[node_id] = ranks
        self.replacements.add(node_id)
        self._start(rows, attempt)
        return world.as_attempt(attempt)

    def report(self, change: MembershipChange) -> bool:
        """Take a rank's report; return whether the membership has changed."""
        if not self._may_train(change):
            return False
        known = change.attempt <= self.latest[change.rank]
        if not known:  # the journal has lost that it was started again
            self._drop((change.rank,))
            self.latest[change.rank] = change.attempt
            self._start(self.row_of(change.rank), change.attempt)
        changes = self._take(change)
        self.number += changes
        return changes or not known

    def _take(self, change: MembershipChange) -> bool:
        """Take a report of a rank in its latest attempt; return whether it makes another membership."""
        match change:
            case JoinMembers(_, rank, attempt):
                return not self.over and self.attempts.get(rank) != attempt and self._admit(rank)
            case LeaveMembers(_, rank, _):
                return not self.over and self._retire(rank)
            case RenewMembers(_, rank, _, number):
                if not self.number <= number <= self.number + LEAP:
                    return False
                # A master that has lost its journal may not know the newest membership, or that this rank joined.
                self.number = number
                if not self.over:
                    self._admit(rank)
            case DivideMembers(_, _, _, row):
                if self.row > 1 or row == 1 or len(self.latest) % row:
                    return False
                self.row = row
                self._level(self.latest)
            case FinishMembers():
                if self.over:
                    return False
                self.over = True
        return True

    def succeed(self, node_id: int) -> bool:
        """Note that all ranks of a node have ended well; return whether the membership has changed.

        A master that has lost its journal may not know that the training is finished.
        """
        if not self.active or node_id not in self.ranks:
            return False
        self.over = True
        self.number += 1
        return True

    def _may_train(self, change: MembershipChange) -> bool:
        if change.round != self.round or change.attempt < self.latest.get(change.rank, 0):
            return False
        # A process must not train on whose node is lost.
        lost = any(change.rank in hole.ranks for hole in self.holes.values())
        return change.rank in self.latest and not lost

    def _admit(self, rank: int) -> bool:
        """Let the row of a rank that is ready train; False while others of it are not."""
        row = self.row_of(rank)
        self.ready.add(rank)
        if not all(r in self.ready or r in self.attempts for r in row):
            return False
        self.ready -= set(row)
        self.attempts |= {r: self.latest[r] for r in row}
        return True

    def _retire(self, rank: int) -> bool:
        """Go on without a rank's row, whose processes ask to join later; False if no other row trains."""
        row = set(self.row_of(rank))
        if not self.attempts.keys() & row or not self.attempts.keys() - row:
            return False
        self.attempts = {r: attempt for r, attempt in self.attempts.items() if r not in row}
        return True

    def _level(self, ranks: Iterable[int]) -> None:
        """Let rows that are not whole start again, in the latest attempt of their ranks unless one has trained in it."""
        rows = self.rows_of(ranks) if self.row > 1 else []
        for row in map(self.row_of, rows[:: self.row]):
            attempt = max(self.latest[rank] for rank in row)
            trained = [self.attempts.get(rank) == attempt for rank in row]
            if not all(trained):
                self._start(row, attempt + any(trained))

    def _start(self, rows: Iterable[int], attempt: int) -> None:
        """Go on without rows, whose ranks start again in an attempt where they have nodes and are behind it."""
        lost = set(rows)
        self._drop(lost)
        waits, first, last = set[int](), min(lost), max(lost)
        for node_id, ranks in self.ranks.items():
            if ranks.stop <= first or last < ranks.start:
                continue
            for rank in lost.intersection(ranks):
                if self.latest[rank] < attempt:
                    self.latest[rank] = attempt
                    self.due.setdefault(node_id, {})[rank - ranks.start] = attempt
                else:
                    waits.add(rank)
        self.ready -= lost - waits

    def take_due(self) -> dict[int, dict[int, int]]:
        """Return the attempts in which ranks are to be started again, by node and local rank, once."""
        due, self.due = self.due, {}
        return due

    def _drop(self, ranks: Iterable[int]) -> None:
        lost = self.attempts.keys() & set(ranks)
        for rank in lost:
            del self.attempts[rank]
        self.number += bool(lost)

    def validate(self) -> None:
        """Check the invariants; raise AssertionError on the first broken one."""
        assert self.job.survive or not self.round, "a membership in a job without any"
        assert self.attempts.keys() <= self.latest.keys(), "a rank that is not in the world"
        assert all(self.latest[r] == a for r, a in self.attempts.items()), "a dead attempt trains"
        held = [rank for ranks in self.ranks.values() for rank in ranks]
        assert len(held) == len(set(held)), "a rank on two nodes"
        assert self.attempts.keys() <= set(held), "a rank without a node trains"
        assert not self.ranks.keys() & self.holes.keys(), "a node is lost and there"
        away = [rank for hole in self.holes.values() for rank in hole.ranks]
        assert sorted(held + away) == sorted(self.latest), "a rank is neither there nor lost"
        assert not self.round or self.attempts or self.over, "no rank trains"
        assert not len(self.latest) % self.row, "a row is cut off"
        assert not self.due, "ranks to start again are without an order"
        assert self.ready <= set(held) - self.attempts.keys(), "a rank asks to join that trains"
        there = set(held)
        for row in map(self.row_of, range(0, len(self.latest), self.row)):
            assert len({rank in self.attempts for rank in row}) == 1, "a part of a row trains"
            alike = {self.latest[rank] for rank in row if rank in there}
            assert len(alike) <= 1, "a row in different attempts"
