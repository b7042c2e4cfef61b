"""The open incident of a job: its failures with their verdicts, and limits on the texts kept of them.

Where the others go on without lost ranks, it lasts until these train again.

Thousands of workers may fail at once. The first failures keep their full texts, later ones only the ends. The
root cause may be reported last. So a later failure also keeps its full texts if it is earlier than all before
it and echoes nothing, up to a limit.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from dlrover.master.machine.diagnosis.diagnosis import RuleTable
from dlrover.spec.events import HangFound, WorkerFailed
from dlrover.spec.failure import Failure

FIRST_TEXTS = 64
"""Number of an incident's first reported failures that keep texts of `TEXT_LIMIT`."""
CAUSE_TEXTS = 64
"""Number of later failures that also do, since each is earlier than all before it and echoes nothing."""
LATER_TEXT = 1024
"""Characters kept of each text of all other failures."""


@dataclass
class Incident:
    """An interruption of all or of some ranks, from a fault's first sign to the first new step of all."""

    since: float
    round: int
    reports: list[WorkerFailed] = field(default_factory=list)
    #: ids of the reported failures
    seen: set[str] = field(default_factory=set)
    #: time of the earliest failure that echoes no other
    earliest: float = float("inf")
    #: later failures that kept their full texts because each was earlier than ``earliest``
    later_causes: int = 0
    #: the first lost node of the world, as a failure of the kind `FailureKind.NODE`
    lost_node: WorkerFailed | None = None
    #: the hang that began the incident; None if another fault did
    hang: HangFound | None = None
    #: True once the restart policy has decided
    decided: bool = False
    #: True if other ranks go on
    survived: bool = False
    #: ranks whose processes failed while others went on
    killed: set[int] = field(default_factory=set)
    #: ranks whose nodes were lost while others went on
    cut_off: set[int] = field(default_factory=set)
    #: steps of the round after which a step is new
    steps: int = 0

    def admit(self, failure: Failure, table: RuleTable) -> WorkerFailed:
        """Return a failure with its verdict, and with as much of its texts as the limits allow."""
        if len(self.reports) < FIRST_TEXTS:
            return table.failed(failure.bounded())
        # Full texts take too long to read, so the ends decide whether they are worth it.
        short = table.failed(failure.bounded(LATER_TEXT))
        earlier = self.later_causes < CAUSE_TEXTS and failure.time < self.earliest
        return table.failed(failure.bounded()) if earlier and not short.verdict.echo else short

    def add(self, report: WorkerFailed) -> None:
        """Add an admitted failure."""
        failure = report.failure
        if not report.verdict.echo:
            self.later_causes += len(self.reports) >= FIRST_TEXTS and failure.time < self.earliest
            self.earliest = min(self.earliest, failure.time)
        self.reports.append(report)
        self.seen.add(failure.id)

    def validate(self) -> None:
        """Check the invariants; raise AssertionError on the first broken one."""
        assert self.seen == {report.failure.id for report in self.reports}
        assert self.later_causes <= CAUSE_TEXTS
