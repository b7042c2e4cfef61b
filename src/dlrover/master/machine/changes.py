"""A change of a job's size: what is asked before it, what is kept of it, and how it is told."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from dlrover.planning.throughput import TrustRegion
from dlrover.spec import events
from dlrover.spec.plan import Effect, Group, Plan
from dlrover.spec.roles import SERVER, WORKER, Size
from dlrover.spec.speed import ScaleDecision, ScaleKind, SpeedSample

SAME_SIZE = (ScaleKind.REPLACE, ScaleKind.MIGRATE, ScaleKind.REBALANCE)
"""Changes that leave the numbers of nodes as they are."""


@dataclass(frozen=True)
class Question:
    """What is known of a job when its size is looked at."""

    current: SpeedSample
    """The running world."""
    samples: Sequence[SpeedSample]
    """Of all sizes that were measured, this one included."""
    sizes: Sequence[int]
    """Numbers of nodes that the job may have; with servers, of role worker."""
    region: TrustRegion
    cost: float
    """How much nodes cost, 0 to 1."""
    explore: bool
    """Whether a size may be tried only to learn of it."""
    servers: Sequence[int] = (0,)
    """Numbers of servers that it may have."""


@dataclass
class Change:
    """A plan that is carried out."""

    number: int
    kind: ScaleKind
    size: Size
    origin: Size
    """What there was before it."""
    effect: Effect | None
    since: float
    round: int
    """The round that it began in."""
    plan_id: str = ""
    """The Brain's name for it, if it is the Brain's."""
    batch_before: int = 0
    """The chosen global batch that there was before it; 0: the program's own."""


def groups_of(size: Size) -> dict[str, Group]:
    """The nodes of a size, by role."""
    groups = {WORKER: Group(count=size.workers)}
    if size.servers:
        groups[SERVER] = Group(count=size.servers)
    return groups


def direction(origin: Size, size: Size) -> ScaleKind:
    """Whether a size is more or fewer nodes than another one."""
    return ScaleKind.GROW if size.nodes > origin.nodes else ScaleKind.SHRINK


def decided(
    kind: ScaleKind,
    size: Size,
    reason: str,
    effect: Effect | None,
    plan_id: str = "",
    batch: int = 0,
) -> ScaleDecision:
    """That the job shall have this size, and this global batch unless it is 0."""
    plan = Plan(groups=groups_of(size), reason=reason, effect=effect)
    return ScaleDecision(
        kind=kind, nodes=size.workers, servers=size.servers, batch=batch, plan=plan, plan_id=plan_id
    )


def told_change(origin: Size, size: Size) -> str:
    """``1 -> 2 nodes``; with servers, what changes of both."""
    if not size.servers:
        return f"{origin.workers} -> {size.workers} nodes"
    pairs = zip(("workers", "servers"), origin, size, strict=True)
    return ", ".join(f"{old} -> {new} {role}" for role, old, new in pairs if old != new)


def gain_without(found: events.SlowRank, latest: SpeedSample) -> float:
    """By which share a job is faster when a slow rank is as fast as the others.

    In a synchronous job all wait for it. With servers nobody does: it costs its own share only.
    """
    if latest.servers:
        others = latest.replicas - 1
        return latest.replicas / (others + 1 / found.factor) - 1
    usual = latest.compute_seconds or latest.step_seconds / found.factor
    waited = (found.factor - 1) * usual
    return latest.step_seconds / max(latest.step_seconds - waited, usual) - 1
