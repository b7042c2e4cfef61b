"""Plans: the wanted resources of a job, the reason, and the expected effect."""

from __future__ import annotations

import msgspec


class Group(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
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


class Plan(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Wanted resources of a job, by kind of node (``worker``, ``ps``)."""

    groups: dict[str, Group]
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

    @property
    def worthwhile(self) -> bool:
        """True if the job is faster than before the plan."""
        return self.throughput > self.effect.before
