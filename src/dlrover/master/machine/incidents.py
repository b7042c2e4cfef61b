"""The incidents of a job in the ledger: when, what, where, and what each cost."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from dlrover.master.diagnosis import Table
from dlrover.master.machine.roundtime import (
    DETECTION,
    INDEX,
    MICRO,
    PRODUCTIVE,
    RECOMPUTED,
    nothing,
)
from dlrover.master.machine.state import Incident
from dlrover.spec.goodput import CAUSES, Cause, IncidentCost, IncidentKind

KEPT = 200
"""Incidents that are kept one by one; earlier ones are summed up."""

_IDLE = INDEX[Cause.IDLE]
_STANDSTILL = {INDEX[Cause.RENDEZVOUS], INDEX[Cause.WAITING_FOR_RESOURCES], INDEX[Cause.NODE_CHECK]}
"""What nodes spend time on that wait for a master: a running world does not."""


@dataclass
class Entry:
    """One incident. Times are microseconds, summed over all nodes where they are lists."""

    since: int
    round: int
    #: the sums of the ledger when the incident was opened
    before: list[int]
    node: int = -1
    title: str = ""
    until: int = -1
    steps_lost: int = -1
    spent: list[int] = field(default_factory=nothing)
    kind: IncidentKind = IncidentKind.TRAINING
    #: whether a world ran when the master died
    trained: bool = False

    def cost(self, now: int, sums: Sequence[int]) -> IncidentCost:
        """The incident as it stands at ``now``."""
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
        """The fault itself turned time of ``times`` nodes into loss, before it was detected."""
        for index in (DETECTION, RECOMPUTED):
            self.spent[index] += undone[index] * times

    def undo(self, steps: int) -> None:
        """A round began so many steps before the last one that an earlier round had come to."""
        self.steps_lost = max(0, self.steps_lost) + steps

    def redo(self, again: int) -> None:
        """The nodes spent time on steps that the fault had undone."""
        if self.until >= 0:  # before, the ledger's sums have it
            self.spent[RECOMPUTED] += again

    def spent_until(self, sums: Sequence[int]) -> list[int]:
        """What the fault cost until the ledger's sums are these."""
        spent = [s + n - b for s, n, b in zip(self.spent, sums, self.before, strict=True)]
        if self.kind is IncidentKind.MASTER:
            return [part if i in _STANDSTILL else 0 for i, part in enumerate(spent)]
        spent[PRODUCTIVE] = spent[_IDLE] = 0
        return spent


class IncidentBook:
    """All incidents of a job: the open one, the latest ones, and the sum of those before."""

    def __init__(self) -> None:
        self.open: Entry | None = None
        #: the master died, and not all nodes are connected to the next one
        self.master: Entry | None = None
        self.entries: list[Entry] = []
        self.count = 0
        #: the sum of the entries that are no longer kept
        self.earlier_count = 0
        self.earlier = 0

    def begin(self, entry: Entry) -> None:
        """A fault was detected."""
        self.open = entry
        self.count += 1
        self._add(entry)

    def begin_master(self, now: int, round_: int, sums: list[int], *, trained: bool) -> None:
        """The master died, at ``now`` or later. While nodes wait for a fault to be over, that costs them."""
        if self.master is None:
            kind, title = IncidentKind.MASTER, "the master died"
            self.master = Entry(now, round_, sums, -1, title, kind=kind, trained=trained)
            self.master.steps_lost = 0
            self._add(self.master)

    def end_master(self, now: int, sums: Sequence[int], *, trains: bool) -> None:
        """All nodes are connected to the next master, or the job ended."""
        entry, self.master = self.master, None
        assert entry is not None
        entry.spent = nothing() if self.open is not None else entry.spent_until(sums)
        entry.until = now
        if entry.trained and trains:
            entry.title = "the master died; training went on"

    def _add(self, entry: Entry) -> None:
        self.entries.append(entry)
        if len(self.entries) > KEPT:
            self.earlier_count += 1
            self.earlier += sum(self.entries.pop(0).spent)

    def describe(self, incident: Incident, table: Table) -> None:
        """Say of the open incident what is known by now."""
        entry = self.open
        if entry is None or entry.title:
            return
        if incident.lost_nodes:
            entry.title = table.diagnose(incident.lost_nodes[0]).title
        elif incident.hang:
            entry.title = f"the training hung in {incident.hang}"
        elif not incident.failures:
            entry.title = "the master lost its journal"
        else:
            root = table.root_cause(incident.failures)
            entry.node, entry.title = root.node_id, table.diagnose(root).title

    def end(self, now: int, sums: Sequence[int]) -> None:
        """The first new step was made, or the job ended."""
        assert self.open is not None
        self.open.spent = self.open.spent_until(sums)
        self.open.until = now
        self.open = None
