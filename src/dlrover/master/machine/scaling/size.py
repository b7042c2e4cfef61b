"""The size of a job in words, for users."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dlrover.master.machine.scaling.changes import told_change

if TYPE_CHECKING:
    from dlrover.master.machine.job import JobMachine


def size_of(machine: JobMachine) -> str:
    """Return ``2 of 1:4 nodes`` and the auto-scaler's stage or plan; empty if the node counts are fixed."""
    job, scaling, size = machine.job, machine.autoscaling, machine.rendezvous.size
    parts = []
    if job.min_nodes < job.max_nodes:
        kind = "workers" if job.max_servers else "nodes"
        parts.append(f"{size.workers} of {job.min_nodes}:{job.max_nodes} {kind}")
    if job.min_servers < job.max_servers:
        parts.append(f"{size.servers} of {job.min_servers}:{job.max_servers} servers")
    told = " and ".join(parts)
    if not told or not scaling.active or machine.outcome is not None:
        return told
    change = scaling.change
    if change is None:
        return f"{told}, auto-scaling: {scaling.stage.value}"
    what = told_change(change.origin, change.size) or "the same size"
    return f"{told}, auto-scaling: plan {change.number} ({change.kind.value}), {what}"
