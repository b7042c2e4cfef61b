"""What a job's processes ask its master: the requests of workers, which their agents relay in frames, and the store."""

from __future__ import annotations

import asyncio
import hmac
import logging
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any, NamedTuple, TypeAlias, TypeVar

import msgspec

from dlrover.embedding.machine.hot import HotServers
from dlrover.embedding.machine.placement import Placement
from dlrover.errors import DLRoverError, InfrastructureError, ProtocolError
from dlrover.master.journal.history import History
from dlrover.master.journal.journal import Entry
from dlrover.master.journal.writing import JournalWriter
from dlrover.master.machine import inputs
from dlrover.master.machine.cluster import TaskCluster
from dlrover.master.machine.job import JobMachine
from dlrover.master.machine.strategies import Strategies
from dlrover.master.meeting import Meeting
from dlrover.master.shards import ShardsService
from dlrover.master.streams import Heartbeats
from dlrover.rpc import messages, wire
from dlrover.rpc.batches import FRAME_BYTES
from dlrover.spec.events import HotServer, SlotsRestored
from dlrover.spec.node import CHIEF, FIRST_SERVER
from dlrover.spec.requests import Unanswered, WorkerReply, WorkerRequest
from dlrover.spec.requests.cluster import ClusterRequest, LookCluster
from dlrover.spec.requests.membership import (
    LookMembers,
    Meet,
    MembershipRequest,
    MembersNow,
)
from dlrover.spec.requests.placement import (
    NO_STEP,
    Abandon,
    Distribute,
    LookPlacement,
    MoveSlots,
    PlacementRequest,
    SlotsFetched,
    SlotsRecovered,
    SlotsUsed,
)
from dlrover.spec.requests.shards import LookShards, ShardRequest
from dlrover.spec.requests.strategies import ChooseStrategy, StrategyRequest

logger = logging.getLogger(__name__)

WINDOW = 0.001
"""Seconds that the first request waits for as many as the last commit had."""
ALONE = 3
"""Consecutive lone requests after which the next one does not wait."""

Reply = TypeVar("Reply")
Begun: TypeAlias = WorkerReply | asyncio.Future[WorkerReply]
"""A reply, at once or to come."""


class Services:
    """The machines that a replay of the requests in the journal restores."""

    def __init__(self, machine: JobMachine, history: History) -> None:
        self.shards = ShardsService(history.add)
        self.placement = Placement()
        self.cluster = TaskCluster()
        self.strategies = Strategies()
        self._machine = machine
        self._history = history
        self._secret = b""

    def use_token(self, token: str) -> None:
        """Derive the secret of embedding servers and their clients from the job's token."""
        self._secret = hmac.digest(token.encode(), b"embedding", "sha256")

    def answer(self, request: WorkerRequest, now: float) -> WorkerReply:
        """Answer a request that is in the journal or changes nothing; one that fails is refused alone."""
        try:
            if isinstance(request, PlacementRequest):
                return self._placed(request, now)
            if isinstance(request, ClusterRequest):
                return self._clustered(request)
            if isinstance(request, StrategyRequest):
                return self._strategy(request, now)
        except ProtocolError as error:
            return Unanswered(refused=str(error))
        assert isinstance(request, ShardRequest)
        return self.shards.handle(request, now)

    def _placed(self, request: PlacementRequest, now: float) -> WorkerReply:
        try:
            before = self.placement.version
            reply = self.placement.handle(request)
            is_new = self.placement.version > before  # it may have come before
            if isinstance(request, MoveSlots):
                hot = request.server, request.ratio, request.expected, len(request.moves)
                self._history.add(HotServer(*hot), now)
            if isinstance(request, SlotsRecovered | SlotsFetched) and request.restored and is_new:
                step = None if request.step == NO_STEP else request.step
                self._history.add(SlotsRestored(request.server, request.restored, step), now)
        except ProtocolError:
            raise
        except Exception as error:
            logger.exception("The master cannot handle a request of a server: %.1000r", request)
            return Unanswered(refused=f"The master cannot handle the request: {error!r}.")
        return msgspec.structs.replace(reply, secret=self._secret)

    def _clustered(self, request: ClusterRequest) -> WorkerReply:
        reply = self.cluster.handle(request)
        wanted = {role: of_role.nodes for role, of_role in self._machine.scaling.roles.items()}
        wanted[CHIEF] = int(self._machine.job.chief)
        return msgspec.structs.replace(reply, wanted=wanted)

    def _strategy(self, request: StrategyRequest, now: float) -> WorkerReply:
        reply, event = self.strategies.handle(request)
        if event is not None:
            self._history.add(event, now)
        return reply


class _Uncommitted(NamedTuple):
    entry: Entry
    handle: Callable[[float], Any]
    reply: asyncio.Future[Any]


class Commits:
    """Group commit of requests, which are journalled and then handled in the same order: replies are durable.

    Those that arrive at about the same time are journalled in one transaction: one per request would cost a busy
    master more than all its other work for the request. ``append`` adds entries to the journal, all or none,
    at a time in seconds, which ``clock`` returns.
    """

    def __init__(
        self, append: Callable[[Sequence[Entry], float], None], clock: Callable[[], float]
    ) -> None:
        self._append = append
        self._clock = clock
        self._waiting: list[_Uncommitted] = []
        self._alone = 0
        self._usual = 0
        self._timer: asyncio.Handle | None = None

    async def commit(self, entry: Entry, handle: Callable[[float], Reply]) -> Reply:
        """Journal a request, then return the result of ``handle``, called with the time of its entry.

        A request whose caller leaves before that is dropped.

        Raises:
            InfrastructureError: the journal cannot be written; nothing was handled.
        """
        return await self.begin(entry, handle)

    def begin(self, entry: Entry, handle: Callable[[float], Reply]) -> asyncio.Future[Reply]:
        """Begin what `commit` waits for; return its result to come."""
        loop = asyncio.get_running_loop()
        if not self._waiting:
            self._timer = loop.call_later(WINDOW if self._alone < ALONE else 0.0, self._commit)
        reply: asyncio.Future[Reply] = loop.create_future()
        self._waiting.append(_Uncommitted(entry, handle, reply))
        if len(self._waiting) == self._usual and self._timer is not None:
            self._timer.cancel()
            self._timer = loop.call_soon(self._commit)
        return reply

    def _commit(self) -> None:
        waiting = [each for each in self._waiting if not each.reply.cancelled()]
        self._waiting = []
        self._alone = self._alone + 1 if len(waiting) == 1 else 0
        self._usual = max(2, len(waiting))
        if not waiting:
            return
        now = self._clock()
        try:
            self._append([each.entry for each in waiting], now)
        except DLRoverError as error:
            for each in waiting:
                each.reply.set_exception(error)
            return
        for each in waiting:
            _reply(each, now)


def _reply(to: _Uncommitted, now: float) -> None:
    try:
        to.reply.set_result(to.handle(now))
    except Exception as error:  # noqa: BLE001 - it is raised in the caller
        to.reply.set_exception(error)


class Requests:
    """Answers the processes of one job.

    Args:
        services: the machines that answer.
        machine: the job; read only.
        journal: has each request that changes anything before its answer.
        heartbeats: how far the training is.
        submit: journals and handles an input that is judged by the latest steps.
        clock: returns the time in seconds.
    """

    def __init__(
        self,
        services: Services,
        machine: JobMachine,
        journal: JournalWriter,
        heartbeats: Heartbeats,
        submit: Callable[[inputs.Input], None],
        clock: Callable[[], float],
    ) -> None:
        self.meeting = Meeting()
        self._services = services
        self._machine = machine
        self._journal = journal
        self._commits = Commits(journal.append, clock)
        self._heartbeats = heartbeats
        self._submit = submit
        self._clock = clock
        self._dealing: set[asyncio.Task[object]] = set()
        self._hot = HotServers()

    async def deal(
        self, frames: AsyncIterator[messages.RequestFrame]
    ) -> AsyncIterator[messages.RequestFrame]:
        """Serve the requests of an agent's workers, one frame at a time."""
        task = asyncio.current_task()
        assert task is not None
        self._dealing.add(task)
        try:
            async for frame in frames:
                for replies in await self._answers(frame):
                    yield replies
        finally:
            self._dealing.discard(task)

    def close(self) -> None:
        """End all streams before the master exits."""
        for dealing in self._dealing:
            dealing.cancel()

    async def _answers(self, frame: messages.RequestFrame) -> list[messages.RequestFrame]:
        """Return the replies to a frame's requests, in as many frames as their sizes need.

        All requests of a frame begin before the first one is waited for, so that the journal gets them together.
        A request that cannot be read, or whose reply is an error, fails alone.
        """
        begun = [(number, self._read(body)) for number, body in frame.records]
        frames: list[list[messages.Record]] = [[]]
        size = 0
        for number, reply in begun:
            body = wire.encode(await _outcome(reply))
            size += len(body)
            if frames[-1] and size > FRAME_BYTES:
                frames.append([])
                size = len(body)
            frames[-1].append(messages.Record(number, body))
        return [messages.RequestFrame(tuple(records)) for records in frames]

    def _read(self, body: bytes) -> Begun:
        try:
            return self.begin(wire.decode(body, WorkerRequest))
        except ProtocolError as error:
            return Unanswered(refused=f"The master did not understand a message: {error}")

    async def use(self, request: WorkerRequest) -> WorkerReply:
        """Answer a worker's request, once it is in the journal if it changes anything."""
        reply = self.begin(request)
        return await reply if isinstance(reply, asyncio.Future) else reply

    def begin(self, request: WorkerRequest) -> Begun:
        """Begin what `use` waits for."""
        services = self._services
        if self._machine.outcome is not None:
            return Unanswered(refused="The job has ended.", ended=True)
        if isinstance(request, MembershipRequest):
            return self._members(request)
        if isinstance(request, SlotsUsed):
            changes = self._first() or self._loss() or self._relief(request)
            request = changes or LookPlacement(request.known)
        if isinstance(request, LookShards | LookPlacement | LookCluster):
            return services.answer(request, self._clock())
        if isinstance(request, ChooseStrategy):
            if services.strategies.has_chosen(request):
                return services.answer(request, self._clock())
            left = self._heartbeats.activities.latest_seconds_left()
            request = msgspec.structs.replace(request, seconds_left=left)
        return self._commits.begin(request, lambda now: services.answer(request, now))

    def _first(self) -> Distribute | None:
        """Return that no more embedding servers are wanted than have started, if none has slots yet."""
        placement, wanted = self._services.placement, self._machine.scaling.servers
        enough = not placement.owners and 0 < wanted <= len(placement.servers)
        return Distribute(wanted) if enough else None

    def _loss(self) -> Abandon | None:
        """Return an embedding server that has ended, that no other replaces, and that still has slots."""
        scaling, nodes = self._machine.scaling, self._machine.nodes.values()
        for index, server in self._services.placement.servers.items():
            rank = FIRST_SERVER + index
            there = any(node.node_rank == rank and not node.status.final for node in nodes)
            if not (server.lost or there or scaling.wants(rank)):
                return Abandon(index, server.start)
        return None

    def _relief(self, used: SlotsUsed) -> MoveSlots | None:
        """Return the moves that a report leads to: they are in the journal, and what was measured is not."""
        limits, placement = self._machine.job.limits, self._services.placement
        ratio, window = limits.hot_server_ratio, limits.hot_server_window
        return self._hot.handle(used, placement, self._clock(), ratio, window)

    def _members(self, request: MembershipRequest) -> WorkerReply:
        membership, latest = self._machine.state.membership, self._heartbeats.activities
        if request.round > self._machine.rendezvous.last_round:
            return Unanswered(away=f"The master's journal has lost round {request.round}.")
        if isinstance(request, Meet):
            return self.meeting.handle(request, self._journal.epoch, membership)
        if not isinstance(request, LookMembers):
            try:
                self._submit(inputs.MemberReported(request))
            except InfrastructureError as error:
                return Unanswered(away=f"The master failed: {error}")
        steps = self._machine.progress.steps
        if latest.round == membership.round:
            steps = max(steps, latest.steps)
        now = membership.members(steps)
        return MembersNow(now if request.round == membership.round else None)


async def _outcome(reply: Begun) -> WorkerReply:
    if not isinstance(reply, asyncio.Future):
        return reply
    try:
        return await reply
    except InfrastructureError as error:
        return Unanswered(away=f"The master failed: {error}")
    except DLRoverError as error:
        return Unanswered(refused=str(error))
