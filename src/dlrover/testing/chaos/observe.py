"""What became of a fault, from the job's events and from the program's own step numbers. Pure."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from dlrover.spec import events
from dlrover.spec.events import Event

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


def steps_lost(numbers: Sequence[int]) -> int | None:
    """Steps that had to be done again; None where the program does not tell its steps.

    ``numbers`` is the last step that the program had recorded, seen again and again from before the
    fault until it trained again.
    """
    lost = peak = 0
    for number in numbers:
        peak = max(peak, number)
        lost = max(lost, peak - number)
    return lost if numbers else None


class Interruption(msgspec.Struct, frozen=True):
    """The cost of one fault."""

    seconds: float
    """Without any step."""
    steps: int
    """Done again; 0 where that is not known."""


def goodput_ratio(
    wall: float, start_up: float, steps: int, interruptions: Sequence[Interruption]
) -> float:
    """Time in new steps, as a part of the wall time.

    ``wall`` and ``start_up`` (to the first step) are seconds, ``steps`` all steps that were made, those
    done again included. What a program does not tell, the steps done again, counts as new.
    """
    if wall <= 0 or steps <= 0:
        return 0.0
    training = wall - start_up - sum(item.seconds for item in interruptions)
    fresh = 1 - sum(item.steps for item in interruptions) / steps
    return max(0.0, training) * max(0.0, fresh) / wall
