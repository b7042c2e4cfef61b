"""One fault: inject it, watch the job, heal it, and watch again."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence

import msgspec

from dlrover._util import procs
from dlrover.errors import InfrastructureError
from dlrover.spec import events
from dlrover.spec.events import Event
from dlrover.spec.failure import Rung
from dlrover.spec.outcome import IncidentCost
from dlrover.testing.chaos.report import FaultRow
from dlrover.testing.chaos.targets import Targets
from dlrover.testing.chaos.verbs import Injected, Planned, Verb
from dlrover.testing.chaos.watcher import Watcher

AT_LAST = 4.0
"""Last seconds of a fault, in which a step shows that training went on. Steps are reported each second."""
DECISION_WAIT = 2.0
"""Most seconds between the first sign of a fault and the decision to restart."""
RETRY = 0.5
"""Seconds until a fault that found no target is tried again."""
SIGNS = (
    events.WorkerFailed,
    events.NodeLost,
    events.HangFound,
    events.SlowRank,
    events.RestartDecided,
    events.MasterRecovered,
)
"""Events that show that the job has noticed a fault."""


class Sighting(msgspec.Struct, frozen=True):
    """What the events say about a fault so far. Times are seconds since it was injected."""

    detected: float | None = None
    restarted: bool = False
    """True if the job decided to restart its workers."""
    recovered: float | None = None
    """Time of the first step after the restart."""
    verdict: str = ""
    """The job's sentence about the fault; empty until there is one."""


class Strike:
    """A fault in a job that trains. Use `inject`, then `follow`, then `row`."""

    def __init__(
        self,
        planned: Planned,
        verb: Verb,
        watcher: Watcher,
        targets: Targets,
        *,
        patience: float,
        detect_within: float,
    ) -> None:
        self._planned = planned
        self._verb = verb
        self._watcher = watcher
        self._targets = targets
        self._patience = patience
        self._limit = detect_within
        self._seen = 0
        self._injected: Injected | None = None
        self._master_back_at = 0.0
        self._went_on = False
        self._again_at = 0.0
        self.injected_at = 0.0
        """Seconds since the epoch."""

    async def inject(self) -> Injected:
        """Strike as soon as there is a target; return what was struck.

        Raises:
            InfrastructureError: there is no target for too long.
            JobOverError: the job ended before.
        """
        until = time.monotonic() + self._patience
        while self._injected is None:
            self._seen = len(self._watcher.events)
            self.injected_at = time.time()
            try:
                self._injected = self._verb.inject(self._targets, self._planned.draw)
            except InfrastructureError:
                if time.monotonic() > until:
                    raise
                await self._watcher.until(lambda: False, RETRY)
        return self._injected

    async def follow(self) -> None:
        """Watch until the job trains again, or until patience ends; heal the fault.

        Raises:
            JobOverError: the job ended before.
        """
        detected, trains = await self._watch_for(self._limit)
        if self._verb.master and detected:
            master = self._targets.master()
            self._master_back_at = _started_at(master.pid) if master is not None else 0.0
        if detected and self._verb.ends_when_seen:
            self._verb.heal()
        restarts = self._verb.restarts
        if self._verb.lasting and detected:
            restarts = await self._watcher.until(lambda: self._sight().restarted, DECISION_WAIT)
        if restarts:
            await self._watcher.until(self._recovered, self._patience)
        elif self._verb.lasting:
            self._went_on = trains
        self._verb.heal()
        if not (restarts or self._went_on):
            await self._wait_for_step()

    async def _watch_for(self, seconds: float) -> tuple[bool, bool]:
        """Wait for a sign of the fault; return True if there was one, and True if steps were made at last."""
        await self._watcher.until(self._detected, seconds - AT_LAST)
        before = self._watcher.steps
        detected = await self._watcher.until(self._detected, min(seconds, AT_LAST))
        return detected, self._watcher.steps > before

    async def _wait_for_step(self) -> None:
        before = self._watcher.steps
        if await self._watcher.until(lambda: self._watcher.steps > before, self._patience):
            self._again_at = time.time()
        # Without a master, steps are not counted, but the workers train on.
        self._went_on = self._verb.master and bool(self._again_at)

    def row(self, started_at: float) -> FaultRow:
        """Return what is known about the fault by now; ``started_at`` is when the job was started."""
        assert self._injected is not None
        sighting = self._sight()
        return FaultRow(
            fault=self._planned.verb,
            target=self._injected.target,
            node=self._injected.node,
            rank=self._injected.rank,
            pid=self._injected.pid,
            injected=self.injected_at - started_at,
            detected=sighting.detected,
            training_again=self._training_again(sighting),
            verdict=sighting.verdict or self._silence(),
        )

    def _training_again(self, sighting: Sighting) -> float | None:
        if sighting.restarted:
            return sighting.recovered
        if self._went_on:
            return 0.0
        return self._again_at - self.injected_at if self._again_at else None

    def _silence(self) -> str:
        if self._watcher.over and not self._went_on and not self._again_at:
            return "The job ended before it reported the fault."
        trained = "went on" if self._went_on else "stopped until the fault was healed"
        return f"Not detected within {self._limit:g} s; training {trained}."

    def _sight(self) -> Sighting:
        sighting = sight(self._watcher.events[self._seen :], self.injected_at)
        if self._master_back_at:
            detected = self._master_back_at - self.injected_at
            return msgspec.structs.replace(sighting, detected=detected)
        return sighting

    def _detected(self) -> bool:
        return self._sight().detected is not None

    def _recovered(self) -> bool:
        return self._sight().recovered is not None


def _started_at(pid: int) -> float:
    """Return when a process was started: seconds since the epoch, to a clock tick."""
    ticks = procs.start_time(pid)
    age = time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")
    return time.time() - age


# ---- what the events say


def sight(happened: Sequence[Event], injected_at: float) -> Sighting:
    """Return what ``happened``, the events since a fault was injected, says about the fault.

    ``injected_at`` is in seconds since the epoch, as the events' times are.
    """
    signs = [event for event in happened if isinstance(event.body, SIGNS)]
    if not signs:
        return Sighting()
    decided = [event.body for event in signs if isinstance(event.body, events.RestartDecided)]
    ends = [event for event in happened if isinstance(event.body, events.Recovered)]
    return Sighting(
        detected=max(0.0, signs[0].time - injected_at),
        restarted=any(body.rung is not Rung.IN_PROCESS for body in decided),
        recovered=ends[-1].time - injected_at if ends else None,
        verdict=(decided[0] if decided else signs[0].body).sentence(),
    )


def steps_lost(incidents: Sequence[IncidentCost], since: float, until: float) -> int | None:
    """Return the steps that a fault undid, from the job's ledger; None if it does not know.

    ``since`` and ``until`` are when this fault and the next one were injected, in seconds since the epoch.
    """
    lost = [incident.steps_lost for incident in incidents if since <= incident.until < until]
    return None if min(lost, default=0) < 0 else sum(lost)
