"""The service that the processes of roles talk to; the job's coordinator runs it on its server.

Each input is journalled before it takes effect: a coordinator that reads the journal again has the same state, and
no process notices that it was another one, but for the time in which it was away. Once the inputs are large, one entry
with the state replaces them: items that are done cost no room.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable, Iterable, Mapping
from typing import NamedTuple, Protocol

import msgspec

from dlrover._util import decoding, tasks
from dlrover.errors import InfrastructureError, ProtocolError
from dlrover.roles.machine.members import RoleMembers
from dlrover.roles.machine.shared import SharedState
from dlrover.roles.messages import (
    ENDED,
    HOLDER,
    MAX_TEXT,
    AckItems,
    GetItems,
    JobView,
    JoinRole,
    Later,
    LookCursor,
    LookQueue,
    MemberEnded,
    MemberPlace,
    MemberStarted,
    PublishedAs,
    PutItems,
    RoleInput,
    RoleReply,
    RoleRequest,
    SetCursor,
    Turned,
    VersionView,
    WatchJob,
)
from dlrover.rpc.server import Server

logger = logging.getLogger(__name__)

CONNECTION_GRACE = 3.0
"""Seconds without a connection after which a process counts as ended, if no one has reported its end."""
RECOVERY_GRACE = 30.0
"""The same after the start of a coordinator: processes look for it at intervals."""
COMPACT = 64 << 20
"""Least bytes of inputs that one entry with the state replaces; of a larger state, at least as many as it has."""
MAX_STATE = 512 << 20
"""Maximum bytes of such an entry."""
OF_LIVES = MemberStarted, MemberEnded, JoinRole
"""Inputs that end lives, and with them what these held."""


class ServiceState(msgspec.Struct, frozen=True, array_like=True, tag="state"):
    """All that the service knows: what it replaces in the journal is not needed any more."""

    shared: SharedState
    view: int
    """Number of the latest view."""


_decoder = decoding.msgpack_decoder(RoleInput | ServiceState)


class Loss(NamedTuple):
    """The end of processes that kept weights, and the current versions that they took with them."""

    keepers: tuple[MemberPlace, ...]
    """Lives that are over."""
    reason: str
    """Why they are; empty if unknown."""
    lost: dict[str, str]
    """The versions, by the names of the weights."""
    left: dict[str, str]
    """The version of each that is current now, if there is one."""


class RoleJournal(Protocol):
    """Where the service keeps its inputs."""

    def append(self, entry: bytes, now: float) -> None:
        """Add an entry. When this returns, it outlives this process.

        Raises:
            InfrastructureError: It was not added.
        """

    def replace(self, entry: bytes, now: float) -> None:
        """Put an entry in the place of all others, or raise the same error."""


class RolesService:
    """Members, queues and weights of one job. All methods run on one event loop.

    Args:
        journal: Takes each input before it takes effect.
        entries: What an earlier coordinator's journal holds, oldest first.
        worlds: Roles whose instances start together, as those of an elastic role.
        clock: Seconds; for the journal only.
    """

    def __init__(
        self,
        journal: RoleJournal,
        entries: Iterable[bytes] = (),
        worlds: Iterable[str] = (),
        clock: Callable[[], float] = time.time,
    ) -> None:
        self.shared = SharedState(RoleMembers(frozenset(worlds)))
        self._journal, self._clock = journal, clock
        self._view = JobView()
        self._changed = asyncio.Event()
        """Set when a queue has changed, and replaced by another one."""
        self._view_changed = asyncio.Event()
        """The same for what views show."""
        self._watched: dict[MemberPlace, int] = {}
        self._timers: dict[MemberPlace, asyncio.TimerHandle] = {}
        self._closed = False
        self.on_loss: Callable[[Loss], None] = lambda _: None
        """Called when the job's keeper of weights has ended, or current versions are lost with other processes."""
        self._grown, self._limit = 0, COMPACT
        """Bytes of the inputs since the last entry with the state, and with how many the next one comes."""
        number = 0
        for entry in entries:
            number = self._replay(entry, number)
        self._view = JobView(number)
        self._renew_view()

    def _replay(self, entry: bytes, number: int) -> int:
        """Take in an entry after which no earlier coordinator had a view above the returned number."""
        found = _decoder.decode(entry)
        if isinstance(found, ServiceState):
            self.shared, self._grown, self._limit = found.shared, 0, max(COMPACT, len(entry))
            return found.view
        self._grown += len(entry)
        try:
            self.shared.handle(found)
        except ProtocolError as error:  # it was refused the first time, too
            logger.debug("Refused again: %s", error)
        return number + 1  # each input makes at most one view

    # ---- for the coordinator

    def register(self, server: Server) -> None:
        """Register the methods; call `begin` once the server listens."""
        server.unary("RoleAsk", RoleRequest, self._ask)
        server.server_stream("RoleWatch", WatchJob, self._watch)

    def begin(self) -> None:
        """Wait from now on for the processes that the journal knows."""
        for members in self.shared.members.roles.values():
            for member in members.values():
                if member.pid and member.state != ENDED and member.place not in self._watched:
                    self._miss(member.place, RECOVERY_GRACE)

    def tell(self, event: MemberStarted | MemberEnded) -> None:
        """Note that a life of an instance begins or has ended; whoever called it gets the reason.

        Raises:
            DLRoverError: A later life is known, or the journal takes nothing now.
        """
        if isinstance(event, MemberEnded):
            event = msgspec.structs.replace(event, reason=event.reason[:MAX_TEXT])
        self._submit(event)

    def close(self) -> None:
        """End the calls that wait, and forget all timers."""
        self._closed = True
        self._changed.set()
        self._view_changed.set()
        for timer in self._timers.values():
            timer.cancel()
        self._timers.clear()

    # ---- inputs

    def _submit(self, event: RoleInput) -> RoleReply:
        """Journal an input, and handle it.

        Raises:
            ProtocolError: It contradicts the known state.
            InfrastructureError: It could not be journalled; nothing has changed.
        """
        entry = msgspec.msgpack.encode(event)
        self._journal.append(entry, self._clock())
        before = self.shared.current() if isinstance(event, OF_LIVES) else {}
        keeper = self._ends_keeper(event)
        try:
            return self.shared.handle(event)
        finally:
            self._tell(event)
            self._note_loss(event, before, keeper)
            self._grown += len(entry)
            if self._grown > self._limit:
                self._compact()

    def _ends_keeper(self, event: RoleInput) -> bool:
        """Return whether an input ends the job's keeper of weights, which has not ended before."""
        ends = isinstance(event, MemberEnded) and event.final and event.place.role == HOLDER
        return ends and not self.shared.members.is_over(event.place)

    def _note_loss(
        self, event: RoleInput, before: Mapping[str, VersionView], ends_keeper: bool
    ) -> None:
        """Report which of the current versions before an input are gone, and each end of the job's keeper."""
        now = self.shared.current()
        gone = {
            name: view
            for name, view in before.items()
            if view.version not in self.shared.weights[name].complete
        }
        holders = {part.holder for view in gone.values() for part in view.parts}
        if ends_keeper:
            holders.add(event.place)
        if holders:
            over = tuple(sorted(filter(self.shared.members.is_over, holders)))
            reason = event.reason if isinstance(event, MemberEnded) else ""
            lost = {name: str(view.version) for name, view in gone.items()}
            left = {name: str(now[name].version) for name in gone if name in now}
            self.on_loss(Loss(over, reason, lost, left))

    def _compact(self) -> None:
        """Have one entry with the state replace all inputs, if that is possible now."""
        state = msgspec.msgpack.encode(ServiceState(self.shared, self._view.number))
        self._grown, self._limit = 0, max(COMPACT, len(state))
        try:
            if len(state) <= MAX_STATE:
                self._journal.replace(state, self._clock())
        except InfrastructureError as error:  # it is tried again after as many inputs
            logger.warning("The journal stays as long as it is: %s", error)

    def _tell(self, event: RoleInput) -> None:
        """Wake whoever waits for what an input has changed."""
        if not isinstance(event, PutItems | GetItems | AckItems | SetCursor):
            self._renew_view()
        if not isinstance(event, SetCursor):  # leases of lost members, too, come back to a queue
            self._changed.set()
            self._changed = asyncio.Event()

    def _renew_view(self) -> None:
        view = self.shared.view(self._view.number)
        if view != self._view:
            self._view = msgspec.structs.replace(view, number=view.number + 1)
            self._view_changed.set()
            self._view_changed = asyncio.Event()

    async def _ask(self, request: RoleRequest) -> RoleReply:
        """Answer a request; it waits for what it asks for as long as it says."""
        try:
            self._check_connected(request)
            self._check_alone(request)
            if isinstance(request, LookCursor | LookQueue):
                return self.shared.handle(request)
            if not await self._comes_true(request):
                return Later()
            return self._replied(self._submit(request))
        except ProtocolError as error:
            return Turned(str(error))
        except msgspec.MsgspecError as error:
            return Turned(f"The request cannot be handled: {error}.")

    def _check_connected(self, request: RoleRequest) -> None:
        """Have a process that lost its connection ask again once it has joined again; the same for a holder.

        Raises:
            InfrastructureError: It has not yet.
        """
        for place in (request.place, getattr(request, "holder", request.place)):
            if not isinstance(request, JoinRole) and self.shared.members.is_away(place):
                raise InfrastructureError(f"{place} has lost its connection and joins again.")

    def _check_alone(self, request: RoleRequest) -> None:
        """Refuse a process that takes the place of another one, which is connected.

        Raises:
            ProtocolError: It does.
        """
        place = request.place
        known = self.shared.members.get(place.role, place.index)
        if not isinstance(request, JoinRole) or known is None or known.place != place:
            return
        same = (known.pid, known.address.machine) == (request.pid, request.address.machine)
        if place in self._watched and not same:
            raise ProtocolError(
                f"Process {request.pid} wants the place of {place}, which process {known.pid} has: of the processes that"
                " an instance starts, only one may join the job."
            )

    def _replied(self, reply: RoleReply) -> RoleReply:
        if isinstance(reply, PublishedAs):
            return msgspec.structs.replace(reply, view=self._view.number)
        return reply

    async def _comes_true(self, request: RoleRequest) -> bool:
        loop = asyncio.get_running_loop()
        until = loop.time() + getattr(request, "wait", 0.0)
        while not self.shared.ready(request):
            changed = self._changed
            if not await tasks.signalled(changed, until - loop.time()):
                return self.shared.ready(request)
            if self._closed:
                return False
        return True

    # ---- views

    async def _watch(self, request: WatchJob) -> AsyncIterator[JobView]:
        """Yield the job whenever it has changed."""
        place = request.place
        self._watched[place] = self._watched.get(place, 0) + 1
        if (timer := self._timers.pop(place, None)) is not None:
            timer.cancel()
        try:
            while not self._closed:
                changed = self._view_changed
                yield self._view
                await changed.wait()
        finally:
            self._watched[place] -= 1
            if not self._watched[place]:
                del self._watched[place]
                self._miss(place, CONNECTION_GRACE)

    def _miss(self, place: MemberPlace, grace: float) -> None:
        """Let a process that has lost its connection count as ended after a while."""
        member = self.shared.members.get(place.role, place.index)
        if member is None or member.place != place or member.state == ENDED:
            return
        loop = asyncio.get_running_loop()
        self._timers[place] = loop.call_later(grace, self._give_up, place)

    def _give_up(self, place: MemberPlace) -> None:
        self._timers.pop(place, None)
        if place in self._watched:
            return
        logger.warning("%s has lost its connection", place)
        try:
            self._submit(MemberEnded(place, "its connection has ended", final=False))
        except InfrastructureError as error:
            logger.warning("Not noted yet: %s", error)
            self._miss(place, CONNECTION_GRACE)
