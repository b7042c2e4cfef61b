"""The size of a job in words, for whoever looks at it."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from dlrover.master.machine.job import JobMachine


def size_of(machine: JobMachine) -> str:
    """``2 of 1:4 nodes``, and what auto-scaling is about; empty for a job with a fixed number of nodes."""
    job, scaling = machine.job, machine.autoscaling
    if job.min_nodes == job.max_nodes:
        return ""
    size = f"{len(machine.rendezvous.members)} of {job.min_nodes}:{job.max_nodes} nodes"
    if not scaling.active or machine.outcome is not None:
        return size
    change = scaling.change
    if change is None:
        return f"{size}, auto-scaling: {scaling.stage.value}"
    return f"{size}, auto-scaling: plan {change.number} ({change.kind.value}), {change.origin} -> {change.nodes} nodes"
