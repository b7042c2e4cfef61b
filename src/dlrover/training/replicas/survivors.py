"""The ranks that train: they carry out operations together, and go on when one of them is lost.

Each operation has a *position*, the same on all ranks. It is complete once every rank has all of its result, which a
second, tiny one confirms. When a rank is lost in between, the others form a new group and tell each other where they
are. If one of them knows the operation to be complete, all have its result, and none repeats it; otherwise all repeat
it. So ranks are never more than one operation apart, and none counts twice.

The confirmation also says which membership each rank knows. Those that join are taken in at the next *edge*, where
all ranks come with the same knowledge, so that no operation is abandoned for them.

The ranks of a row have a model together, and wait for each other within a step, too. So they agree on the outcome of
each operation and of each new group: all of a row are always at the same position.
"""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Callable
from typing import NamedTuple, NoReturn, Protocol

import torch

from dlrover.errors import ConfigurationError, InfrastructureError
from dlrover.spec.requests.membership import (
    DivideMembers,
    FinishMembers,
    JoinMembers,
    LeaveMembers,
    LookMembers,
    Members,
    MembersNow,
    RenewMembers,
)
from dlrover.training.machine.places import (
    EXCLUDED_LIMIT,
    NEWS_LIMIT,
    RENEWALS,
    Place,
    Regrouped,
    regroup,
)
from dlrover.training.replicas.groups import Changed, MembershipGroup, Peers
from dlrover.training.replicas.link import Link

logger = logging.getLogger(__name__)

AGAIN = 0.2
"""Seconds until a rank asks again to join a round that the master does not know."""
WITHDRAWN = 0.5
"""Seconds for which a rank leaves the others alone that are within a step, so that they can go on with it."""


class Healed(Protocol):
    """What a rank gives to those that join, and takes when it joins itself."""

    def heal(self, group: Peers, source: int, joining: list[int], rank: int) -> None:
        """Send the state of ``source`` to the ranks ``joining``; all ranks of the group call this."""
        ...


class RowRanks(Protocol):
    """What the ranks that have a model together agree by; `rows.Row` by their connection."""

    size: int

    def most(self, *values: int) -> list[int]:
        """Return the greatest of each value among the ranks of the row; all of them call this."""
        ...


class Regrouping(NamedTuple):
    """What the ranks of a new group have sent each other."""

    ranks: list[int]
    payloads: dict[int, torch.Tensor]
    """The payloads of the ranks at the highest position; the others have not begun with its operation."""
    complete: bool
    """True if the operation that this rank was in is complete."""


class Survivors:
    """One rank among those that train. One thread uses it."""

    def __init__(self, link: Link, round_: int, rank: int, attempt: int, state: Healed) -> None:
        self.rank = rank
        self.position = 0
        """Position of the next operation of all ranks."""
        self.usable = attempt == 0
        """True if this rank has the state that belongs to its position."""
        self._link, self._round, self._attempt, self._state = link, round_, attempt, state
        self._row: RowRanks | None = None
        self._group: MembershipGroup | None = None
        self._settled = self._later = False
        self._waiting: Regrouped | None = None
        self._renewed = 0
        self._last = self._agreed = -1
        link.on_change = self._note

    @property
    def ranks(self) -> list[int]:
        """The ranks that train, as far as known."""
        return self._group.ranks if self._group is not None else [self.rank]

    @property
    def number(self) -> int:
        """Number of the membership in which this rank trains; -1 before."""
        return self._group.number if self._group is not None else -1

    @property
    def lacking(self) -> bool:
        """True if a rank of the group is lost."""
        group, members = self._group, self._link.members
        return group is not None and members is not None and _lacks(members, group)

    def _note(self, members: Members) -> None:
        """Leave a collective that waits for a lost rank; runs in the link's thread."""
        group = self._group
        if group is not None and _lacks(members, group):
            group.abandon()

    # ---- life

    def join(self, payload: torch.Tensor, *, later: bool = False) -> Regrouping | None:
        """Begin to train with the others; None if the training is already over.

        With ``later``, this rank takes the others' state when it calls `settle`; ``position`` is theirs, and they wait.

        Raises:
            InfrastructureError: The round is over: the training goes on elsewhere.
        """
        self._later = later
        ask = LookMembers(self._round)
        request = ask if self._attempt == 0 else JoinMembers(self._round, self.rank, self._attempt)
        members, end = self._ask(request), time.monotonic() + EXCLUDED_LIMIT
        while members is None and time.monotonic() < end:
            # The agent ends this process, or a master that has lost its journal still adopts the round.
            self._link.wait(lambda _members: False, AGAIN)
            members = self._ask(request)
        if members is None:
            raise InfrastructureError(f"Round {self._round} is over; rank {self.rank} cannot join.")
        if any(self._most(members.over)):
            return None
        regrouped = self._regroup(payload, complete=False)
        return regrouped if self.usable or self._waiting is not None else None

    def divide(self, row: RowRanks, payload: torch.Tensor) -> None:
        """Train as one of a row from now on; all ranks that train call this at the same place."""
        self._row = row
        if self._group is not None and self._group.row != row.size:
            self._regroup(payload, complete=False)

    def check(self) -> None:
        """Check that no rank of the group is lost.

        Raises:
            Changed: One is.
        """
        if self._group is not None:
            self._present()

    def _ask(self, request: LookMembers | JoinMembers) -> Members | None:
        reply = self._link.ask(request)
        assert isinstance(reply, MembersNow)
        return reply.members

    def settle(self, payload: torch.Tensor) -> bool:
        """Take the state of the others, which wait for it; False if they are at another place now."""
        assert self._waiting is not None
        failed = False
        try:
            self._heal(self._present(), self._waiting)
        except Changed:
            failed = True
        if any(self._most(failed)):
            self._regroup(payload, complete=False)
            return False
        self._waiting, self._later = None, False
        self.usable = self._settled = True
        return True

    def withdraw(self) -> None:
        """Let the others go on without this rank, which cannot join them where they are; it may join again."""
        self.close()
        self._waiting = None
        self._link.ask(LeaveMembers(self._round, self.rank, self._attempt))
        self._link.wait(lambda members: members.over, WITHDRAWN)

    def finish(self) -> None:
        """Report that the training is finished, and leave."""
        self._link.ask(FinishMembers(self._round, self.rank, self._attempt))
        self.close()

    def leave(self) -> NoReturn:
        """End a process that came too late: the others have finished the training, without their state for it.

        Raises:
            InfrastructureError: This is rank 0, which commonly stores what all have trained.
        """
        if self.rank == 0:
            raise InfrastructureError(
                "The others finished the training before rank 0 was back, which may have more to do: it starts again."
            )
        sys.exit(0)

    def close(self) -> None:
        """Leave the group."""
        if self._group is not None:
            self._group.close()
            self._group = None

    # ---- operations

    def run(
        self, operation: Callable[[MembershipGroup], None], payload: torch.Tensor
    ) -> Regrouping | None:
        """Carry out an operation of all ranks; None once it is complete on all of them.

        Otherwise, a rank was lost: what the operation has written is undefined, unless the `Regrouping` says that it
        is complete.
        """
        has_all = confirmed = False
        known: list[list[int]] = []
        try:
            group = self._present()
            operation(group)
            has_all = True
            own = torch.tensor([self._link.number, self.position], device="cpu")
            known = [one.tolist() for one in group.gather(own)]
            self._agreed = max(number for number, _position in known)
            confirmed = True
        except Changed as change:
            logger.debug("Rank %d repeats operation %d: %s", self.rank, self.position, change)
        if len({position for _number, position in known}) > 1:
            raise ConfigurationError(
                "--survive: the ranks carry out collectives at different places of the program; let each rank call those of"
                " its groups at the same places, or start the program without --survive."
            )
        # What one of a row knows to be complete is complete: the others must not repeat it without it.
        complete, self._agreed = self._most(confirmed, self._agreed)
        if not complete:
            return self._regroup(payload, complete=has_all)
        self._renewed = 0
        return None

    def edge(self, payload: torch.Tensor) -> Regrouping | None:
        """Take in ranks that join, between two operations on all ranks; None if there are none."""
        group = self._group
        if group is None or self._agreed <= group.number:
            return None
        found = self._link.wait(lambda m: m.number >= self._agreed, NEWS_LIMIT)
        missing = found is None or self._link.over
        if any(self._most(missing)):
            return None
        # Others may be within the step by now: this rank lacks no result for it.
        regrouped = self._regroup(payload, complete=True)
        return regrouped if regrouped.payloads else None

    def _most(self, *values: int) -> list[int]:
        return self._row.most(*values) if self._row is not None else list(values)

    def _present(self) -> MembershipGroup:
        """Return the group, if all its ranks are alive."""
        group, members = self._group, self._link.members
        if group is None or (members is not None and _lacks(members, group)):
            raise Changed("a rank is lost")
        return group

    # ---- a new group

    def _regroup(self, payload: torch.Tensor, *, complete: bool) -> Regrouping:
        """Form the group of the next membership and exchange where the ranks are; heal those that join."""
        while True:
            members = self._next_members()
            number, least, over = self._most(members.number, -members.number, members.over)
            if number != -least:
                self._link.wait(lambda m, number=number: m.number >= number, NEWS_LIMIT)  # type: ignore[misc]
                continue
            self.close()
            if over:
                return self._alone(complete)
            self._last, found = members.number, None
            payloads: dict[int, torch.Tensor] = {}
            try:
                self._group = MembershipGroup(self._link, self._round, members, self.rank)
                found, payloads = self._exchange(self._present(), payload, complete)
            except Changed as change:
                logger.debug("Rank %d: membership %d: %s", self.rank, members.number, change)
            if not any(self._most(found is None)) and found is not None:
                return self._regrouped(found, payloads)

    def _alone(self, complete: bool) -> Regrouping:
        """End the training: a rank has finished it, so the last operation was complete on all.

        Raises:
            ConfigurationError: This rank has begun another one.
        """
        if self.usable and not complete:
            raise ConfigurationError(
                "--survive: another rank has ended the training, and this one still calls collectives; let all ranks call"
                " equal collectives until the last step."
            )
        return Regrouping([self.rank], {}, complete=complete)

    def _next_members(self) -> Members:
        """Return the membership to train in; it is newer than that of the last group."""
        last = self._last
        members = self._link.wait(lambda m: m.number > last, NEWS_LIMIT)
        if members is None:
            self._renewed += 1
            if self._renewed > RENEWALS:
                raise InfrastructureError(
                    f"Rank {self.rank} cannot add up tensors with the others, though no rank is lost."
                )
            self._link.ask(RenewMembers(self._round, self.rank, self._attempt, last))
        elif self.rank not in members.attempts:
            # A master that has lost its journal does not know that this rank had joined.
            self._link.ask(JoinMembers(self._round, self.rank, self._attempt))
        mine = self._link.wait(
            lambda m: m.number > last and m.attempts.get(self.rank) == self._attempt, EXCLUDED_LIMIT
        )
        if mine is None:
            raise InfrastructureError(f"The job goes on without rank {self.rank}.")
        if self._row is not None and mine.row != self._row.size and not mine.over:
            # Nor does it know of rows then; with them it makes another membership.
            self._last = mine.number
            self._link.ask(DivideMembers(self._round, self.rank, self._attempt, self._row.size))
            return self._next_members()
        return mine

    def _exchange(
        self, group: MembershipGroup, payload: torch.Tensor, complete: bool
    ) -> tuple[Regrouped, dict[int, torch.Tensor]]:
        """Tell each other where the ranks are; heal those that join, unless they do so later."""
        own = Place(self.position, self.usable, complete, self._settled)
        every = group.gather(torch.tensor(own, dtype=torch.int64, device="cpu"))
        places = {r: Place(*t.tolist()) for r, t in zip(group.ranks, every, strict=True)}
        payloads = dict(zip(group.ranks, group.gather(payload), strict=True))
        found = regroup(places, group.row)
        if found.joining and not (self._later and self.rank in found.joining):
            self._heal(group, found)
        return found, payloads

    def _regrouped(self, found: Regrouped, payloads: dict[int, torch.Tensor]) -> Regrouping:
        """Return what follows for this rank."""
        at_top = {rank: payloads[rank] for rank in found.at_top}
        behind, joins = self.position < found.top, self.rank in found.joining
        if joins:
            self.position = found.top
        if joins and self._later:
            self._waiting = found
        else:
            self._settled = self.usable = True
        return Regrouping(list(payloads), at_top, behind and not joins)

    def _heal(self, group: MembershipGroup, found: Regrouped) -> None:
        """Let those that join take the state of the rank with the same place in the row of the source."""
        place = self.rank % group.row
        joining = [rank for rank in found.joining if rank % group.row == place]
        if joining:
            self._state.heal(group.column, found.source + place, joining, self.rank)
        group.gather(torch.ones(1, device="cpu"))


def _lacks(members: Members, group: MembershipGroup) -> bool:
    """Return whether a rank of the group is lost; one that was started again is another process."""
    newer = members.number > group.number
    return newer and any(members.attempts.get(r) != a for r, a in group.attempts.items())
