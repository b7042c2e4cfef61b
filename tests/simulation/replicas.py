"""Workers of a job that survives losses, on virtual time: they do what `Survivors` does in each worker.

They know what their agent has told them and what the real master answers. Which state counts, who sends it and who
takes it says the rule of the real workers; collectives, sockets and states are simulated. A state is the number of
steps that it has learned from.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NoReturn

from dlrover.errors import InfrastructureError
from dlrover.spec.failure import FailureKind
from dlrover.spec.requests import Unanswered
from dlrover.spec.requests.membership import (
    DivideMembers,
    FinishMembers,
    JoinMembers,
    LookMembers,
    Meet,
    Members,
    MembershipRequest,
    MembersNow,
    RenewMembers,
    checksum,
)
from dlrover.training.machine.places import (
    EXCLUDED_LIMIT,
    NEWS_LIMIT,
    RENEWALS,
    Place,
    Regrouped,
    regroup,
)
from tests.simulation.clock import Range

if TYPE_CHECKING:
    from tests.simulation.nodes import Program, Run, SimulatedNode

LOOK: Range = (0.2, 0.5)
"""Seconds between two looks for what nobody pushes."""
RAISED = 'File "/usr/lib/dlrover/training/replicas/survivors.py", line 1, in _regroup'


class Changed(Exception):  # noqa: N818 - control flow
    """A rank of the group is lost, or its membership is over."""


class Group:
    """The ranks of one membership that are connected, or those of one row."""

    def __init__(self, program: Program, size: int, row: int = 1) -> None:
        self.ranks: dict[int, SimulatedRank] = {}
        """Those that have arrived."""
        self.row = row
        self.broken = False
        self._program, self._size = program, size
        self._given: dict[int, dict[SimulatedRank, Any]] = {}
        """What ranks have given to an exchange of all of them (-1), or of those with one place in their rows."""
        self._waiting: dict[int, list[asyncio.Future[dict[int, Any]]]] = {}
        self._entered = asyncio.Event()

    async def enter(self, rank: SimulatedRank, refused: Callable[[], bool | None]) -> None:
        """Wait for all ranks of the membership, by way of the master; None while it does not answer."""
        while not self._entered.is_set():
            known = refused()
            if known or self.broken:
                self.ranks.pop(rank.rank, None)
                raise Changed
            if known is not None:
                self.ranks[rank.rank] = rank
            if len(self.ranks) == self._size:
                self._entered.set()
            await _within(self._entered.wait(), self._program.time.draw(LOOK))

    async def gather(
        self, rank: SimulatedRank, value: Any, seconds: float | Range = 0.0, *, column: bool = False
    ) -> Any:
        """Exchange values between all ranks, or those with one place in their rows, which takes a while.

        Each rank has the result at another instant.
        """
        if self.broken:
            raise Changed
        time = self._program.time
        future = time.loop.create_future()
        key, size = (rank.rank % self.row, self._size // self.row) if column else (-1, self._size)
        self._waiting.setdefault(key, []).append(future)
        found = self._given.setdefault(key, {})
        found[rank] = value
        if len(found) == size:
            given = {one.rank: said for one, said in self._given.pop(key).items()}
            later = time.draw(seconds)
            for each in self._waiting.pop(key):
                delay = later + time.draw(self._program.delays.message)
                time.after(delay, self._deliver, each, given)
        return await future

    def _deliver(self, future: asyncio.Future[Any], given: dict[int, Any]) -> None:
        if future.done():
            return
        if self.broken:
            future.set_exception(Changed())
        else:
            future.set_result(given)

    def abandon(self) -> None:
        """End all exchanges with an error."""
        self.broken = True
        for future in itertools.chain(*self._waiting.values()):
            self._deliver(future, {})


async def _within(what: Any, seconds: float) -> bool:
    """Return whether something happens within a time."""
    try:
        await asyncio.wait_for(what, seconds)
    except (asyncio.TimeoutError, TimeoutError):
        return False
    return True


class SimulatedRank:
    """One process of a rank, from its readiness to train on."""

    def __init__(self, run: Run, node: SimulatedNode, local_rank: int, attempt: int) -> None:
        world = node.machine.world
        assert world is not None
        self.node, self.local_rank, self.attempt = node, local_rank, attempt
        self.rank = world.first_rank + local_rank
        self.place = Place(0, attempt == 0, False, False)
        self.alive = True
        self.state = 0 if attempt == 0 else -1
        """Steps that its state has learned from."""
        self._run, self._program = run, run.program
        self._members = node.machine.members
        self._news = asyncio.Event()
        self._group: Group | None = None
        self._row: Group | None = None
        self._last = self._agreed = self._number = -1
        self._renewed = 0
        self._task = self._program.time.loop.create_task(self._live())
        self._task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self.alive = False
        if not task.cancelled() and task.exception() is not None:
            self._program.time.fail({"exception": task.exception()})

    def kill(self) -> None:
        """End at once; the others notice."""
        self.alive = False
        self._task.cancel()
        for group in (self._group, self._row):
            if group is not None:
                group.abandon()

    # ---- what is known

    def know(self, members: Members) -> None:
        """Take in what the agent pushes, or the master answers."""
        known = self._members
        if members.round != self._run.round or (
            known is not None and (members.number, members.over) <= (known.number, known.over)
        ):
            return
        self._members = members
        self._news.set()
        self._news = asyncio.Event()
        group = self._group
        if group is not None and any(
            members.attempts.get(one.rank) != one.attempt for one in group.ranks.values()
        ):
            group.abandon()

    async def _wait(self, holds: Callable[[Members], bool], seconds: float) -> Members | None:
        until = self._program.time.now + seconds
        while self._members is None or not holds(self._members):
            left = until - self._program.time.now
            if left <= 0 or not await _within(self._news.wait(), left):
                break
        return self._members if self._members is not None and holds(self._members) else None

    def _try(self, request: MembershipRequest) -> Any:
        """Return the master's reply; None while neither it nor the agent answers."""
        reply = None if self.node.stopped else self._program.ask(request)
        if isinstance(reply, Unanswered):
            if reply.refused:
                raise asyncio.CancelledError  # the job has ended
            return None
        if isinstance(reply, MembersNow) and reply.members is not None:
            self.know(reply.members)
        return reply

    async def _ask(self, request: MembershipRequest) -> Any:
        while (reply := self._try(request)) is None:
            await asyncio.sleep(self._program.time.draw(LOOK))
        return reply

    # ---- life

    async def _live(self) -> None:
        try:
            await self._until_end()
        except InfrastructureError as error:
            details = {
                "exception": type(error).__name__,
                "message": str(error),
                "traceback": RAISED,
            }
            self.node.workers.fail(FailureKind.EXCEPTION, self.local_rank, **details)
            return
        await asyncio.sleep(self._program.time.draw(self._program.delays.start))
        self.node.when_awake(self.node.workers._ended, self._run, self.local_rank, None)

    async def _until_end(self) -> None:
        if await self._train():
            await self._ask(FinishMembers(self._run.round, self.rank, self.attempt))
        elif self.rank == 0:
            raise InfrastructureError("The others finished the training before rank 0 was back.")

    async def _train(self) -> bool:
        """Train to the end; False if the others finished before this rank was back."""
        if self.attempt:
            await self._divide()
        ask: MembershipRequest = LookMembers(self._run.round)
        if self.attempt:
            ask = JoinMembers(self._run.round, self.rank, self.attempt)
        until = self._program.time.now + EXCLUDED_LIMIT
        while (members := (await self._ask(ask)).members) is None:
            if self._program.time.now >= until:
                raise InfrastructureError(f"Round {self._run.round} is over.")
            await asyncio.sleep(self._program.time.draw(LOOK))
        (over,) = await self._most(members.over)
        if over or not await self._regroup(complete=False):
            return False
        if not self.attempt:
            await self._divide()
        while self._run.left(self.place.position):
            if self._group is not None and self._agreed > self._number:
                known = await self._wait(self._has_agreed, NEWS_LIMIT)
                if not any(await self._most(known is None or known.over)):
                    await self._regroup(complete=False)
            await self._step()
        return True

    def _has_agreed(self, members: Members) -> bool:
        return members.number >= self._agreed

    async def _step(self) -> None:
        has_all = confirmed = False
        group = self._group
        assert group is not None
        try:
            assert self.state == self.place.position, "a state that does not belong to its step"
            await group.gather(self, None, self._run.step_time(), column=True)
            has_all = True
            known = await group.gather(self, self._number_known)
            self._agreed = max(known.values())
            confirmed = True
        except Changed:
            pass
        complete, self._agreed = await self._most(confirmed, self._agreed)
        if not complete:
            await self._regroup(complete=has_all)
            return
        self._renewed = 0
        self._made()

    def _made(self) -> None:
        """Count a step, once its result is here."""
        self.state += 1
        self.place = Place(self.place.position + 1, True, False, True)
        self._run.made(self.place.position)

    @property
    def _number_known(self) -> int:
        return self._members.number if self._members is not None else -1

    # ---- its row

    async def _divide(self) -> None:
        """Connect to the other ranks of the row."""
        size, round_ = self._program.row, self._run.round
        if size == 1:
            return
        await self._ask(DivideMembers(round_, self.rank, self.attempt, size))
        row, group = self.rank // size, self._group

        def refused() -> bool | None:
            if group is not None and group.broken:
                raise InfrastructureError("A rank was lost while the program made its mesh.")
            reply = self._try(Meet(round_, self.attempt, 0, row=row))
            return None if reply is None else bool(reply.refused)

        self._row = self._run.replicas.group_of((-1, row, self.attempt), size)
        try:
            await self._row.enter(self, refused)
        except Changed:
            await self._lost()
        if group is not None and group.row != size:
            await self._regroup(complete=False)

    async def _most(self, *values: int) -> list[int]:
        """Return the greatest of each value among the ranks of the row."""
        if self._row is None:
            return list(values)
        try:
            found = await self._row.gather(self, values)
        except Changed:
            await self._lost()
        return [max(one) for one in zip(*found.values(), strict=True)]

    async def _lost(self) -> NoReturn:
        """Wait for the end of this process, since another one of its row has ended."""
        out = await self._wait(
            lambda m: m.over or m.attempts.get(self.rank) != self.attempt, NEWS_LIMIT
        )
        if out is not None:
            await asyncio.sleep(EXCLUDED_LIMIT)
        raise InfrastructureError(f"Rank {self.rank} has lost another rank of its row.")

    # ---- a new group

    async def _regroup(self, *, complete: bool) -> bool:
        """Form the group of the next membership; False if the training is over without this rank."""
        while True:
            members = await self._next_members()
            number, least = await self._most(members.number, -members.number)
            if number != -least:
                await self._wait(lambda m, number=number: m.number >= number, NEWS_LIMIT)  # type: ignore[misc]
                continue
            if self._group is not None:
                self._group.abandon()
                self._group = None
            if members.over:
                if self.place.usable and not complete:
                    raise AssertionError("the training is over without this rank's last step")
                if self.place.usable:
                    self._made()
                return self.place.usable
            self._last = self._number = members.number
            found = None
            with contextlib.suppress(Changed):
                found = await self._exchange(await self._enter(members), complete)
            if not any(await self._most(found is None)) and found is not None:
                self._regrouped(found, complete)
                return True

    async def _enter(self, members: Members) -> Group:
        def refused() -> bool | None:
            reply = self._try(Meet(members.round, members.number, checksum(members.attempts)))
            return None if reply is None else bool(reply.refused)

        key = (members.number, *itertools.chain(*sorted(members.attempts.items())))
        group = self._run.replicas.group_of(key, len(members.attempts), members.row)
        self._group = group
        await group.enter(self, refused)
        return group

    async def _next_members(self) -> Members:
        last = self._last
        members = await self._wait(lambda m: m.number > last, NEWS_LIMIT)
        if members is None:
            self._renewed += 1
            if self._renewed > RENEWALS:
                raise InfrastructureError(f"Rank {self.rank} cannot add up with the others.")
            await self._ask(RenewMembers(self._run.round, self.rank, self.attempt, last))
        elif self.rank not in members.attempts:
            await self._ask(JoinMembers(self._run.round, self.rank, self.attempt))
        mine = await self._wait(
            lambda m: m.number > last and m.attempts.get(self.rank) == self.attempt,
            EXCLUDED_LIMIT,
        )
        if mine is None:
            raise InfrastructureError(f"The job goes on without rank {self.rank}.")
        return mine

    async def _exchange(self, group: Group, complete: bool) -> Regrouped:
        places = await group.gather(self, self.place._replace(complete=complete))
        found = regroup(places, group.row)
        if found.joining:
            self._run.replicas.healing = found
            try:
                sent = await group.gather(self, self.state, self._program.delays.heal, column=True)
            finally:
                self._run.replicas.healing = None
            if self.rank in found.joining:
                self.state = sent[found.source + self.rank % group.row]
                assert self.state == found.top, "a state of another step"
            await group.gather(self, None)
        return found

    def _regrouped(self, found: Regrouped, complete: bool) -> None:
        """Go on where the group does."""
        behind = self.place.usable and self.place.position < found.top
        if self.rank in found.joining:
            self.place, behind = Place(found.top, True, False, self.place.settled), False
        if behind:
            assert complete
            assert found.top == self.place.position + 1, "ranks are more than a step apart"
            self._made()
        self.place = self.place._replace(settled=True)
        if self.rank in found.joining and self.attempt:
            self._run.replicas.healed += 1


class Replicas:
    """The ranks of one run."""

    def __init__(self, run: Run) -> None:
        self.ranks: dict[int, SimulatedRank] = {}
        """The latest process of each rank."""
        self.healed = 0
        """Ranks that have taken the others' state after they were started again."""
        self.healing: Regrouped | None = None
        """Who sends its state to whom now."""
        self._run = run
        self._groups: dict[tuple[int, ...], Group] = {}

    def start(self, node: SimulatedNode, local_rank: int, attempt: int) -> None:
        """Let a worker train that is up, if it is still to run."""
        machine = node.machine
        if node.workers.run is not self._run or not machine.awaits(
            self._run.round, local_rank, attempt
        ):
            return
        if local_rank in machine.again:
            return  # it is being ended
        known = self.ranks.get(node.first_rank + local_rank)
        if known is None or (known.node, known.attempt) != (node, attempt):
            rank = SimulatedRank(self._run, node, local_rank, attempt)
            self.ranks[rank.rank] = rank
            self._run.broken = False

    def tell(self, node: SimulatedNode, members: Members) -> None:
        """Pass on what a node's agent says to its workers."""
        for rank in self.ranks.values():
            if rank.node is node:
                rank.know(members)

    def kill(self, node: SimulatedNode, local_rank: int | None = None) -> None:
        """End one worker of a node, or all."""
        for rank in list(self.ranks.values()):
            if rank.node is node and local_rank in (None, rank.local_rank):
                rank.kill()
        self._run.broken = not any(rank.alive for rank in self.ranks.values())

    def group_of(self, key: tuple[int, ...], size: int, row: int = 1) -> Group:
        """Return the group of a membership or of a row's attempt; a broken one does not come back."""
        group = self._groups.get(key)
        if group is None:
            group = self._groups[key] = Group(self._run.program, size, row)
        return group
