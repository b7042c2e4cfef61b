"""How much of the failures of one incident is kept: thousands of workers may fail at once.

The first failures keep their texts whole; of later ones the ends are kept. The root cause may be
reported last, so a failure that is earlier than all before it and echoes nothing keeps its texts, too,
as long as there are not too many of those.
"""

from __future__ import annotations

from dlrover.master.diagnosis import Table
from dlrover.master.machine.state import Incident
from dlrover.spec.failure import Failure

FIRST_TEXTS = 64
"""Failures of an incident, the first that are reported, that keep texts of `TEXT_LIMIT`."""
CAUSE_TEXTS = 64
"""Later ones that keep them because each is earlier than all before it and echoes nothing."""
LATER_TEXT = 1024
"""Characters kept of each text of all other failures."""


def admitted(incident: Incident, failure: Failure, table: Table) -> Failure:
    """``failure`` with as much of its texts as its incident has room for."""
    if len(incident.failures) < FIRST_TEXTS:
        return failure.bounded()
    less = failure.bounded(LATER_TEXT)
    earlier = incident.later_causes < CAUSE_TEXTS and failure.time < incident.earliest
    if earlier and not table.is_echo(less):  # of long texts that would take too long
        return failure.bounded()
    return less


def add(incident: Incident, failure: Failure, *, echo: bool) -> None:
    """Add an admitted failure to its incident; ``echo`` says whether it may only follow from another."""
    if len(incident.failures) >= FIRST_TEXTS and not echo and failure.time < incident.earliest:
        incident.later_causes += 1
    if not echo:
        incident.earliest = min(incident.earliest, failure.time)
    incident.failures.append(failure)
    incident.seen.add(failure.id)
