"""What a job shall have, why, and what that is expected to bring."""

from __future__ import annotations

import msgspec


class Group(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Nodes of one kind, and what each of them gets."""

    count: int
    cpu: float = 0.0
    """Cores."""
    memory: int = 0
    """Bytes; 0 where the plan leaves it as it is."""
    accelerators: int = 0


class Effect(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a plan is predicted to bring."""

    throughput: float
    """Samples per second."""
    low: float
    """The throughput lies above this, with half of what ``confidence`` leaves out below it."""
    high: float
    confidence: float = 0.9
    """How often the measured throughput should lie between ``low`` and ``high``."""
    before: float = 0.0
    """Samples per second without the plan; 0 where nothing runs yet."""
    cost: float = 0.0
    """Price of the nodes for an hour, in the unit of the prices that the search was given."""


class Plan(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Wanted resources of a job, by kind of node (``worker``, ``ps``)."""

    groups: dict[str, Group]
    reason: str
    """One sentence."""
    effect: Effect | None = None
    """None where no model could say: a first plan, or more memory after an OOM."""
    batch: int | None = None
    """Samples of one step of all workers; None where the plan leaves it as it is."""


class PlanOutcome(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A plan beside what was measured after it had been applied."""

    effect: Effect
    throughput: float
    """Samples per second, measured."""

    @property
    def error(self) -> float:
        """By how much the measured throughput differs from the predicted one, relative to that."""
        return self.throughput / self.effect.throughput - 1

    @property
    def within(self) -> bool:
        """Whether the measured throughput lies in the predicted interval."""
        return self.effect.low <= self.throughput <= self.effect.high

    @property
    def worthwhile(self) -> bool:
        """Whether the job is faster than before the plan."""
        return self.throughput > self.effect.before
