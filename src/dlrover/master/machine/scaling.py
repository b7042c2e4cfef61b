"""How many nodes a job is to have, who says so, and which nodes leave because there are too many."""

from __future__ import annotations

from dataclasses import dataclass, field

from dlrover.master.machine import inputs
from dlrover.spec.job import JobSpec

WORKER = "worker"
"""The role whose number of nodes can change."""
MOST_NODES = 100_000
"""Nodes that a job can be asked to have."""


@dataclass
class Scaling:
    """The wanted number of a job's managed nodes. Change it only through its methods.

    A user's number counts for good: a plan does not change it. Until there is one, a plan may choose any
    number between the fewest and the most nodes that the job was submitted with.
    """

    job: JobSpec
    #: managed nodes that the job is to have, of all roles; 0 if its nodes come by themselves
    wanted: int = field(init=False)
    #: a user has set that number
    by_user: bool = False
    #: nodes of role worker that a user last asked for, or that the job was submitted with
    asked: int = field(init=False)
    #: why the number was last changed
    reason: str = ""
    #: how often a plan has changed it
    plans: int = 0
    #: the nodes may not be as wanted yet
    due: bool = False
    #: nodes that were called off: when each is given up if it has not left by then
    leaving: dict[int, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.wanted = self.job.managed_nodes
        self.asked = self.workers

    @property
    def workers(self) -> int:
        """Wanted nodes of the role that can be scaled."""
        return self.wanted - self.job.other_nodes

    @property
    def least(self) -> int:
        """The fewest nodes of a world."""
        return min(self.job.min_nodes, self.wanted) if self.wanted else self.job.min_nodes

    @property
    def most(self) -> int:
        """The most nodes of a world."""
        return max(self.job.max_nodes, self.wanted)

    def refusal(self, asked: inputs.ScaleAsked) -> str:
        """Why the job cannot have that many nodes, as one sentence; empty if it can."""
        unit = self.job.node_unit
        if not self.job.managed_nodes:
            return (
                "The job's nodes come by themselves: start or stop dlrover-run on a machine to change "
                "their number."
            )
        if asked.role != WORKER:
            return f"Role {asked.role} keeps its number of nodes while the job runs; only {WORKER} can be scaled."
        if not 1 <= asked.nodes <= MOST_NODES:
            return (
                f"{asked.nodes} nodes: must be from 1 to {MOST_NODES}; `dlrover stop` ends a job."
            )
        if (asked.nodes + self.job.other_nodes) % unit:
            return f"{asked.nodes} nodes: must be a multiple of --node-unit, {unit}."
        if asked.source == "plan" and self.by_user:
            return (
                f"A user has set the number of nodes to {self.workers}; a plan does not change it."
            )
        return ""

    def take(self, asked: inputs.ScaleAsked) -> int:
        """Want what was asked for, as far as that is possible; the number of workers' nodes before."""
        before = self.workers
        if self.refusal(asked):
            return before
        wanted = asked.nodes + self.job.other_nodes
        if asked.source == "plan":
            wanted = max(self.job.min_nodes, min(wanted, self.job.max_nodes))
        else:
            self.by_user, self.asked = True, asked.nodes
        if wanted != self.wanted:
            self.due, self.wanted, self.reason = True, wanted, asked.reason
            self.plans += asked.source == "plan"
        return before

    def keep(self, found: int) -> None:
        """A master without a journal finds nodes up to this rank: they had been asked for."""
        if self.wanted:
            self.wanted = max(self.wanted, found + 1)

    def validate(self) -> None:
        """Check the invariants; raise AssertionError on the first that is broken."""
        assert bool(self.wanted) == bool(self.job.managed_nodes), (
            "who launches the nodes has changed"
        )
        assert self.wanted >= self.job.other_nodes, "nodes of other roles are not wanted"
        assert self.wanted or not (self.by_user or self.due or self.leaving)
        assert self.least <= self.most
