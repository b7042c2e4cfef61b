"""Watches the phases of instances, and sees to it that those without progress end."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

from dlrover.roles.machine.health import Health, Looked, Stuck
from dlrover.roles.machine.inputs import EndInstance
from dlrover.roles.messages import (
    HOLDER,
    START,
    WORK,
    MemberEnded,
    MemberPlace,
    MemberStarted,
    Pulse,
    PulseReply,
)
from dlrover.roles.spec import RolesJob
from dlrover.rpc.server import Server

LOOK = 0.5
"""Seconds between two looks at the limits."""
KEEPER_SILENCE = 60.0
"""Seconds without a report after which the process that keeps weights is replaced."""
GRACE = 5.0
"""Seconds in which a process that is to end may do so itself, and leave its stacks, before it is killed."""


class HealthWatch:
    """Phases of all instances. All methods run on one event loop.

    Args:
        job: The job.
        stuck: Called with each instance that is stuck, and with the process that keeps weights if it is silent.
        kill: Called to kill the processes of one that does not end itself.
    """

    def __init__(
        self,
        job: RolesJob,
        stuck: Callable[[Stuck], None],
        kill: Callable[[EndInstance], None],
    ) -> None:
        own = {HOLDER: dict.fromkeys((START, WORK), KEEPER_SILENCE)}
        self.health = Health({role.name: role.health for role in job.roles} | own)
        self._stuck, self._kill = stuck, kill
        self._ends: dict[MemberPlace, tuple[EndInstance, float]] = {}
        """Instances to end, and when they are killed."""

    def register(self, server: Server) -> None:
        """Register the method that instances call."""
        server.unary("RolePulse", Pulse, self._pulse)

    async def run(self) -> None:
        """Look at the limits from time to time, until this is cancelled."""
        while True:
            now = time.monotonic()
            for stuck in self.health.handle(Looked(), now):
                self._stuck(stuck)
            for place, (order, at) in list(self._ends.items()):
                if at <= now:
                    self._ends[place] = order, now + GRACE
                    self._kill(order)
            await asyncio.sleep(LOOK)

    def tell(self, event: MemberStarted | MemberEnded) -> None:
        """Note that a life begins or is over."""
        self.health.handle(event, time.monotonic())
        if isinstance(event, MemberEnded):
            self._ends.pop(event.place, None)
        self._ends = {one: end for one, end in self._ends.items() if not _before(one, event.place)}

    def end(self, order: EndInstance) -> None:
        """Have an instance end: it hears so when it reports next; one that does not report is killed."""
        life = self.health.lives.get((order.place.role, order.place.index))
        never = life is not None and life.heard is None
        self._ends[order.place] = order, time.monotonic() + (0.0 if never else GRACE)

    def phases(self) -> dict[tuple[str, int], tuple[str, float]]:
        """Return the phase of each instance, and for how many seconds it has lasted."""
        now = time.monotonic()
        return {key: (life.phase, now - life.since) for key, life in self.health.lives.items()}

    def spent(self, place: MemberPlace) -> tuple[float, float] | None:
        """Return the seconds in which a life has worked and was idle; None if it has not reported."""
        return self.health.spent(place, time.monotonic())

    async def _pulse(self, pulse: Pulse) -> PulseReply:
        self.health.handle(pulse, time.monotonic())
        order = self._ends.get(pulse.place)
        pause = self.health.pause(pulse)
        return PulseReply(pause, f"{order[0].reason}." if order is not None else "")


def _before(one: MemberPlace, other: MemberPlace) -> bool:
    """Return whether a life is an earlier one of the same instance."""
    return (one.role, one.index) == (other.role, other.index) and one.life < other.life
