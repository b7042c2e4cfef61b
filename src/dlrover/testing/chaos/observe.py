"""What became of a fault, from the job's events and from the program's own step numbers. Pure."""

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
"""The events by which a job shows that it has seen a fault."""


class Sighting(msgspec.Struct, frozen=True):
    """What the events say of a fault so far. Times are seconds since it was injected."""

    detected: float | None = None
    restarted: bool = False
    """Whether the job decided to start its workers anew."""
    recovered: float | None = None
    """When the first step after the restart was made."""
    verdict: str = ""
    """The sentence with which the job tells what happened; empty while it has told nothing."""


def sight(happened: Sequence[Event], injected_at: float) -> Sighting:
    """What ``happened``, the events since a fault was injected, says of it.

    ``injected_at`` is in seconds since the epoch, as the events' times.
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
    """Steps that a fault undid, as the job's ledger has them; None where it does not know.

    ``since`` is when the fault was injected, ``until`` when the next one was, in seconds since the epoch.
    """
    lost = [incident.steps_lost for incident in incidents if since <= incident.until < until]
    return None if min(lost, default=0) < 0 else sum(lost)
