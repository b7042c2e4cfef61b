"""Faults counted by node, and hosts excluded from the job for some time."""

from __future__ import annotations

from dataclasses import dataclass, field

from dlrover.spec.failure import Action, Origin, Verdict
from dlrover.spec.job import JobSpec


@dataclass
class Faults:
    """Faults of one job's nodes. Change it only through its methods."""

    job: JobSpec
    #: times of each node's faults within the window, excluding echoes and the program's faults
    by_node: dict[int, list[float]] = field(default_factory=dict)
    #: end of each host's exclusion
    excluded_until: dict[str, float] = field(default_factory=dict)
    #: reason of each host's exclusion
    reasons: dict[str, str] = field(default_factory=dict)

    def action(self, node_id: int, verdict: Verdict, now: float) -> Action:
        """Return the action for a failure on a node: its verdict's, or a stronger one if failures repeat."""
        if verdict.echo or verdict.origin is Origin.USER:
            return verdict.action
        limit = self.job.limits.node_fault_limit
        since = now - self.job.limits.restart_window
        times = [time for time in self.by_node.get(node_id, []) if time > since]
        self.by_node[node_id] = [*times, now]
        repeated = 0 < limit <= len(times) + 1
        if repeated and verdict.action in (Action.RESTART, Action.RESTART_FRESH):
            return Action.RELAUNCH
        return verdict.action

    def forget(self, node_id: int) -> None:
        """Forget the faults of a node that is gone; its successor starts without any."""
        self.by_node.pop(node_id, None)

    def exclude(self, hostname: str, reason: str, now: float) -> None:
        """Exclude a host for the cool-down."""
        self.excluded_until[hostname] = now + self.job.limits.exclusion_cooldown
        self.reasons[hostname] = reason

    def excluded(self, now: float) -> tuple[str, ...]:
        """Return the hosts excluded at time ``now``, sorted by name."""
        return tuple(sorted(host for host, until in self.excluded_until.items() if until > now))

    def refusal(self, hostname: str, now: float) -> str:
        """Return why a host is excluded, as one sentence; empty if it is not."""
        left = self.excluded_until.get(hostname, 0.0) - now
        if left <= 0:
            return ""
        return (
            f"host {hostname} is kept out of the job for {left:.0f} s more (exclusion_cooldown): "
            f"{self.reasons[hostname]}."
        )

    def validate(self) -> None:
        """Check the invariants; raise AssertionError on the first broken one."""
        assert self.excluded_until.keys() == self.reasons.keys()
        assert all(times == sorted(times) for times in self.by_node.values())
