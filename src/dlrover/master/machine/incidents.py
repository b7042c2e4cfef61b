"""The incidents of a job in the ledger: when, what, where, and what each cost."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from dlrover.master import diagnosis
from dlrover.master.machine.roundtime import (
    DETECTION,
    INDEX,
    MICRO,
    PRODUCTIVE,
    RECOMPUTED,
    nothing,
)
from dlrover.master.machine.state import Incident
from dlrover.spec.goodput import CAUSES, Cause, IncidentCost
from dlrover.spec.rules import Rule

KEPT = 200
"""Incidents that are kept one by one; earlier ones are summed up."""

_IDLE = INDEX[Cause.IDLE]


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

    def cost(self, now: int, sums: Sequence[int]) -> IncidentCost:
        """The incident as it stands at ``now``."""
        spent = self.spent if self.until >= 0 else self.spent_until(sums)
        return IncidentCost(
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

    def redo(self, again: int, steps_lost: int) -> None:
        """The nodes spent time on steps that the fault had undone."""
        self.steps_lost = max(self.steps_lost, steps_lost)
        if self.until >= 0:  # before, the ledger's sums have it
            self.spent[RECOMPUTED] += again

    def spent_until(self, sums: Sequence[int]) -> list[int]:
        """What the fault cost until the ledger's sums are these."""
        spent = [s + n - b for s, n, b in zip(self.spent, sums, self.before, strict=True)]
        spent[PRODUCTIVE] = spent[_IDLE] = 0
        return spent


class IncidentBook:
    """All incidents of a job: the open one, the latest ones, and the sum of those before."""

    def __init__(self) -> None:
        self.open: Entry | None = None
        self.entries: list[Entry] = []
        self.count = 0
        #: the sum of the entries that are no longer kept
        self.earlier_count = 0
        self.earlier = 0

    def begin(self, entry: Entry) -> None:
        """A fault was detected."""
        self.open = entry
        self.count += 1
        self.entries.append(entry)
        if len(self.entries) > KEPT:
            self.earlier_count += 1
            self.earlier += sum(self.entries.pop(0).spent)

    def describe(self, incident: Incident, own: tuple[Rule, ...]) -> None:
        """Say of the open incident what is known by now; ``own`` are the user's rules of diagnosis."""
        entry = self.open
        if entry is None or entry.title:
            return
        if incident.lost_nodes:
            entry.title = diagnosis.diagnose(incident.lost_nodes[0], own).title
        elif incident.hang:
            entry.title = f"the training hung in {incident.hang}"
        elif not incident.failures:
            entry.title = "the master lost its journal"
        else:
            root = diagnosis.root_cause(incident.failures, own)
            entry.node, entry.title = root.node_id, diagnosis.diagnose(root, own).title

    def end(self, now: int, sums: Sequence[int]) -> None:
        """The first new step was made, or the job ended."""
        assert self.open is not None
        self.open.spent = self.open.spent_until(sums)
        self.open.until = now
        self.open = None
