"""Limits on the failure texts kept for an incident, since thousands of workers may fail at once.

The first failures keep their full texts, later ones only the ends. The root cause may be reported last. So a
later failure also keeps its full texts if it is earlier than all before it and echoes nothing, up to a limit.
"""

from __future__ import annotations

from dlrover.master.machine.diagnosis.diagnosis import Table
from dlrover.master.machine.state import Incident
from dlrover.spec.failure import Failure

FIRST_TEXTS = 64
"""Number of an incident's first reported failures that keep texts of `TEXT_LIMIT`."""
CAUSE_TEXTS = 64
"""Number of later failures that also do, since each is earlier than all before it and echoes nothing."""
LATER_TEXT = 1024
"""Characters kept of each text of all other failures."""


def admitted(incident: Incident, failure: Failure, table: Table) -> Failure:
    """Return ``failure`` with as much of its texts as its incident has room for."""
    if len(incident.failures) < FIRST_TEXTS:
        return failure.bounded()
    less = failure.bounded(LATER_TEXT)
    earlier = incident.later_causes < CAUSE_TEXTS and failure.time < incident.earliest
    if earlier and not table.is_echo(less):  # on full texts, `is_echo` would take too long
        return failure.bounded()
    return less


def add(incident: Incident, failure: Failure, *, echo: bool) -> None:
    """Add an admitted failure to its incident; ``echo`` is True if it may only follow from another."""
    if len(incident.failures) >= FIRST_TEXTS and not echo and failure.time < incident.earliest:
        incident.later_causes += 1
    if not echo:
        incident.earliest = min(incident.earliest, failure.time)
    incident.failures.append(failure)
    incident.seen.add(failure.id)
