"""Outcome of a fault, from the job's events and its ledger. Pure."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from dlrover.spec import events
from dlrover.spec.events import Event
from dlrover.spec.goodput import IncidentCost

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


def sight(happened: Sequence[Event], injected_at: float) -> Sighting:
    """Return what ``happened``, the events since a fault was injected, says about the fault.

    ``injected_at`` is in seconds since the epoch, as the events' times are.
    """
    signs = [event for event in happened if isinstance(event.body, SIGNS)]
    if not signs:
        return Sighting()
    restarts = [event for event in signs if isinstance(event.body, events.RestartDecided)]
    ends = [event for event in happened if isinstance(event.body, events.Recovered)]
    return Sighting(
        detected=max(0.0, signs[0].time - injected_at),
        restarted=bool(restarts),
        recovered=ends[-1].time - injected_at if ends else None,
        verdict=(restarts or signs)[0].sentence(),
    )


def steps_lost(incidents: Sequence[IncidentCost], since: float, until: float) -> int | None:
    """Return the steps that a fault undid, from the job's ledger; None if it does not know.

    ``since`` and ``until`` are when this fault and the next one were injected, in seconds since the epoch.
    """
    lost = [incident.steps_lost for incident in incidents if since <= incident.until < until]
    return None if min(lost, default=0) < 0 else sum(lost)
