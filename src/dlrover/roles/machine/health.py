"""Which instances make progress: each says in which phase it is, and each phase may have a limit."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import msgspec

from dlrover.roles.messages import IDLE, START, WORK, MemberEnded, MemberPlace, MemberStarted, Pulse

MAX_PAUSE = 5.0
"""Seconds without a look beyond which the coordinator itself did not run; instances are not blamed for them."""
PAUSES = 0.2, 5.0
"""Least and most seconds between two reports of an instance whose role has limits."""
CALM = 10.0
"""Seconds between the reports of all others."""
YOUNG = 1.0, 0.1
"""An instance reports at least after this number of seconds, or this share of those that it has counted, whatever is later:
what it does after its last report is not known."""

Limits = Mapping[str, Mapping[str, float]]
"""Limits of the phases of each role, in seconds; idle has none."""


class Looked(msgspec.Struct, frozen=True):
    """Time has passed."""


class Stuck(msgspec.Struct, frozen=True, tag="stuck"):
    """An instance has exceeded the limit of its phase."""

    place: MemberPlace
    phase: str
    """Empty if it has not said anything for so long."""
    seconds: float


Input = MemberStarted | MemberEnded | Looked | Pulse


@dataclass
class Life:
    """The latest life of an instance."""

    place: MemberPlace
    since: float
    """When its phase began."""
    moved: float
    """When its phase began or it last made progress, whatever is later."""
    phase: str = START
    heard: float | None = None
    """When it last reported; None: not yet."""
    stuck: bool = False
    worked: float = 0.0
    """Seconds, when it last reported."""
    idled: float = 0.0


@dataclass
class Health:
    """Phases of all instances. Only `handle` changes them.

    Not for the journal: another coordinator hears from all living instances within seconds, and they say how long
    their phases have lasted.
    """

    limits: Limits = field(default_factory=dict)
    lives: dict[tuple[str, int], Life] = field(default_factory=dict)
    looked: float | None = None

    def handle(self, event: Input, now: float) -> list[Stuck]:
        """Handle an input at time ``now`` (seconds that only grow); return the instances that are stuck since."""
        match event:
            case MemberStarted(place):
                self._life(place, now)
            case MemberEnded(place):
                life = self._known(place)
                if life is not None and life.place.life <= place.life:
                    del self.lives[place.role, place.index]
            case Pulse():
                self._pulse(event, now)
            case Looked():
                return self._look(now)
        return []

    def spent(self, place: MemberPlace, now: float) -> tuple[float, float] | None:
        """Return the seconds in which a life has worked and was idle; None if it has not reported."""
        life = self._known(place)
        if life is None or life.place != place or life.heard is None:
            return None
        since = max(0.0, now - life.heard)
        idle = since if life.phase == IDLE else 0.0
        return life.worked + (since - idle) * (life.phase != START), life.idled + idle

    def validate(self) -> None:
        """Check the invariants."""
        for key, life in self.lives.items():
            assert key == (life.place.role, life.place.index)
            assert life.place.role in self.limits
            assert life.since <= life.moved
            assert life.heard is not None or life.phase == START

    def pause(self, pulse: Pulse) -> float:
        """Return the seconds until an instance is to report again."""
        limits = self.limits.get(pulse.place.role)
        least, most = PAUSES
        usual = min(most, max(least, min(limits.values()) / 5)) if limits else CALM
        return min(usual, max(YOUNG[0], YOUNG[1] * (pulse.worked + pulse.idled)))

    def _known(self, place: MemberPlace) -> Life | None:
        return self.lives.get((place.role, place.index))

    def _life(self, place: MemberPlace, now: float) -> Life | None:
        """Return a life, which begins if it is new; None if it is over or of no role."""
        known = self._known(place)
        if place.role not in self.limits or (known and known.place.life > place.life):
            return None
        if known is None or known.place != place:
            known = self.lives[place.role, place.index] = Life(place, now, now)
        return known

    def _pulse(self, pulse: Pulse, now: float) -> None:
        life = self._life(pulse.place, now)
        if life is not None:
            life.phase, life.heard = pulse.phase, now
            life.worked, life.idled = pulse.worked, pulse.idled
            life.since = now - pulse.seconds
            life.moved = max(life.since, now - pulse.still)

    def _look(self, now: float) -> list[Stuck]:
        gap = now - self.looked if self.looked is not None else 0.0
        missed = gap if gap > MAX_PAUSE else 0.0
        self.looked = now
        found = []
        for life in self.lives.values():
            life.moved += missed
            life.heard = life.heard + missed if life.heard is not None else None
            stuck = None if life.stuck else self._exceeded(life, now)
            if stuck is not None:
                life.stuck = True
                found.append(stuck)
        return found

    def _exceeded(self, life: Life, now: float) -> Stuck | None:
        limits = self.limits[life.place.role]
        still, silent = now - life.moved, now - (life.heard if life.heard is not None else now)
        if still > limits.get(life.phase, still):
            return Stuck(life.place, life.phase, still)
        if silent > limits.get(WORK, silent):
            return Stuck(life.place, "", silent)
        return None
