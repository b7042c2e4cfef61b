"""Changes of a job's size: the planner's question, the record of a change, and its wording."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from dlrover.planning.throughput import TrustRegion
from dlrover.spec import events
from dlrover.spec.measurements import SpeedSample
from dlrover.spec.node import SERVER, WORKER, Size
from dlrover.spec.plan import Effect, NodeGroup, PlanOutcome, ResourcePlan, ScaleDecision, ScaleKind

SAME_SIZE = (ScaleKind.REPLACE, ScaleKind.MIGRATE, ScaleKind.REBALANCE)
"""Changes that keep the numbers of nodes."""


@dataclass(frozen=True)
class Question:
    """What is known of a job when its size is reviewed."""

    current: SpeedSample
    """Sample of the running world."""
    samples: Sequence[SpeedSample]
    """Samples of all measured sizes, including the current one."""
    sizes: Sequence[int]
    """Allowed numbers of nodes; of role worker in a job with servers."""
    region: TrustRegion
    cost: float
    """Weight of the nodes' cost, 0 to 1."""
    explore: bool
    """True if a size may be tried only for its measurement."""
    servers: Sequence[int] = (0,)
    """Allowed numbers of servers."""


@dataclass
class Change:
    """A plan that is being carried out."""

    number: int
    kind: ScaleKind
    size: Size
    origin: Size
    """Size before the change."""
    effect: Effect | None
    since: float
    round: int
    """Round in which the change began."""
    plan_id: str = ""
    """The Brain's id of the plan; empty if the job's master made it."""
    batch_before: int = 0
    """Chosen global batch before the change; 0: the program's own."""

    def begun(self, decision: ScaleDecision, unit: str) -> events.PlanMade:
        """Return the event of the plan's beginning; ``unit`` is that of its throughput."""
        return events.PlanMade(
            self.number,
            self.kind,
            self.size.workers,
            self.origin.workers,
            decision.plan.reason,
            self.effect,
            unit,
            self.plan_id,
            self.size.servers,
            self.origin.servers,
            decision.batch,
        )

    def measured(
        self, sample: SpeedSample, outcome: PlanOutcome, *, short: bool
    ) -> events.PlanMeasured:
        """Return the event of the plan's measured outcome; ``short``: it is not worth its size."""
        return events.PlanMeasured(
            self.number,
            self.size.workers,
            sample.throughput,
            outcome.error,
            outcome.within,
            short,
            sample.unit,
            self.plan_id,
            self.size.servers,
        )

    def dropped(self, reason: str) -> events.PlanDropped:
        """Return the event of the plan's end without a measured effect."""
        return events.PlanDropped(self.number, reason, self.plan_id)


def groups_of(size: Size) -> dict[str, NodeGroup]:
    """Return the nodes of a size, by role."""
    groups = {WORKER: NodeGroup(count=size.workers)}
    if size.servers:
        groups[SERVER] = NodeGroup(count=size.servers)
    return groups


def direction(origin: Size, size: Size) -> ScaleKind:
    """Return whether a size has more or fewer nodes than the original one, as a kind of change."""
    return ScaleKind.GROW if size.nodes > origin.nodes else ScaleKind.SHRINK


def decided(
    kind: ScaleKind,
    size: Size,
    reason: str,
    effect: Effect | None,
    plan_id: str = "",
    batch: int = 0,
) -> ScaleDecision:
    """Return the decision for this size, and for this global batch unless it is 0."""
    plan = ResourcePlan(groups=groups_of(size), reason=reason, effect=effect)
    return ScaleDecision(
        kind=kind, nodes=size.workers, servers=size.servers, batch=batch, plan=plan, plan_id=plan_id
    )


def gain_without(found: events.SlowRank, latest: SpeedSample) -> float:
    """Return the share of speed that a job gains if a slow rank becomes as fast as the others.

    In a synchronous job all ranks wait for it. With servers none waits: the rank only loses its own share. The
    latest sample may be older than the slowness.
    """
    if latest.servers:
        others = latest.replicas - 1
        return latest.replicas / (others + 1 / found.factor) - 1
    usual = latest.compute_seconds or latest.step_seconds / found.factor
    step = max(latest.step_seconds, found.factor * usual)
    return step / max(step - (found.factor - 1) * usual, usual) - 1


def gaining(gain: float, spread: float, before: float, cost: float) -> Effect:
    """Return an expected gain as a share of the speed ``before``, give or take ``spread`` of the gain."""
    low, middle, high = (before * (1 + gain * factor) for factor in (1 - spread, 1, 1 + spread))
    return Effect(throughput=middle, low=low, high=high, before=before, cost=cost)


def between(one: Size, size: Size, other: Size) -> bool:
    """Return whether a size lies between two others, in each role."""
    bounds = zip(one, size, other, strict=True)
    return all(min(a, b) <= n <= max(a, b) for a, n, b in bounds)
