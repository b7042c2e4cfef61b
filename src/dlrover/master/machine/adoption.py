"""Adoption of a running round by a master without a journal, from what the agents report.

The disk with the journal may be lost while agents and workers continue. Each agent reports what it holds in
its first message. As soon as all nodes of one world have done so, its round continues and no worker is
stopped. If some of them are still missing at the deadline, or are stopping their workers, a new round opens
with a number above all reported ones.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

import msgspec

from dlrover.master.machine import inputs
from dlrover.master.machine.diagnosis.diagnosis import RuleTable
from dlrover.master.machine.recovery.incident import FIRST_TEXTS, LATER_TEXT
from dlrover.spec.events import WorkerFailed
from dlrover.spec.failure import Failure
from dlrover.spec.world import Holding, World

Report = WorkerFailed | inputs.Reported


@dataclass
class Adoption:
    """Reports of a job's agents to a master without state. Change it through its methods."""

    #: when the master decides with what it knows; None until it begins to listen
    deadline: float | None = None
    began_at: float = 0.0
    #: True once a round was adopted, opened or completed; nothing is adopted any more
    over: bool = False
    #: nodes that the platform runs and that have not reported
    awaited: set[int] = field(default_factory=set)
    #: True if the platform knows all nodes, so that no unknown node can come
    complete: bool = False
    held: dict[int, Holding] = field(default_factory=dict)
    #: nodes that report the same world, by that world without node-specific fields
    groups: dict[World, set[int]] = field(default_factory=dict)
    #: events of the world since then, handled once it is adopted
    reports: dict[str, Report] = field(default_factory=dict)

    @property
    def pending(self) -> bool:
        """True while the master still collects reports; no round is open then."""
        return self.deadline is not None and not self.over

    @property
    def highest(self) -> int:
        """Highest round that any agent has reported."""
        return max((h.round for h in self.held.values()), default=0)

    @property
    def restart_count(self) -> int:
        """Highest number of restarts that any agent has reported."""
        return max((world.restart_count for world in self.groups), default=0)

    def begin(self, awaited: Iterable[int], now: float, until: float) -> None:
        """Listen until a deadline, or until all nodes of a world or all ``awaited`` nodes have reported."""
        self.began_at, self.deadline = now, until
        self.awaited = set(awaited)
        self.complete = bool(self.awaited)

    def extend(self, until: float) -> None:
        """Listen at least until a time."""
        if self.deadline is not None:
            self.deadline = max(self.deadline, until)

    def hear(self, node_id: int, holding: Holding) -> None:
        """Record what a node holds now."""
        self.forget(node_id)
        self.held[node_id] = holding
        if holding.world is not None:
            self.groups.setdefault(_shared(holding.world), set()).add(node_id)

    def forget(self, node_id: int) -> None:
        """Drop a node that is gone."""
        self.awaited.discard(node_id)
        holding = self.held.pop(node_id, None)
        if holding is None or holding.world is None:
            return
        shared = _shared(holding.world)
        self.groups[shared].discard(node_id)
        if not self.groups[shared]:
            del self.groups[shared]

    def report(self, report: Report) -> None:
        """Keep an agent's report on its world until the world is adopted; repetitions count once."""
        if isinstance(report, inputs.Reported):
            self.reports[f"succeeded {report.node_id}"] = report
            return
        self.reports.setdefault(f"failed {report.failure.id}", report)

    def admit(self, failure: Failure, table: RuleTable) -> WorkerFailed | None:
        """Return a failure with its verdict and as much of its texts as the limits allow; None if known."""
        if f"failed {failure.id}" in self.reports:
            return None
        whole = len(self.reports) < FIRST_TEXTS
        return table.failed(failure.bounded() if whole else failure.bounded(LATER_TEXT))

    def due(self, now: float, largest: int) -> bool:
        """Return whether the fate of the round can be decided, since no other round can be running.

        A reported world smaller than the ``largest`` possible may be an old one of nodes that were cut off.
        """
        if self.deadline is not None and now >= self.deadline:
            return True
        if self.complete and not self.awaited:
            return True
        latest = self._latest()
        return latest is not None and len(self.groups[latest]) >= max(latest.node_count, largest)

    def members(self) -> dict[int, Holding]:
        """Return the holdings of the latest world by rank; empty unless all its nodes still train."""
        latest = self._latest()
        if latest is None:
            return {}
        group = {i: self.held[i] for i in self.groups[latest]}
        ordered = dict(sorted(group.items(), key=lambda item: _place(item[1])))
        return ordered if _is_whole(latest, list(ordered.values())) else {}

    def summary(self) -> str:
        """Return how many nodes have reported the latest round, in words."""
        latest = self._latest()
        if latest is None:
            return f"{len(self.held)} nodes report no running round"
        count = len(self.groups[latest])
        return f"{count} of {latest.node_count} nodes of round {latest.round} reported it"

    def _latest(self) -> World | None:
        return max(self.groups, key=lambda w: (w.round, len(self.groups[w])), default=None)

    def validate(self) -> None:
        """Check the invariants; raise AssertionError on the first broken one."""
        grouped = [i for group in self.groups.values() for i in group]
        assert sorted(grouped) == sorted(i for i, h in self.held.items() if h.world is not None)
        assert all(self.groups.values()), "a world without a node"
        assert not (self.awaited & self.held.keys()), "a node that has spoken is awaited"
        assert self.pending or not self.reports, "a report is held back for nothing"


def _shared(world: World) -> World:
    """Return a world without its node-specific fields."""
    return msgspec.structs.replace(world, node_rank=0, first_rank=0, attempt=0)


def _place(holding: Holding) -> tuple[int, int]:
    world = holding.world
    assert world is not None
    return world.node_rank, world.first_rank


def _is_whole(shared: World, holdings: list[Holding]) -> bool:
    """Return whether these nodes, in order of rank, form the whole world and none stops its workers."""
    first_rank = 0
    for node_rank, holding in enumerate(holdings):
        if holding.stopping or _place(holding) != (node_rank, first_rank):
            return False
        first_rank += holding.nproc
    return (len(holdings), first_rank) == (shared.node_count, shared.world_size)
