"""Incidents of a job in the ledger: time, cause, place and cost."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from dlrover.master.machine.diagnosis.diagnosis import root_cause
from dlrover.master.machine.goodput.roundtime import (
    DEGRADED,
    DETECTION,
    INDEX,
    MICRO,
    NOT_MEASURED,
    PRODUCTIVE,
    RECOMPUTED,
    nothing,
)
from dlrover.master.machine.recovery.incident import Incident
from dlrover.spec.outcome import CAUSES, Cause, IncidentCost, IncidentKind

KEPT = 200
"""Maximum number of incidents kept individually; earlier ones are summed up."""

_IDLE = INDEX[Cause.IDLE]
_STANDSTILL = {INDEX[Cause.RENDEZVOUS], INDEX[Cause.WAITING_FOR_RESOURCES], INDEX[Cause.NODE_CHECK]}
"""Causes of time that nodes spend while they wait for a master; a running world spends none on them."""
_AWAY = {DEGRADED, DETECTION, RECOMPUTED, INDEX[Cause.NODE_CHECK]}
"""Causes of time that ranks, and the nodes that replace lost ones, spend away while the others train."""


@dataclass
class IncidentAccount:
    """One incident. Times are microseconds; lists are sums over all nodes."""

    since: int
    round: int
    #: the ledger's sums when the incident began
    before: list[int]
    node: int = -1
    title: str = ""
    until: int = -1
    steps_lost: int = -1
    spent: list[int] = field(default_factory=nothing)
    kind: IncidentKind = IncidentKind.TRAINING
    #: True if a world ran when the master died
    trained: bool = False
    #: True if other ranks train meanwhile
    survived: bool = False

    def cost(self, now: int, sums: Sequence[int]) -> IncidentCost:
        """Return the incident as it stands at ``now``."""
        spent = self.spent if self.until >= 0 else self.spent_until(sums)
        return IncidentCost(
            kind=self.kind,
            since=self.since / MICRO,
            until=(self.until if self.until >= 0 else now) / MICRO,
            over=self.until >= 0,
            title=self.title,
            node=self.node,
            round=self.round,
            seconds={c.value: us / MICRO for c, us in zip(CAUSES, spent, strict=True) if us},
            steps_lost=self.steps_lost,
        )

    def charge(self, undone: Sequence[int], times: int) -> None:
        """Add the time, by cause, that each of ``times`` nodes lost before the fault was detected."""
        for index in (DETECTION, RECOMPUTED):
            self.spent[index] += undone[index] * times

    def undo(self, steps: int) -> None:
        """Add lost steps: a round began ``steps`` before the last step that an earlier round had reached."""
        self.steps_lost = max(0, self.steps_lost) + steps

    def redo(self, again: int) -> None:
        """Add the nodes' time for steps that the fault had undone."""
        if self.until >= 0:  # until then, the ledger's sums include it
            self.spent[RECOMPUTED] += again

    def spent_until(self, sums: Sequence[int]) -> list[int]:
        """Return what the fault has cost when the ledger's sums are ``sums``."""
        spent = [s + n - b for s, n, b in zip(self.spent, sums, self.before, strict=True)]
        if self.kind is IncidentKind.MASTER:
            return [part if i in _STANDSTILL else 0 for i, part in enumerate(spent)]
        if self.survived:
            return [part if i in _AWAY else 0 for i, part in enumerate(spent)]
        spent[PRODUCTIVE] = spent[_IDLE] = spent[NOT_MEASURED] = 0
        return spent


class IncidentBook:
    """All incidents of a job: the open one, the latest ones, and the sum of earlier ones."""

    def __init__(self) -> None:
        self.open: IncidentAccount | None = None
        #: set from the master's death until all nodes are connected to the next master
        self.master: IncidentAccount | None = None
        self.entries: list[IncidentAccount] = []
        self.count = 0
        #: number and cost of the entries that are no longer kept
        self.earlier_count = 0
        self.earlier = 0

    def begin(self, entry: IncidentAccount) -> None:
        """Open an incident for a detected fault."""
        self.open = entry
        self.count += 1
        self._add(entry)

    def begin_master(self, now: int, round_: int, sums: list[int], *, trained: bool) -> None:
        """Open an incident for the master's death at ``now`` or later, unless one is open."""
        if self.master is None:
            kind, title = IncidentKind.MASTER, "the master died"
            self.master = IncidentAccount(now, round_, sums, -1, title, kind=kind, trained=trained)
            self.master.steps_lost = 0
            self._add(self.master)

    def end_master(self, now: int, sums: Sequence[int], *, trains: bool) -> None:
        """Close the master's incident; if a fault's incident is open, only the latter bears the cost."""
        entry, self.master = self.master, None
        assert entry is not None
        entry.spent = nothing() if self.open is not None else entry.spent_until(sums)
        entry.until = now
        if entry.trained and trains:
            entry.title = "the master died; training went on"

    def _add(self, entry: IncidentAccount) -> None:
        self.entries.append(entry)
        if len(self.entries) > KEPT:
            self.earlier_count += 1
            self.earlier += sum(self.entries.pop(0).spent)

    def describe(self, incident: Incident) -> None:
        """Describe the open incident as far as it is known."""
        entry = self.open
        if entry is None or entry.title:
            return
        if incident.lost_node is not None:
            lost = incident.lost_node
            entry.title = lost.verdict.title
            entry.node = lost.failure.node_id if entry.node < 0 else entry.node
        elif incident.hang is not None:
            entry.title = incident.hang.title
        elif not incident.reports:
            entry.title = "the master lost its journal"
        else:
            root = root_cause(incident.reports)
            entry.node, entry.title = root.failure.node_id, root.verdict.title

    def end(self, now: int, sums: Sequence[int]) -> None:
        """Close the open incident: the first new step was made, or the job ended."""
        assert self.open is not None
        self.open.spent = self.open.spent_until(sums)
        self.open.until = now
        self.open = None
