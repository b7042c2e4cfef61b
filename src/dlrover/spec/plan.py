"""Plans: the wanted resources of a job, the reason, and the expected effect."""

from __future__ import annotations

import enum

import msgspec

from dlrover.spec.node import Size


class NodeGroup(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Nodes of one kind, and the resources of each."""

    count: int
    cpu: float = 0.0
    """Cores."""
    memory: int = 0
    """Bytes; 0 if the plan does not change it."""
    accelerators: int = 0


class Effect(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Predicted effect of a plan."""

    throughput: float
    """Samples per second."""
    low: float
    """Lower bound of the throughput; half of the probability outside of ``confidence`` lies below it."""
    high: float
    confidence: float = 0.9
    """Probability that the measured throughput lies between ``low`` and ``high``."""
    before: float = 0.0
    """Samples per second without the plan; 0 if nothing runs yet."""
    cost: float = 0.0
    """Hourly price of the nodes, in the unit of the prices given to the search."""


class ResourcePlan(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Wanted resources of a job, by kind of node (``worker``, ``ps``)."""

    groups: dict[str, NodeGroup]
    reason: str
    """One sentence."""
    effect: Effect | None = None
    """None if no model could predict it: a first plan, or more memory after an OOM."""
    batch: int | None = None
    """Samples per step of all workers; None if the plan does not change it."""


class PlanOutcome(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A plan's prediction, and the throughput measured after the plan was applied."""

    effect: Effect
    throughput: float
    """Measured samples per second."""

    @property
    def error(self) -> float:
        """Relative difference of the measured throughput from the predicted one."""
        return self.throughput / self.effect.throughput - 1

    @property
    def within(self) -> bool:
        """True if the measured throughput lies in the predicted interval."""
        return self.effect.low <= self.throughput <= self.effect.high


class ScaleKind(str, enum.Enum):
    """Reason for a change of a job's size. Users see the value."""

    GROW = "more nodes"
    """The model expects that more nodes pay off."""
    SHRINK = "fewer nodes"
    """The model expects that fewer nodes pay off."""
    MEASURE = "measure"
    """The effect is unknown; it is tried."""
    REPLACE = "another node"
    """A slow node holds up the others."""
    MIGRATE = "other servers"
    """Hot servers move to nodes with more cores."""
    REBALANCE = "even load"
    """The parameters are unevenly distributed over the servers; the program redistributes them."""
    BATCH = "another batch"
    """Steps of another size make more progress in the same time."""
    RETURN = "roll back"
    """The tried change fell short."""


class ScaleStage(str, enum.Enum):
    """Stage of the search for the best size. Users see the value."""

    START = "start"
    """The first size has not been measured yet."""
    ADJUST = "initial adjustment"
    """Sizes are tried, one after the other."""
    RUNNING = "running"
    """The best size is known; it is reviewed from time to time."""


class ScaleDecision(msgspec.Struct, frozen=True, kw_only=True):
    """A wanted number of nodes."""

    kind: ScaleKind
    nodes: int
    servers: int = 0
    batch: int = 0
    """Wanted samples per step of all workers; 0: unchanged."""
    plan: ResourcePlan
    plan_id: str = ""
    """The Brain's id of the plan, if the Brain made it. The Brain weighs jobs against each other, so a job
    does not roll back such a plan."""

    @property
    def size(self) -> Size:
        """Wanted size of the job."""
        return Size(self.nodes, self.servers)
