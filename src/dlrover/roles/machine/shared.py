"""What the processes of a job share: members, queues, weights and cursors, as one state machine."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TypeAlias

from msgspec.structs import replace

from dlrover.errors import ProtocolError
from dlrover.roles.machine.members import RoleMembers
from dlrover.roles.machine.queues import Queues
from dlrover.roles.machine.versions import MAX_NAMES, PublishedWeights
from dlrover.roles.messages import (
    LIVE,
    AckItems,
    Agreed,
    CursorIs,
    GetItems,
    JobView,
    JoinRole,
    LeasedItems,
    LookCursor,
    LookQueue,
    MemberEnded,
    MemberPlace,
    MemberStarted,
    MemberView,
    OpenQueue,
    PublishedAs,
    PublishPart,
    PutItems,
    Resumed,
    RoleInput,
    RoleReply,
    RoleRequest,
    RoleView,
    ServiceStatus,
    SetCursor,
    UseVersion,
    Version,
    VersionView,
    weights_in_words,
)

Key: TypeAlias = tuple[str, int]
"""Role and index of an instance."""


@dataclass
class SharedState:
    """State of one job's roles as their processes see it. Only `handle` changes it."""

    members: RoleMembers = field(default_factory=RoleMembers)
    queues: Queues = field(default_factory=Queues)
    weights: dict[str, PublishedWeights] = field(default_factory=dict)
    cursors: dict[Key, bytes] = field(default_factory=dict)
    """Kept for ever: the next life of an instance goes on from it."""
    resumed: dict[str, tuple[int, int, int]] = field(default_factory=dict)
    """The last return of each source to a step: attempt, round, and number within that life."""
    readers: dict[str, set[str]] = field(default_factory=dict)
    """Names of the weights that each role works with."""
    admitted: dict[Key, set[str]] = field(default_factory=dict)
    """Names of the weights whose current version each instance has had; it is stale for others."""

    def validate(self) -> None:
        """Check the invariants."""
        self.members.validate()
        self.queues.validate()
        for weights in self.weights.values():
            weights.validate()
        for key, names in self.admitted.items():
            member = self.members.get(*key)
            assert not names or (member is not None and not self.members.is_over(member.place))
            for name in names:
                assert member is not None
                assert self.weights[name].view().valid(member.using[name])
        for members in self.members.roles.values():
            for member in members.values():
                assert member.serving == self._serves(member), member
        for queue in self.queues.queues.values():
            for place in queue.leases.values():
                self.members.check(place)

    # ---- what may wait

    def ready(self, request: RoleRequest) -> bool:
        """Return whether a request would be answered now with what it asks for, or be refused."""
        match request:
            case PutItems() if request.queue in self.queues.queues:
                return self.queues.get(request.queue).has_room(request)
            case GetItems() if request.queue in self.queues.queues:
                return self.queues.get(request.queue).has_items(request)
        return True

    # ---- inputs

    def handle(self, event: RoleInput | RoleRequest) -> RoleReply:
        """Handle an input and return the reply to it.

        Raises:
            ProtocolError: It contradicts the known state; nothing has changed.
        """
        match event:
            case MemberStarted() | MemberEnded() | JoinRole():
                for place in self.members.handle(event):
                    self._release(place)
            case _:
                self.members.check(event.place)
                return self._ask(event)
        self._admit()
        return Agreed()

    def _ask(self, event: RoleRequest) -> RoleReply:
        match event:
            case OpenQueue():
                self.queues.open(event)
            case PutItems():
                if len(event.items) > (size := self.queues.get(event.queue).size):
                    raise ProtocolError(
                        f"{len(event.items)} items were put at once into the queue {event.queue}; its size is {size}."
                    )
                self.queues.get(event.queue).put(event)
                self._set_cursor(event.place, event.cursor)
            case GetItems():
                return LeasedItems(self.queues.get(event.queue).get(event))
            case AckItems():
                source = self.members.source(event.place)
                self.queues.get(event.queue).check_ack(event, source)
                self.queues.get(event.queue).ack(event, source)
                self._set_cursor(event.place, event.cursor)
            case SetCursor():
                self._set_cursor(event.place, event.cursor)
            case LookCursor():
                return CursorIs(self.cursors.get((event.place.role, event.place.index)))
            case LookQueue():
                return self.queues.get(event.queue).status()
            case PublishPart():
                version = self._publish(event)
                self._admit()
                return PublishedAs(version)
            case _:
                self._ask_about_weights(event)
        return Agreed()

    def _ask_about_weights(self, event: RoleRequest) -> None:
        match event:
            case Resumed():
                self._roll_back(event)
            case UseVersion():
                self._use(event)
        self._admit()

    def _set_cursor(self, place: MemberPlace, cursor: bytes | None) -> None:
        if cursor is not None:
            self.cursors[place.role, place.index] = cursor

    def _release(self, place: MemberPlace) -> None:
        """Let others have what a life held. One that may come back keeps its place in queues, and its weights."""
        over = self.members.is_over(place)
        for queue in self.queues.queues.values():
            queue.release(place)
            if over:
                queue.forget(place)
        if not over:
            return
        for weights in self.weights.values():
            weights.release(place)
        self.admitted.pop((place.role, place.index), None)

    def _roll_back(self, event: Resumed) -> None:
        """Undo what a source has published and learned after a step; other sources keep theirs."""
        source, which = self.members.source(event.place), (*event.place.life, event.count)
        if which <= self.resumed.get(source, (-1, 0, 0)):
            return
        self.resumed[source] = which
        for weights in self.weights.values():
            if source in weights.sources:
                weights.roll_back(event.step, event.place)
        for queue in self.queues.queues.values():
            queue.roll_back(source, event.step)

    def _publish(self, event: PublishPart) -> Version:
        self.members.check(event.holder)
        known = self.weights.get(event.name)
        if known is None:
            if len(self.weights) >= MAX_NAMES:
                raise ProtocolError(
                    f"The job has {MAX_NAMES} named weights; {event.name} is one more."
                )
            known = PublishedWeights(event.place.role)
        version = known.publish(event, self.members.source(event.place))
        self.weights[event.name] = known
        return version

    # ---- who serves

    def _use(self, event: UseVersion) -> None:
        self.readers.setdefault(event.place.role, set()).add(event.name)
        member = self.members.get(event.place.role, event.place.index)
        if event.version is None or member is None:
            return
        weights = self.weights.get(event.name)
        if weights is None or event.version > (weights.newest or event.version):
            raise ProtocolError(
                f"The {weights_in_words(event.name)} have no version {event.version}."
            )
        self.members.update(replace(member, using={**member.using, event.name: event.version}))
        if event.version == weights.current:
            self.admitted.setdefault((event.place.role, event.place.index), set()).add(event.name)

    def _stale(self, member: MemberView) -> set[str]:
        """Return the names of weights for which a member has no version that counts."""
        key = (member.place.role, member.place.index)
        names = set()
        for name in self.readers.get(member.place.role, ()):
            weights = self.weights.get(name)
            if weights is None or weights.role == member.place.role or not weights.began:
                continue
            if name not in self.admitted.get(key, ()):
                names.add(name)
        return names

    def _serves(self, member: MemberView) -> bool:
        return member.state == LIVE and not self._stale(member)

    def _admit(self) -> None:
        """Bring up to date who serves, after anything that may have changed it."""
        for role, members in list(self.members.roles.items()):
            for index, member in list(members.items()):
                names = self.admitted.get((role, index), set())
                names -= {
                    name
                    for name in names
                    if not self.weights[name].view().valid(member.using[name])
                }
                serves = self._serves(member)
                if member.serving != serves:
                    self.members.update(replace(member, serving=serves))

    # ---- views

    def current(self) -> dict[str, VersionView]:
        """Return the current version of all weights that have one."""
        views = {name: weights.view().versions for name, weights in self.weights.items()}
        return {name: versions[-1] for name, versions in views.items() if versions}

    def view(self, number: int) -> JobView:
        """Return the job as its processes see it."""
        return JobView(
            number,
            {
                role: RoleView(
                    self.members.epochs[role],
                    tuple(members[i] for i in sorted(members)),
                    self.members.instances.get(role, 0),
                )
                for role, members in self.members.roles.items()
            },
            {name: weights.view() for name, weights in self.weights.items()},
        )

    def status(self) -> ServiceStatus:
        """Return the job as people see it."""
        view = self.view(0)
        queues = {name: queue.status() for name, queue in self.queues.queues.items()}
        return ServiceStatus(view.roles, view.weights, queues)
