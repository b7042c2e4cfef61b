"""The status of a job, as clients see it."""

from __future__ import annotations

from collections.abc import Mapping

from dlrover.master.machine.job import JobMachine
from dlrover.master.machine.state import Node
from dlrover.master.machine.waiting import waiting_for
from dlrover.rpc import messages
from dlrover.spec.measurements import NodeUsage
from dlrover.spec.node import SPARE, NodeStatus

_UNKNOWN = NodeUsage(0.0, 0, 0)


def status_of(
    machine: JobMachine,
    now: float,
    steps: dict[int, int],
    doing: Mapping[int, str] | None = None,
    usage: Mapping[int, NodeUsage] | None = None,
) -> messages.Status:
    """Return the status of a job at time ``now``.

    By node: ``steps`` is its latest step count, ``doing`` its activity, ``usage`` its resource usage.
    """
    doing, usage = doing or {}, usage or {}
    ranks = {node_id: rank for rank, node_id in enumerate(machine.rendezvous.members)}
    current = max(
        [
            machine.progress.steps,
            *(steps.get(i, 0) for i in ranks if i not in machine.rendezvous.servers),
        ]
    )
    outcome, alone = machine.outcome, machine.instances.running
    return messages.Status(
        name=machine.job.name,
        phase=machine.state.phase.value,
        round=machine.rendezvous.round,
        world_size=machine.rounds.world_size,
        instances=alone.nodes,
        servers=machine.rounds.world_size - machine.rounds.workers + alone.servers,
        restarts=machine.restarts.count,
        steps=current,
        total_steps=machine.progress.earlier_steps + current,
        step=_number(machine, current),
        waiting_for=waiting_for(machine, now),
        nodes=tuple(
            _state_of(
                node,
                machine.fleet.role(node.id),
                _word(node, machine, ranks),
                ranks.get(node.id, -1),
                steps.get(node.id, machine.progress.steps if _steps(node, machine, ranks) else 0),
                doing.get(node.id, ""),
                usage.get(node.id, _UNKNOWN),
            )
            for node in machine.nodes.values()
        ),
        outcome=outcome,
        seconds=outcome.seconds if outcome else now - machine.state.submitted_at,
        size=size_of(machine),
    )


def _number(machine: JobMachine, steps: int) -> int:
    """Return the last step's number; after a restart, that of the step before it until the next is known."""
    if machine.progress.first_step >= 0:
        return machine.progress.first_step + steps
    return -1 if steps else machine.progress.reached


def _word(node: Node, machine: JobMachine, ranks: Mapping[int, int]) -> str:
    """Return a node's status; the job's phase for a node of the last world that was released after the end."""
    if node.id in ranks and machine.outcome is not None and node.status is NodeStatus.RELEASED:
        return machine.state.phase.value
    return SPARE if machine.spares.of(node.id) else node.status.value


def _steps(node: Node, machine: JobMachine, ranks: Mapping[int, int]) -> bool:
    """Return whether a node has made the steps of the last world."""
    return node.id in ranks and node.id not in machine.rendezvous.servers


def _state_of(
    node: Node, role: str, status: str, rank: int, steps: int, doing: str, usage: NodeUsage
) -> messages.NodeState:
    runs = node.status is NodeStatus.RUNNING
    usage = usage if runs else _UNKNOWN
    return messages.NodeState(
        id=node.id,
        node_rank=rank if runs or node.status is NodeStatus.RELEASED else -1,
        status=status,
        hostname=node.hostname,
        connected=node.connected,
        steps=steps,
        doing=doing if runs else "",
        role=role,
        memory=usage.memory,
        memory_limit=usage.limit,
        cpu=usage.cpu,
        cores=usage.cores,
        busy=usage.busy,
    )


def size_of(machine: JobMachine) -> str:
    """Return ``2 of 1:4 nodes`` and the auto-scaler's stage or plan; empty if the node counts are fixed."""
    job, scaling, size = machine.job, machine.autoscaling, machine.rendezvous.size
    parts = []
    if job.min_nodes < job.max_nodes:
        kind = "workers" if job.max_servers else "nodes"
        parts.append(f"{size.workers} of {job.min_nodes}:{job.max_nodes} {kind}")
    least, most = job.world_servers
    if least < most:
        parts.append(f"{size.servers} of {least}:{most} servers")
    sizes = " and ".join(parts)
    if not sizes or not scaling.active or machine.outcome is not None:
        return sizes
    change = scaling.change
    if change is None:
        return f"{sizes}, auto-scaling: {scaling.stage.value}"
    what = change.origin.change_to(change.size) or "the same size"
    return f"{sizes}, auto-scaling: plan {change.number} ({change.kind.value}), {what}"
