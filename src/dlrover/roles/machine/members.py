"""Members of roles: which life of each instance counts, and where it takes calls."""

from __future__ import annotations

from dataclasses import dataclass, field

from msgspec.structs import replace

from dlrover.errors import ProtocolError
from dlrover.roles.messages import (
    JoinRole,
    MemberEnded,
    MemberStarted,
    MemberView,
    Place,
)

STARTING, LIVE, ENDED = "starting", "live", "ended"


@dataclass
class Members:
    """All instances of all roles. Only `handle` changes them."""

    roles: dict[str, dict[int, MemberView]] = field(default_factory=dict)
    """The latest life of each instance; a life never follows a later one."""
    epochs: dict[str, int] = field(default_factory=dict)
    """Number of changes of each role's members."""
    instances: dict[str, int] = field(default_factory=dict)
    """Wanted instances of each role, as the latest that joined knows it."""
    final: set[Place] = field(default_factory=set)
    """Latest lives that have ended for good."""

    def handle(self, event: MemberStarted | MemberEnded | JoinRole) -> list[Place]:
        """Handle an input; return the lives that are over by it.

        Raises:
            ProtocolError: The life is over; nothing has changed.
        """
        match event:
            case MemberStarted():
                return self._started(event.place)
            case JoinRole():
                return self._join(event)
            case MemberEnded():
                return self._ended(event)

    def validate(self) -> None:
        """Check the invariants."""
        for role, members in self.roles.items():
            assert members
            assert self.epochs[role] > 0
            for index, member in members.items():
                assert (member.place.role, member.place.index) == (role, index)
                assert member.state != LIVE or (member.pid and member.address.port)
        for place in self.final:
            assert self.roles[place.role][place.index].state == ENDED
            assert self.roles[place.role][place.index].place == place

    def get(self, role: str, index: int) -> MemberView | None:
        """Return the latest life of an instance."""
        return self.roles.get(role, {}).get(index)

    def check(self, place: Place) -> None:
        """Refuse what comes from a life that is over.

        Raises:
            ProtocolError: It is, or it never began.
        """
        member = self.get(place.role, place.index)
        if member is None or not member.pid:
            raise ProtocolError(f"{place} has not joined the job.")
        if member.place != place or member.state == ENDED:
            raise ProtocolError(_over(place, member))

    def is_over(self, place: Place) -> bool:
        """Return whether a life has ended for good; one that only lost its connection has not."""
        member = self.get(place.role, place.index)
        return member is None or member.place != place or place in self.final

    def is_away(self, place: Place) -> bool:
        """Return whether a life has lost its connection and may join again."""
        member = self.get(place.role, place.index)
        return member is not None and member.state == ENDED and not self.is_over(place)

    def update(self, member: MemberView) -> None:
        """Put a changed member in the place of the same life."""
        self._put(member)

    def _put(self, member: MemberView) -> None:
        place = member.place
        known = self.get(place.role, place.index)
        if known == member:
            return
        if known is not None and known.place != place:
            self.final.discard(known.place)
        self.roles.setdefault(place.role, {})[place.index] = member
        self.epochs[place.role] = self.epochs.get(place.role, 0) + 1

    def _started(self, place: Place) -> list[Place]:
        known = self.get(place.role, place.index)
        if known is not None and known.place.life > place.life:
            if known.place.attempt == place.attempt:
                return []  # it has started its workers anew since
            raise ProtocolError(_over(place, known))
        if known is not None and known.place == place:
            return []
        self._put(MemberView(place, STARTING, reason=known.reason if known is not None else ""))
        return [known.place] if known is not None else []

    def _join(self, event: JoinRole) -> list[Place]:
        place = event.place
        known = self.get(place.role, place.index)
        if known is not None and (known.place.life > place.life or place in self.final):
            raise ProtocolError(_over(place, known))
        over = [known.place] if known is not None and known.place != place else []
        using = known.using if known is not None and known.place == place else {}
        reason = known.reason if known is not None else ""
        self.instances[place.role] = event.instances
        self._put(
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

    def _ended(self, event: MemberEnded) -> list[Place]:
        known = self.get(event.place.role, event.place.index)
        place = event.place
        if event.any_round and known is not None and known.place.attempt == place.attempt:
            place = known.place
        if known is not None and known.place.life > place.life:
            return []
        if known is not None and known.place == place and known.state == ENDED:
            if event.final and place not in self.final:  # now the coordinator says why
                self.final.add(place)
                self._put(MemberView(place, ENDED, reason=event.reason or known.reason))
                return [place]
            return []
        if known is not None and known.place == place and not event.final:  # it may come back
            self._put(replace(known, state=ENDED, serving=False, reason=event.reason))
        else:
            self._put(MemberView(place, ENDED, reason=event.reason))
        if event.final:
            self.final.add(place)
        over = [place]
        if known is not None and known.place != place:
            over.append(known.place)
        return over


def _over(place: Place, known: MemberView) -> str:
    why = f" ({known.reason})" if known.reason else ""
    later = (
        "it has ended"
        if known.place == place
        else f"attempt {known.place.attempt} has taken its place"
    )
    return f"Attempt {place.attempt} of {place} is over: {later}{why}."
