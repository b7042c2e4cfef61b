"""Which nodes and hosts a job goes on without: faults counted by node, hosts kept out for a while."""

from __future__ import annotations

from dataclasses import dataclass, field

from dlrover.spec.failure import Action, Origin, Verdict
from dlrover.spec.job import JobSpec


@dataclass
class Faults:
    """The faults of one job's nodes. Change it only through its methods."""

    job: JobSpec
    #: times of the faults of each node within the window, other than the program's
    by_node: dict[int, list[float]] = field(default_factory=dict)
    #: until when each host is kept out
    excluded_until: dict[str, float] = field(default_factory=dict)
    #: why
    reasons: dict[str, str] = field(default_factory=dict)

    def action(self, node_id: int, verdict: Verdict, now: float) -> Action:
        """What is to be done about a failure on a node: its verdict's action, or more if it repeats."""
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
        """A node is gone; what takes its place begins without faults."""
        self.by_node.pop(node_id, None)

    def exclude(self, hostname: str, reason: str, now: float) -> None:
        """Keep a host out for the cool-down."""
        self.excluded_until[hostname] = now + self.job.limits.exclusion_cooldown
        self.reasons[hostname] = reason

    def excluded(self, now: float) -> tuple[str, ...]:
        """The hosts that are kept out at time ``now``, in order of their names."""
        return tuple(sorted(host for host, until in self.excluded_until.items() if until > now))

    def refusal(self, hostname: str, now: float) -> str:
        """Why a host is kept out, as one sentence; empty if it is not."""
        left = self.excluded_until.get(hostname, 0.0) - now
        if left <= 0:
            return ""
        return (
            f"host {hostname} is kept out of the job for {left:.0f} s more (exclusion_cooldown): "
            f"{self.reasons[hostname]}."
        )

    def validate(self) -> None:
        """Check the invariants; raise AssertionError on the first that is broken."""
        assert self.excluded_until.keys() == self.reasons.keys()
        assert all(times == sorted(times) for times in self.by_node.values())
