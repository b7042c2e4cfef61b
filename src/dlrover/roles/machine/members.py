"""Members of roles: which life of each instance counts, and where it takes calls."""

from __future__ import annotations

from dataclasses import dataclass, field

from msgspec.structs import replace

from dlrover.errors import ProtocolError
from dlrover.roles.messages import (
    ENDED,
    LIVE,
    STARTING,
    JoinRole,
    MemberEnded,
    MemberPlace,
    MemberStarted,
    MemberView,
)


@dataclass
class RoleMembers:
    """All instances of all roles. Only `handle` changes them."""

    worlds: frozenset[str] = frozenset()
    """Roles whose instances start together: a new life of one ends the earlier lives of all."""
    roles: dict[str, dict[int, MemberView]] = field(default_factory=dict)
    """The latest life of each instance; a life never follows a later one."""
    epochs: dict[str, int] = field(default_factory=dict)
    """Number of changes of each role's members."""
    instances: dict[str, int] = field(default_factory=dict)
    """Wanted instances of each role, as the latest that joined knows it."""
    final: set[MemberPlace] = field(default_factory=set)
    """Latest lives that have ended for good."""

    def handle(self, event: MemberStarted | MemberEnded | JoinRole) -> list[MemberPlace]:
        """Handle an input; return the lives that are over by it.

        Raises:
            ProtocolError: The life is over; nothing has changed.
        """
        if isinstance(event, MemberStarted):
            over = self._started(event.place)
        elif isinstance(event, JoinRole):
            over = self._join(event)
        else:
            over = self._ended(event)
        return over + self._end_earlier(event.place)

    def validate(self) -> None:
        """Check the invariants."""
        for role, members in self.roles.items():
            assert members
            assert self.epochs[role] > 0
            for index, member in members.items():
                assert (member.place.role, member.place.index) == (role, index)
                assert member.state != LIVE or (member.pid and member.address.port)
        for role in self.worlds & self.roles.keys():
            lives = [member.place for member in self.roles[role].values()]
            last = max(place.life for place in lives)
            assert all(place.life == last or place in self.final for place in lives)
        for place in self.final:
            assert self.roles[place.role][place.index].state == ENDED
            assert self.roles[place.role][place.index].place == place

    def get(self, role: str, index: int) -> MemberView | None:
        """Return the latest life of an instance."""
        return self.roles.get(role, {}).get(index)

    def check(self, place: MemberPlace) -> None:
        """Refuse what comes from a life that is over.

        Raises:
            ProtocolError: It is, or it never began.
        """
        member = self.get(place.role, place.index)
        if member is not None and (member.place.life > place.life or member.state == ENDED):
            raise ProtocolError(_over(place, self._later(place) or member))
        if member is None or member.place != place or not member.pid:
            raise ProtocolError(f"{place} has not joined the job.")

    def source(self, place: MemberPlace) -> str:
        """Name who goes back to a step as one: the role of a world, and each instance of any other role."""
        return place.role if place.role in self.worlds else str(place)

    def is_over(self, place: MemberPlace) -> bool:
        """Return whether a life has ended for good; one that only lost its connection has not."""
        member = self.get(place.role, place.index)
        return member is None or member.place != place or place in self.final

    def is_away(self, place: MemberPlace) -> bool:
        """Return whether a life has lost its connection and may join again."""
        member = self.get(place.role, place.index)
        return member is not None and member.state == ENDED and not self.is_over(place)

    def update(self, member: MemberView) -> None:
        """Put a member in the place of the same life, or of an earlier one of the instance."""
        place = member.place
        known = self.get(place.role, place.index)
        if known == member:
            return
        if known is not None and known.place != place:
            self.final.discard(known.place)
        self.roles.setdefault(place.role, {})[place.index] = member
        self.epochs[place.role] = self.epochs.get(place.role, 0) + 1

    def _later(self, place: MemberPlace) -> MemberView | None:
        """Return an instance whose life ends a given one: of the same instance, or of the same world."""
        members = self.roles.get(place.role, {})
        same = members.values() if place.role in self.worlds else [members.get(place.index)]
        return next((one for one in same if one is not None and one.place.life > place.life), None)

    def _end_earlier(self, place: MemberPlace) -> list[MemberPlace]:
        """End the lives in a world that are earlier than a given one; the coordinator may still say why."""
        over = []
        for member in list(
            self.roles.get(place.role, {}).values() if place.role in self.worlds else ()
        ):
            if member.place.life < place.life and member.place not in self.final:
                reason = member.reason if member.state == ENDED else ""
                self.update(MemberView(member.place, ENDED, reason=reason))
                self.final.add(member.place)
                over.append(member.place)
        return over

    def _started(self, place: MemberPlace) -> list[MemberPlace]:
        later = self._later(place)
        if later is not None:
            if later.place.attempt == place.attempt:
                return []  # it has started its workers anew since
            raise ProtocolError(_over(place, later))
        known = self.get(place.role, place.index)
        if known is not None and known.place == place:
            return []
        self.update(MemberView(place, STARTING, reason=known.reason if known is not None else ""))
        return [known.place] if known is not None else []

    def _join(self, event: JoinRole) -> list[MemberPlace]:
        place = event.place
        known = self.get(place.role, place.index)
        if (later := self._later(place)) is not None:
            raise ProtocolError(_over(place, later))
        if known is not None and place in self.final:
            raise ProtocolError(_over(place, known))
        over = [known.place] if known is not None and known.place != place else []
        using = known.using if known is not None and known.place == place else {}
        reason = known.reason if known is not None else ""
        self.instances[place.role] = event.instances
        self.update(
            MemberView(
                place,
                LIVE if event.ready else STARTING,
                address=event.address,
                methods=event.methods,
                using=using,
                reason=reason,
                pid=event.pid,
            )
        )
        return over

    def _ended(self, event: MemberEnded) -> list[MemberPlace]:
        known = self.get(event.place.role, event.place.index)
        place = event.place
        if known is not None and known.place == place and known.state == ENDED:
            if event.final and (place not in self.final or not known.reason):  # now it is known why
                self.final.add(place)
                self.update(MemberView(place, ENDED, reason=event.reason or known.reason))
                return [place]
            return []
        if self._later(place) is not None:
            return []
        if known is not None and known.place == place and not event.final:  # it may come back
            self.update(replace(known, state=ENDED, serving=False, reason=event.reason))
        else:
            self.update(MemberView(place, ENDED, reason=event.reason))
        if event.final:
            self.final.add(place)
        over = [place]
        if known is not None and known.place != place:
            over.append(known.place)
        return over


def _over(place: MemberPlace, known: MemberView) -> str:
    why = f" ({known.reason})" if known.reason else ""
    later = "it has ended"
    if known.place.attempt != place.attempt:
        later = f"attempt {known.place.attempt} has taken its place"
    elif known.place.round != place.round:
        later = f"round {known.place.round} of the attempt has begun"
    return f"Attempt {place.attempt} of {place} is over: {later}{why}."
